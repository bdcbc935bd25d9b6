"""What experiments share: input and clock, where results go, what machine made them, an interval over traces."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlens import stats
from kvlens.model import Model
from kvlens.records import Tokens, Trace
from kvlens.texts import read_traces, tokenize

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "data" / "traces"
RESULTS = ROOT / "data" / "results"
SHARED = ROOT.parent / "shared" / "data"  # public sets, where a user has them; never part of this project

REPEATS = 5


def sample(model: Model, n_context: int, n_target: int) -> Tokens:
    """A stretch of the project's own documents with exactly this many context and target tokens."""
    text = "\n\n".join(trace.text or "" for trace in read_traces(TRACES / "documents.jsonl"))
    whole = tokenize(Trace("sample", text=text), model.tokenizer, target_tokens=n_target)
    n = n_context + n_target
    return Tokens(whole.trace, whole.ids[:n], 0, n_context, whole.text, whole.char_spans[:n])


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def interleaved(*runs: Callable[[], Any]) -> list[float]:
    """Median seconds of each, warmed up once, repeats taken in turn."""
    for run in runs:
        run()
    times = [[seconds(run) for run in runs] for _ in range(REPEATS)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def resident(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the last reset."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, f"this kernel does not report {name}"
    return int(found[1]) * 1024


def machine() -> dict[str, Any]:
    """The class of machine, as far as it matters for a time or a rounding."""
    cpu = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", cpu.read_text()) if cpu.exists() else None
    return {
        "cpu": name[1] if name else platform.processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def described(model: Model) -> dict[str, Any]:
    """The model and precision every table names."""
    return {"model": f"{model.name} ({model.note})" if model.note else model.name, "dtype": str(model.dtype)[6:]}


def write(name: str, results: dict[str, Any]) -> None:
    """Nothing; data/results/NAME.json holds the results, numbers to eight digits."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(shortened(results), indent=1) + "\n")


def shortened(value: Any) -> Any:
    """The same with every float rounded to eight significant digits."""
    if isinstance(value, dict):
        return {name: shortened(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [shortened(part) for part in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def over_traces(values: Sequence[float], *, seed: int = 0, n_draws: int = 10_000) -> dict[str, float]:
    """Mean over traces with a 95 % bootstrap interval: tokens inside a trace are not independent."""
    found = stats.over_traces(np.asarray(values, dtype=float), seed=seed, n_draws=n_draws)
    ends = {name: float(value) for name, value in zip(("mean", "low", "high"), found[:3], strict=True)}
    return {**ends, "n_traces": int(found.n)}
