"""Label runs made without a model: known texts, known effects, written through the store like any other run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlens.schemas import LABELS
from kvlens.store import RunFolder, open_run

APPLES = (
    "Maria picks 14 apples, then 42 more.\nShe gives 9 away.\n",
    "14 + 42 = 56.\n\tSo 56 - 9 = 47.\n",
    "The answer is 47.",
)
HOSTILE = (
    'Show <script>alert("x")</script> & <b>bold</b> \u202eturned\u202c \x1b[31mred\r\n',
    "half \ufffd a character; </main></style>\n\n    code()\n",
    "done <img src=x>",
)


def start(out: Path, *, force: bool = False, **changes: Any) -> RunFolder:
    """A label run's folder at `out`; `changes` replace parts of its identity."""
    identity: dict[str, Any] = {
        "schema": LABELS,
        "config": {"intervention": "evict", "window": 1, "stride": 1},
        "model": {"name": "made-up", "fingerprint": "c0ffee-f00d", "note": "Q4_1, dequantised"},
        "input_hash": "5eed",
        "seed": 0,
        "dtype": "float32",
    }
    return open_run(out, **(identity | changes), force=force)


def pieces(text: str) -> list[str]:
    """The text cut as a tokenizer would cut it: words with their space, digits and signs alone."""
    return re.findall(r" ?[^\W\d]+| ?\d|\n+| ?[^\w\s]|\s", text)


def rows(trace_id: str, trace: Sequence[str], effects: Mapping[int, float] | None = None) -> dict[str, dict[str, Any]]:
    """The rows of one trace for every table; tokens without a given effect get a small one from a fixed seed."""
    tokens = [
        (piece, name)
        for text, name in zip(trace, ("prompt", "reasoning", "target"), strict=True)
        for piece in pieces(text)
    ]
    n_tokens, n_target = len(tokens), sum(name == "target" for _, name in tokens)
    values = np.random.default_rng(len(trace_id)).normal(scale=0.01, size=n_tokens)
    for pos, value in ({0: 23.5} | dict(effects or {})).items():
        values[pos] = value
    n_windows = n_tokens - n_target - 1
    values[n_windows:] = np.nan
    return {
        "windows": {
            "trace_id": trace_id,
            "window_start": np.arange(n_windows),
            "window_end": np.arange(n_windows) + 1,
            "intervention": "evict",
            "cells": "all",
            "selected_by": "all",
            "effect_nats": values[:n_windows],
            "kl_nats": np.abs(values[:n_windows]),
        },
        "tokens": {
            "trace_id": trace_id,
            "pos": np.arange(n_tokens),
            "token_id": np.arange(n_tokens) + 100,
            "token": [piece for piece, _ in tokens],
            "segment": [name for _, name in tokens],
            "effect_nats": values,
        },
        "traces": {
            "trace_id": [trace_id],
            "n_tokens": n_tokens,
            "n_target": n_target,
            "log_prob_full": -3.25,
            "noise_nats": 2e-6,
        },
    }


def write(
    out: Path, traces: Mapping[str, Sequence[str]], effects: Mapping[int, float] | None = None, **changes: Any
) -> Path:
    """The finished label run of `traces` at `out`."""
    with start(out, **changes) as run:
        for trace_id, trace in traces.items():
            for table, columns in rows(trace_id, trace, effects).items():
                run.write_part(table, trace_id, columns)
        run.finish({table: list(traces) for table in ("windows", "tokens", "traces")})
    return out
