"""A label run and a signals run of the same made traces, without a model: what `kvlens bands` and its kin read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import made_runs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvlens.discover.simulate import Simulated, simulate
from kvlens.provenance import now, plain
from kvlens.runstate import fresh, sealed
from kvlens.schemas import SIGNALS

N_PROMPT, N_TARGET = 6, 3
CAUSAL = ("hidden_change", "hidden_change_rolling", "hidden_change_z", "key_norm", "surprisal", "lag_causal")
Columns = Mapping[str, np.ndarray]  # [pos] or [pos, layer], for prompt and reasoning


def trace_id(number: int) -> str:
    return f"trace-{number:03d}"


def labels(out: Path, effects: Sequence[np.ndarray], *, width: int = 1, **changes: Any) -> Path:
    """A label run: each trace has a short prompt, one reasoning token an effect, and a target of three tokens."""
    config = {"intervention": "evict", "window": width, "stride": 1}
    keys = [trace_id(number) for number in range(len(effects))]
    with made_runs.start(out, **({"config": config} | changes)) as run:
        for key, effect in zip(keys, effects, strict=True):
            values = np.r_[23.5, np.full(N_PROMPT - 1, 0.01), effect, np.full(N_TARGET, np.nan)]
            values[N_PROMPT + len(effect) - 1] = np.nan  # the last context token is never hidden
            run.write_part("windows", key, windows(key, values))
            run.write_part("tokens", key, tokens(key, values))
            run.write_part("traces", key, {"trace_id": [key], "n_tokens": len(values), "n_target": N_TARGET})
        run.finish(dict.fromkeys(("windows", "tokens", "traces"), keys))
    return out


def windows(key: str, values: np.ndarray, selected_by: Any = "all") -> dict[str, Any]:
    """One window a labelled token."""
    starts = np.flatnonzero(np.isfinite(values))
    return {
        "trace_id": key,
        "window_start": starts,
        "window_end": starts + 1,
        "intervention": "evict",
        "cells": "all",
        "selected_by": selected_by,
        "effect_nats": values[starts],
    }


def tokens(key: str, values: np.ndarray) -> dict[str, Any]:
    n = len(values)
    segments = ["prompt"] * N_PROMPT + ["reasoning"] * (n - N_PROMPT - N_TARGET) + ["target"] * N_TARGET
    return {
        "trace_id": key,
        "pos": np.arange(n),
        "token_id": token_ids(n),
        "token": [f" {pos}" for pos in range(n)],
        "segment": segments,
        "effect_nats": values,
    }


def token_ids(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32) * 7 % 1000


def signals(
    out: Path, traces: Mapping[str, Columns], *, causal: Sequence[str] = CAUSAL, marks: bool = True, **changes: Any
) -> Path:
    """A finished signals run of these traces; each trace's columns cover its prompt and reasoning."""
    out.mkdir(parents=True)
    columns: dict[str, list[Any]] = {"trace_id": [], "pos": [], "token_id": []}
    names = list(next(iter(traces.values())))
    for key, found in traces.items():
        n = len(found[names[0]])
        columns["trace_id"] += [key] * n
        columns["pos"] += range(n)
        columns["token_id"] += token_ids(n).tolist()
    fields = [pa.field("trace_id", pa.string()), pa.field("pos", pa.int32()), pa.field("token_id", pa.int32())]
    arrays = [pa.array(columns[field.name], type=field.type) for field in fields]
    for name in names:
        values = np.concatenate([found[name] for found in traces.values()]).astype(np.float32)
        flat = pa.array(values.reshape(-1))
        arrays.append(flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))
        mark = {b"causal": b"true" if name in causal else b"false"} if marks else None
        fields.append(pa.field(name, arrays[-1].type, metadata=mark))
    write(out, pa.table(arrays, schema=pa.schema(fields)), **changes)
    return out


def write(out: Path, table: pa.Table, **changes: Any) -> None:
    """Nothing; the table and the `run.json` of a finished signals run."""
    pq.write_table(table, out / "signals.parquet")
    content = (out / "signals.parquet").read_bytes()
    facts = {"rows": table.num_rows, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    identity = {
        "schema": SIGNALS,
        "config": {"rolling_window": 64},
        "model": {"name": "made-up", "fingerprint": "c0ffee-f00d", "note": "Q4_1, dequantised"},
        "input_hash": "5eed",
        "seed": 0,
        "dtype": "float32",
        "device": "cpu",
        "attention": "",
    }
    state = fresh(identity | changes) | {"status": "complete", "finished": now(), "tables": {"signals": facts}}
    (out / "run.json").write_text(json.dumps(sealed(plain(state))))


def edit(run: Path, change: Any) -> Path:
    """The signals run with its table changed, by a function of the table."""
    state = json.loads((run / "run.json").read_text())
    write(run, change(pq.read_table(run / "signals.parquet")), model=state["model"], config=state["config"])
    return run


def with_prompt(reasoning: np.ndarray, seed: int = 0) -> np.ndarray:
    """The values of a reasoning, with noise for the prompt in front."""
    return np.concatenate([np.random.default_rng(seed).normal(size=(N_PROMPT, *reasoning.shape[1:])), reasoning])


def pair(
    folder: Path, worlds: Sequence[Simulated], more: Sequence[Columns] | None = None, **changes: Any
) -> tuple[Path, Path]:
    """A label run and a signals run of simulated traces; `more` are further columns of each trace's reasoning."""
    traces = {}
    for number, world in enumerate(worlds):
        columns = {"hidden_change_rolling": world.signal, **(more[number] if more else {})}
        traces[trace_id(number)] = {name: with_prompt(values) for name, values in columns.items()}
    run = labels(folder / "labels", [world.label for world in worlds])
    return run, signals(folder / "signals", traces, **changes)


def planted(folder: Path, seed: int = 0, **changes: Any) -> tuple[Path, Path]:
    """A pair with a band that is easy to find: layers 3 to 5 of 10."""
    settings = {"n_traces": 24, "n_layers": 10, "band": (3, 6), "rho": 0.3, "n_tokens": (120, 200)}
    return pair(folder, simulate(seed, **(settings | changes)))
