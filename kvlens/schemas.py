"""The tables and documents of every run schema: which columns, of which type, and which of them may be null.

Columns are fixed: adding one is fine, renaming one needs a new schema version. A run of signals has one more column for
each signal it was asked for, so `table_schema` reads its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool

from kvlens.ceiling_schema import CEILINGS_TABLES, schema_of

LABELS = "kvlens.labels/1"
SIGNALS = "kvlens.signals/1"
BANDS = "kvlens.bands/1"
RANKING = "kvlens.ranking/1"
AGREEMENT = "kvlens.agreement/1"
CEILINGS = "kvlens.ceilings/1"
SURPRISE = "kvlens.surprise/1"
AUDIT = "kvlens.audit/1"


LABELS_TABLES: dict[str, pa.Schema] = {
    "windows": schema_of(
        [
            ("trace_id", pa.string()),
            ("window_start", pa.int32()),
            ("window_end", pa.int32()),
            ("intervention", pa.string()),
            ("cells", pa.string()),
            ("selected_by", pa.string()),
        ],
        [
            ("effect_nats", pa.float64()),
            ("kl_nats", pa.float64()),
            ("flipped", pa.bool_()),
            ("per_target", pa.list_(pa.float32())),
            ("lag", pa.int32()),
            ("metric_effect", pa.float64()),
        ],
    ),
    "tokens": schema_of(
        [
            ("trace_id", pa.string()),
            ("pos", pa.int32()),
            ("token_id", pa.int32()),
            ("token", pa.string()),
            ("segment", pa.string()),
        ],
        [("effect_nats", pa.float64()), ("flipped", pa.bool_())],
    ),
    "traces": schema_of(
        [("trace_id", pa.string()), ("n_tokens", pa.int32()), ("n_target", pa.int32())],
        [("log_prob_full", pa.float64()), ("noise_nats", pa.float64())],
    ),
    # One row per random keep-mask of `--random-subsets`; `kept` is `pack_kept` of the context positions.
    "subsets": schema_of(
        [("trace_id", pa.string()), ("subset", pa.int32()), ("kept", pa.binary())],
        [("effect_nats", pa.float64())],
    ),
}

# `signals` has a column for each signal besides; positions are those of prompt and reasoning.
SIGNALS_TABLES: dict[str, pa.Schema] = {
    "signals": schema_of([("trace_id", pa.string()), ("pos", pa.int32()), ("token_id", pa.int32())], []),
    "traces": schema_of(
        [
            ("trace_id", pa.string()),
            ("n_tokens", pa.int32()),
            ("n_prompt", pa.int32()),
            ("n_context", pa.int32()),
        ],
        [],
    ),
}

# Of prompt and reasoning; a variant is its words, such as `fast`. `refreshes` only where a budget was given.
SURPRISE_TABLES: dict[str, pa.Schema] = {
    "scores": schema_of(
        [("trace_id", pa.string()), ("variant", pa.string()), ("pos", pa.int32())], [("score", pa.float32())]
    ),
    "tokens": schema_of(
        [
            ("trace_id", pa.string()),
            ("pos", pa.int32()),
            ("token_id", pa.int32()),
            ("token", pa.string()),
            ("segment", pa.string()),
        ],
        [],
    ),
    "traces": SIGNALS_TABLES["traces"],
    # a row for each token held before a refresh; `n_seen` tokens of the text had gone in by then
    "refreshes": schema_of(
        [
            ("trace_id", pa.string()),
            ("variant", pa.string()),
            ("refresh", pa.int32()),
            ("n_seen", pa.int32()),
            ("pos", pa.int32()),
            ("kept", pa.bool_()),
        ],
        [("score", pa.float32())],
    ),
}

# A row for each method and each text it was tried on; `audit.json` sums them up. A method that could not run has none.
AUDIT_TABLES: dict[str, pa.Schema] = {
    "cases": schema_of(
        [
            ("method", pa.string()),
            ("trace_id", pa.string()),
            ("visibility", pa.string()),  # query_aware | query_agnostic
            ("n_seen", pa.int32()),  # tokens held when the method compressed
            ("n_target", pa.int32()),
        ],
        [
            ("claimed_bytes", pa.int64()),  # claimed_side_bytes among them, as side_bytes among physical_bytes
            ("claimed_side_bytes", pa.int64()),
            ("physical_bytes", pa.int64()),
            ("side_bytes", pa.int64()),
            ("peak_bytes", pa.int64()),
            ("full_bytes", pa.int64()),
            ("simulated", pa.bool_()),
            ("kept_tokens", pa.int64()),  # over all layers and KV heads
            ("kl_nats", pa.float64()),  # mean over the target's tokens
            ("next_token_agreement", pa.float64()),
            ("seconds", pa.float64()),
            ("refused", pa.string()),  # why it did not run on this text
            ("note", pa.string()),  # what a reader of its numbers must know
        ],
    )
}

RANKING_TABLES: dict[str, pa.Schema] = {
    "ranking": schema_of(
        [
            ("signal", pa.string()),
            ("choice", pa.string()),  # each layer | best layer | only value (a signal without layers)
            ("traces", pa.string()),  # which traces the numbers are of: all | confirm
            ("n_traces", pa.int32()),
            ("n_undefined", pa.int32()),  # traces in which the correlation has no meaning
        ],
        [
            ("layer", pa.int32()),
            ("depth", pa.float64()),
            ("causal", pa.bool_()),
            *[
                (f"{name}{end}", pa.float64())
                for name in (
                    "rho",
                    "raw_rho",
                    "auc_size",
                    "auc_signed",
                    "adds_rho",
                    "adds_auc",
                    "drops_rho",
                    "drops_auc",
                )
                for end in ("", "_low", "_high")
            ],
        ],
    )
}

AGREEMENT_TABLES: dict[str, pa.Schema] = {
    "agreement": schema_of(
        [("trace_id", pa.string()), ("n_tokens", pa.int32()), ("n_above_noise", pa.int32())],
        [("spearman", pa.float64()), ("top_tenth_overlap", pa.float64()), ("sign_agreement", pa.float64())],
    )
}

SCHEMAS: dict[str, dict[str, pa.Schema]] = {
    LABELS: LABELS_TABLES,
    SIGNALS: SIGNALS_TABLES,
    BANDS: {},
    RANKING: RANKING_TABLES,
    AGREEMENT: AGREEMENT_TABLES,
    CEILINGS: CEILINGS_TABLES,
    SURPRISE: SURPRISE_TABLES,
    AUDIT: AUDIT_TABLES,
}

# What a run writes besides tables: `NAME.json`, each a document with its own schema.
DOCUMENTS: dict[str, tuple[str, ...]] = {
    BANDS: ("bands",),
    RANKING: ("fitted",),
    AGREEMENT: ("agreement",),
    CEILINGS: ("summary",),
    AUDIT: ("audit",),
}


def table_schema(schema: str, table: str, config: Mapping[str, Any]) -> pa.Schema:
    """The columns of one table of a run with this configuration.

    A run of signals names them in `config["signals"]`; those in `config["per_layer"]` are lists of `config["n_layers"]`
    numbers, NaN where undefined, the others one number, null where undefined. A column's metadata says whether the
    signal is `causal`: if not, a token's value depends on tokens after it.
    """
    columns = SCHEMAS[schema][table]
    if (schema, table) != (SIGNALS, "signals"):
        return columns
    for name in config["signals"]:
        per_layer = name in config["per_layer"]
        kind = pa.list_(pa.float32(), int(config["n_layers"])) if per_layer else pa.float32()
        causal = b"true" if name in config["causal"] else b"false"
        columns = columns.append(pa.field(name, kind, metadata={b"causal": causal}))
    return columns


def read_parquet(stream: BinaryIO | pa.NativeFile, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in an open file, or some of its columns.

    On this thread alone: a pool thread that still drops a Python buffer when the interpreter ends aborts the process.
    """
    wanted = None if columns is None else list(columns)
    return pq.ParquetFile(stream, pre_buffer=False).read(columns=wanted, use_threads=False)


def pack_kept(kept: Bool[np.ndarray, " pos"]) -> bytes:
    """A keep-mask (True = kept) as bytes, one bit a position, the first position in the highest bit."""
    return np.packbits(kept).tobytes()


def unpack_kept(packed: bytes, n_positions: int) -> Bool[np.ndarray, " pos"]:
    """The keep-mask (True = kept) of `n_positions` positions that `pack_kept` stored."""
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=n_positions).astype(bool)


def to_arrow(frame: pd.DataFrame | Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """The rows of `frame` in the types of `schema`; NaN becomes null, a scalar a constant column.

    A column of lists of one size is an array with one row a list; there NaN stays NaN.

    Raises: ValueError for a column that is unknown, missing though required, or null though required.
    """
    if unknown := [str(name) for name in frame if name not in schema.names]:
        raise ValueError(f"columns {unknown} are not in the schema, which has {schema.names}")
    lengths = {len(column) for column in (frame[name] for name in frame) if not _is_scalar(column)}
    if len(lengths) != 1:
        raise ValueError(f"columns of one length are needed, got lengths {sorted(lengths)}")
    n_rows = lengths.pop()
    columns = []
    for field in schema:
        column = frame.get(field.name)
        if pa.types.is_fixed_size_list(field.type) and column is not None:
            values = _lists(np.asarray(column), field.type)
        else:
            values = pa.array([column] * n_rows if _is_scalar(column) else column, type=field.type, from_pandas=True)
        if values.null_count and not field.nullable:
            raise ValueError(f"column '{field.name}' is missing or has nulls")
        columns.append(values)
    return pa.table(columns, schema=schema)


def _lists(column: np.ndarray, kind: pa.FixedSizeListType) -> pa.FixedSizeListArray:
    """The rows of a matrix as lists of one size."""
    if column.shape[1:] != (kind.list_size,):
        raise ValueError(f"rows of shape {column.shape[1:]} in a column of lists of {kind.list_size}")
    return pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1), type=kind.value_type), type=kind)


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """The table as a DataFrame; integers and booleans that may be null keep their kind (`Int32`, `boolean`)."""
    kinds = {pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}
    columns = {
        field.name: table.column(field.name).to_pandas(types_mapper=kinds.get if field.nullable else None)
        for field in table.schema
    }
    return pd.DataFrame(columns)


def _is_scalar(column: Any) -> bool:
    return column is None or isinstance(column, (str, bytes, bool, int, float, np.generic))
