"""What experiments share: where results go, what machine made them, and an interval over traces."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlens import stats
from kvlens.model import Model

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "data" / "traces"
RESULTS = ROOT / "data" / "results"
SHARED = ROOT.parent / "shared" / "data"  # public sets, where a user has them; never part of this project


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
    """Nothing; data/results/NAME.json holds the results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def over_traces(values: Sequence[float], *, seed: int = 0, n_draws: int = 10_000) -> dict[str, float]:
    """Mean over traces with a 95 % bootstrap interval: tokens inside a trace are not independent."""
    found = stats.over_traces(np.asarray(values, dtype=float), seed=seed, n_draws=n_draws)
    ends = {name: float(value) for name, value in zip(("mean", "low", "high"), found[:3], strict=True)}
    return {**ends, "n_traces": int(found.n)}
