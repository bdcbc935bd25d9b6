"""Do a label run and a signals run speak of the same tokens, and which tokens count?

1. Roles and models: the first run must hold labels, the second signals, of one model.
2. Tokens: every labelled trace must have its signals, at the same positions and (where recorded) the same token ids;
   the first mismatch is named.
3. Which tokens count: the reasoning, labelled, without position 0 and what shares a window with it. A run made with
   `--screen` counts only where it is asked to use its audit windows: the others were chosen by the effect they
   promised.
4. Which traces count: those longer than the windows that smoothed them, with enough tokens and labels that vary. The
   others are counted with their reason; none left is an error.

Only the signals that are asked for are read: a run holds many, each a number per layer and token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Int

from kvlens.disk import as_path, disk
from kvlens.errors import InputError
from kvlens.findings import beside_sink
from kvlens.loading import Run, intact, load, read_meta
from kvlens.probe.tables import mean_over_windows
from kvlens.schemas import LABELS, SIGNALS, read_parquet

KEYS = ("trace_id", "pos", "token_id")
ROLLING_WINDOW = 64
LEAST_TOKENS = 16
LEAST_TRACES = 12  # to discover in one half and confirm in the other: six traces have 64 patterns of signs


@dataclass(frozen=True)
class Labelled:
    """The tokens of one trace that count: their positions, effects in nats, and rows in the signals table."""

    trace_id: str
    pos: Int[np.ndarray, " pos"]
    effect: Float[np.ndarray, " pos"]
    rows: Int[np.ndarray, " pos"]


@dataclass(frozen=True)
class Pair:
    """A label run and a signals run that fit, with the traces that count."""

    labels: Run
    signals_path: Path
    signals_meta: dict[str, Any]
    fields: dict[str, pa.Field]
    traces: list[Labelled]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def trace_ids(self) -> list[str]:
        return [trace.trace_id for trace in self.traces]

    def read(self, name: str) -> Float[np.ndarray, "row layer"]:
        """One signal, every row of the table; a signal without layers has one column. Nulls are NaN."""
        with disk(f"reading '{self.signals_path}'"), open(self.signals_path / "signals.parquet", "rb") as stream:
            column = read_parquet(stream, [name]).column(name).combine_chunks()
        if not pa.types.is_fixed_size_list(column.type):
            return np.asarray(column.to_numpy(zero_copy_only=False), dtype=float)[:, None]
        found = np.full((len(column), column.type.list_size), np.nan)
        values = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, column.type.list_size)
        found[column.is_valid().to_numpy(zero_copy_only=False)] = values
        return found

    def per_layer(self, name: str) -> bool:
        """Whether a signal has a value for every layer."""
        return bool(pa.types.is_fixed_size_list(self.fields[name].type))

    def n_layers(self) -> int | None:
        """The number of layers of the per-layer signals; None where there are none."""
        sizes = [f.type.list_size for name, f in self.fields.items() if self.per_layer(name)]
        return max(sizes) if sizes else None

    def causal(self, name: str) -> bool | None:
        """Whether a signal's value at a token needs nothing after it; None where the run does not say."""
        mark = (self.fields[name].metadata or {}).get(b"causal")
        marked: list[str] | None = self.signals_meta["config"].get("causal")
        if mark is not None:
            return bool(mark == b"true")
        return None if marked is None else name in marked

    def input_hash(self) -> str:
        """The SHA-256 of both runs' tables: other content makes another run."""
        digest = hashlib.sha256()
        for meta in (self.labels.meta, self.signals_meta):
            for name, facts in sorted(meta["tables"].items()):
                digest.update(f"{name} {facts['sha256']} ".encode())
        return digest.hexdigest()


def read_pair(labels: Run | str | Path, signals: Run | str | Path, *, audit_only: bool = False) -> Pair:
    """The two runs, checked against each other, with the traces and tokens that count.

    Raises: InputError for a run of another kind or damaged, for runs that do not fit, or when no trace is left.
    """
    run = label_run(labels, "LABELS")
    path = as_path(signals.path if isinstance(signals, Run) else signals, "SIGNALS")
    meta = read_meta(path)
    if meta["schema"] != SIGNALS:
        raise InputError(
            f"'{path}' is given as SIGNALS, but its schema is '{meta['schema']}'", "give LABELS first, then SIGNALS"
        )
    there, here = meta["model"]["fingerprint"], run.meta["model"]["fingerprint"]
    if there != here and meta["dtype"] != run.meta["dtype"] and there.split("-")[0] == here.split("-")[0]:
        raise InputError(
            f"'{run.path}' is in {run.meta['dtype']} and '{path}' in {meta['dtype']}: other weights, other signals",
            "observe with the --dtype of the labels",
        )
    if there != here:
        raise InputError(
            f"'{run.path}' and '{path}' are of different models: fingerprint {here} ({run.meta['model']['name']}) and "
            f"{there} ({meta['model']['name']})",
            "observe the traces with the model that labelled them",
        )
    with open(intact(path, meta, "signals.parquet"), "rb") as stream:
        try:
            schema = pq.read_schema(stream)
            keys = read_parquet(stream, [name for name in KEYS if name in schema.names]).to_pandas()
        except (pa.ArrowException, KeyError) as error:
            raise InputError(f"loading '{path}' failed: {error}", "run its command again with --force") from error
    rows = _matched(run, path, keys)
    window = max(
        int(run.meta["config"].get("window") or 1), int(meta["config"].get("rolling_window") or ROLLING_WINDOW)
    )
    counted = counted_tokens(run, audit_only)
    traces, skipped = [], {str(entry["id"]): str(entry["reason"]) for entry in run.meta["counts"]["skipped"]}
    for trace_id in run.traces.trace_id:
        tokens = counted.get(trace_id)
        reason = "it has no labelled reasoning tokens" if tokens is None else _unfit(tokens, window)
        if reason or tokens is None:
            skipped[trace_id] = reason
            continue
        pos = tokens.pos.to_numpy(dtype=int)
        traces.append(Labelled(trace_id, pos, tokens.effect_nats.to_numpy(dtype=float), rows[trace_id][pos]))
    if not traces:
        first = next(iter(skipped.items()), ("", "the run has none"))
        raise InputError(
            f"no trace of '{run.path}' can be used, such as {first[0]!r}: {first[1]}", "label longer or other traces"
        )
    return Pair(run, path, meta, {f.name: f for f in schema if _is_signal(f)}, traces, skipped)


def label_run(labels: Run | str | Path, role: str) -> Run:
    """The label run given as `role`. Raises: InputError when it is of another schema, or several runs stacked."""
    run = labels if isinstance(labels, Run) else load(labels)
    if run.schema != LABELS or "runs" in run.meta:
        what = "several runs are stacked there" if "runs" in run.meta else f"its schema is '{run.schema}'"
        hint = "give LABELS first, then SIGNALS" if run.schema == SIGNALS else "give the folder of one label run"
        raise InputError(f"'{run.path}' is given as {role}, but {what}", hint)
    return run


def counted_tokens(run: Run, audit_only: bool, segments: tuple[str, ...] = ("reasoning",)) -> dict[str, pd.DataFrame]:
    """By trace, the labelled tokens of these segments in order, without position 0 and its window.

    Raises: InputError for a screened run without `audit_only`, or the reverse.
    """
    tokens = run.tokens
    apart = beside_sink(run, tokens)
    if is_screened(run):
        if not audit_only:
            raise InputError(
                f"'{run.path}' was made with a screen: its windows were chosen by the effect they promised",
                "add --audit-only to use its random audit set alone, or label without --screen",
            )
        tokens = tokens.assign(effect_nats=_audit_effects(run))
    elif audit_only:
        raise InputError(f"'{run.path}' was made without a screen and has no audit set", "drop --audit-only")
    chosen = tokens[tokens.segment.isin(segments) & np.isfinite(tokens.effect_nats) & ~apart]
    return {str(trace_id): rows.sort_values("pos") for trace_id, rows in chosen.groupby("trace_id", sort=False)}


def is_screened(run: Run) -> bool:
    """Whether some windows were chosen by a screen."""
    return bool((run.windows.selected_by != "all").any())


def halves(trace_ids: list[str], seed: int) -> Bool[np.ndarray, " trace"]:
    """True for the traces to discover in, False for those to confirm in; the order of the traces does not matter."""
    order = np.argsort(np.array(trace_ids))
    discover = np.zeros(len(trace_ids), dtype=bool)
    discover[order[np.random.default_rng(seed).permutation(len(order))[: (len(order) + 1) // 2]]] = True
    return discover


def _audit_effects(run: Run) -> Float[np.ndarray, " row"]:
    """The effect of every row of `run.tokens` by the audit windows alone; NaN where none covers it."""
    audit = run.windows[run.windows.selected_by == "audit"]
    found = np.full(len(run.tokens), np.nan)
    by_trace = dict(list(audit.groupby("trace_id")))
    for trace_id, index in run.tokens.groupby("trace_id").indices.items():
        if trace_id in by_trace:
            windows, pos = by_trace[trace_id], run.tokens.pos.to_numpy()[index]
            found[index] = mean_over_windows(int(pos.max()) + 1, windows)[pos]
    return found


def _unfit(tokens: pd.DataFrame, window: int) -> str:
    """Why a trace says nothing, or nothing when it counts."""
    n, length = len(tokens), int(tokens.pos.max() - tokens.pos.min()) + 1
    if length < window:
        return f"its {length} labelled reasoning tokens are fewer than the window of {window}"
    if n < LEAST_TOKENS:
        return f"it has {n} labelled reasoning tokens, and {LEAST_TOKENS} are needed"
    if tokens.effect_nats.nunique() < 2:
        return "all its labels are equal"
    return ""


def _matched(run: Run, path: Path, keys: pd.DataFrame) -> dict[str, Int[np.ndarray, " pos"]]:
    """By trace, the row of the signals table at each position, -1 where the trace has none.

    Raises: InputError at the first token that differs.
    """
    hint = "observe the traces that were labelled, with the same tokenizer and options"
    indices = keys.groupby("trace_id", sort=False).indices
    rows = {}
    for trace_id, tokens in run.tokens[run.tokens.segment != "target"].groupby("trace_id", sort=False):
        where = f"trace {trace_id!r}"
        if trace_id not in indices:
            raise InputError(f"{where} of '{run.path}' has no signals in '{path}'", hint)
        index = indices[trace_id]
        index = index[np.argsort(keys.pos.to_numpy()[index], kind="stable")]
        wanted = tokens.sort_values("pos")
        for name in (name for name in ("pos", "token_id") if name in keys):
            labelled, observed = wanted[name].to_numpy(), keys[name].to_numpy()[index]
            if len(labelled) != len(observed):
                raise InputError(
                    f"{where} has {len(labelled)} positions in '{run.path}' and {len(observed)} in '{path}'", hint
                )
            if len(wrong := np.flatnonzero(labelled != observed)):
                raise InputError(
                    f"{where}, position {wanted.pos.iloc[wrong[0]]}: {name} {labelled[wrong[0]]} in '{run.path}' and "
                    f"{observed[wrong[0]]} in '{path}'",
                    hint,
                )
        by_position = np.full(int(wanted.pos.max()) + 1, -1)
        by_position[wanted.pos.to_numpy()] = index
        rows[str(trace_id)] = by_position
    return rows


def _is_signal(column: pa.Field) -> bool:
    kind = column.type.value_type if pa.types.is_fixed_size_list(column.type) else column.type
    number = pa.types.is_floating(kind) or (pa.types.is_integer(kind) and kind == column.type)
    return column.name not in KEYS and bool(number)
