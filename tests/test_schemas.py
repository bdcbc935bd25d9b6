"""Tables whose columns depend on the run: types, marks, and values that come back as they went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kvlens
from kvlens.schemas import CEILINGS, CEILINGS_TABLES, LABELS, SCHEMAS, SIGNALS, table_schema, to_arrow
from kvlens.store import open_run

CONFIG: dict[str, Any] = {"signals": ["depth", "plain"], "per_layer": ["depth"], "causal": ["plain"], "n_layers": 3}
IDENTITY: dict[str, Any] = {"model": {"name": "m", "fingerprint": "f", "note": ""}, "input_hash": "h", "seed": 0}
MATRIX = np.array([[np.nan, 1, 2], [3, np.inf, -4.5]], dtype=np.float32)
ROWS = {"trace_id": "a", "pos": [0, 1], "token_id": [7, 8], "depth": MATRIX, "plain": [np.nan, 2.5]}


def test_signals_make_columns_and_other_tables_stay() -> None:
    schema = table_schema(SIGNALS, "signals", CONFIG)
    assert schema.names == ["trace_id", "pos", "token_id", "depth", "plain"]
    assert schema.field("depth").type == pa.list_(pa.float32(), 3)
    assert schema.field("plain").type == pa.float32()
    assert [schema.field(name).metadata for name in ("depth", "plain")] == [{b"causal": b"false"}, {b"causal": b"true"}]
    assert table_schema(SIGNALS, "traces", CONFIG) is SCHEMAS[SIGNALS]["traces"]
    assert all(table_schema(LABELS, name, {}) is schema for name, schema in SCHEMAS[LABELS].items())


def test_values_come_back_as_they_went_in(tmp_path: Path) -> None:
    with open_run(tmp_path, schema=SIGNALS, config=CONFIG, dtype="float32", **IDENTITY) as run:
        run.write_part("signals", "a", ROWS)
        run.write_part("traces", "a", {"trace_id": ["a"], "n_tokens": 3, "n_prompt": 1, "n_context": 2})
        assert np.array_equal(np.stack(run.read_part("signals", "a").depth), MATRIX, equal_nan=True)
        run.finish({"signals": ["a"], "traces": ["a"]})
    rows = kvlens.load(tmp_path).signals
    depth = np.stack(rows.depth)
    assert depth.dtype == np.float32
    assert np.array_equal(depth, MATRIX, equal_nan=True)
    assert rows.depth.notna().all()  # a list is never null: what is undefined in it is NaN
    assert rows.plain.isna().tolist() == [True, False]
    stored = pq.read_table(tmp_path / "signals.parquet")
    assert stored.column("plain").null_count == 1
    assert stored.schema.field("depth").metadata[b"causal"] == b"false"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": MATRIX[:, :2]}, "lists of 3"),
        ({"depth": MATRIX[:, 0]}, "lists of 3"),
        ({"depth": MATRIX[:1]}, "one length"),
        ({"other": [1, 2]}, r"\['other'\] are not in the schema"),
    ],
)
def test_columns_of_another_shape_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_arrow(ROWS | change, table_schema(SIGNALS, "signals", CONFIG))


def test_the_columns_of_ceilings_are_fixed() -> None:
    kinds = dict.fromkeys(("trace_id", "scope"), pa.string()) | dict.fromkeys(("budget", "n_keys", "query"), pa.int32())
    kinds |= {"layer": pa.int16(), "head": pa.int16(), "n_subsets": pa.int64()}
    kinds |= {"closable": pa.bool_(), "exact": pa.bool_(), "flat": pa.bool_(), "n_rows": pa.int32()}
    rows, cells = CEILINGS_TABLES["rows"], CEILINGS_TABLES["cells"]
    assert rows.names == [
        "trace_id", "layer", "head", "query", "n_keys", "budget", "top_mass_error", "best_error", "balanced_error",
        "scope", "dropped_mass", "kappa", "ceiling", "closable", "n_subsets", "exact", "effective_rank", "sigma",
        "balanced_all_error", "free_error", "free_gap", "free_top_error", "free_top_gap", "free_search_error",
        "free_search_gap",
    ]  # fmt: skip
    assert cells.names == ["layer", "head", "median_dropped_mass", "flat", "n_rows", "auc"]
    for field in (*rows, *cells):
        assert field.type == kinds.get(field.name, pa.float64()), field.name
        assert field.nullable == (field.name.startswith("free") or field.name == "auc"), field.name
    assert all(table_schema(CEILINGS, name, {}) is schema for name, schema in CEILINGS_TABLES.items())


def test_an_infinite_kappa_is_a_number_and_an_unknown_auc_is_null(tmp_path: Path) -> None:
    errors = {name: 0.5 for name in CEILINGS_TABLES["rows"].names if name not in CEILINGS_TABLES["cells"].names}
    rows = errors | {"trace_id": "a", "scope": "all", "closable": True, "exact": True, "n_subsets": 3, "budget": 2}
    rows |= {"layer": [0, 1], "head": 0, "query": 4, "n_keys": 5, "kappa": [np.inf, 1.0]}
    cells = {"layer": 0, "head": [0, 1], "median_dropped_mass": 0.2, "flat": False, "n_rows": 1, "auc": [np.nan, 0.5]}
    with open_run(tmp_path, schema=CEILINGS, config={}, dtype="float32", **IDENTITY) as run:
        run.write_part("rows", "a", rows)
        run.write_part("cells", "all", cells)
        run.finish({"rows": ["a"], "cells": ["all"]}, documents={"summary": {"schema": CEILINGS}})
    found = kvlens.load(tmp_path)
    assert found.rows.kappa.tolist() == [np.inf, 1.0]
    assert found.cells.auc.isna().tolist() == [True, False]
    with pytest.raises(ValueError, match="'kappa' is missing or has nulls"):
        to_arrow(rows | {"kappa": [np.nan, 1.0]}, CEILINGS_TABLES["rows"])
