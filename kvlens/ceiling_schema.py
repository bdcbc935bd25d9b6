"""The tables of a ceilings run: one line for each sampled query row and budget, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa


def schema_of(required: Iterable[tuple[str, pa.DataType]], optional: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """A table's columns: those that may not be null, then those that may."""
    fields = [pa.field(name, kind, nullable=False) for name, kind in required]
    return pa.schema(fields + [pa.field(name, kind) for name, kind in optional])


_ROW = [("trace_id", pa.string()), ("layer", pa.int16()), ("head", pa.int16()), ("query", pa.int32())]


def _numbers(*names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, pa.float64()) for name in names]


# One line for each sampled query row and budget, errors in the units of values; `cells` is of the predictors' budget.
CEILINGS_TABLES: dict[str, pa.Schema] = {
    "rows": schema_of(
        [
            *_ROW,
            ("n_keys", pa.int32()),
            ("budget", pa.int32()),
            *_numbers("top_mass_error", "best_error", "balanced_error"),
            ("scope", pa.string()),  # of the exact optimum: pool | all
            *_numbers("dropped_mass", "kappa", "ceiling"),
            ("closable", pa.bool_()),
            ("n_subsets", pa.int64()),
            ("exact", pa.bool_()),
            *_numbers("effective_rank", "sigma", "balanced_all_error"),
        ],
        _numbers("free_error", "free_gap", "free_top_error", "free_top_gap", "free_search_error", "free_search_gap"),
    ),
    "nulls": schema_of(
        [
            *_ROW,
            ("null", pa.string()),
            ("budget", pa.int32()),
            *_numbers("top_mass_error", "best_error", "dropped_mass", "kappa", "ceiling"),
            ("closable", pa.bool_()),
        ],
        [],
    ),
    "statistics": schema_of(
        _ROW,
        _numbers(
            *("dropped_mass", "residual", "bound", "spread", "entropy", "max_weight", "effective_rank"),
            "key_norm_spread",
        ),
    ),
    "excess": schema_of(
        [*_ROW, ("budget", pa.int32()), ("rule", pa.string()), *_numbers("error", "excess")],
        [],
    ),
    "groups": schema_of(
        [
            ("trace_id", pa.string()),
            ("layer", pa.int16()),
            ("first_head", pa.int16()),
            ("n_heads", pa.int16()),
            ("query", pa.int32()),
            ("budget", pa.int32()),
            *_numbers("shared_error", "top_mass_error", "best_error", "cost", "excess"),
        ],
        [],
    ),
    "cells": schema_of(
        [
            ("layer", pa.int16()),
            ("head", pa.int16()),
            ("median_dropped_mass", pa.float64()),
            ("flat", pa.bool_()),
            ("n_rows", pa.int32()),
        ],
        _numbers("auc"),
    ),
    "cross_entropy": schema_of(
        [
            ("trace_id", pa.string()),
            ("n_tokens", pa.int32()),
            ("arm", pa.string()),  # flat | random | all cells
            ("n_cells", pa.int32()),
            *_numbers("unchanged_nats", "nats"),
        ],
        [],
    ),
}
