"""Does band discovery find a planted band, and nothing where there is nothing?

Prediction: a band at a per-trace rank correlation of .15 is found in at least 90 % of runs with 40 traces, its edges
off by at most two layers in the median. On noise that is smoothed like real signals and labels, and on noise with a
trend over the position in both, at most 18 of 200 runs discover a band (5 % expected, and its own sampling noise) and
at most 5 confirm one. Partialling out a straight line is not enough where trends are curved, nor a cubic where they
are steep as well; shuffling labels within a trace, instead of flipping signs of whole traces, finds bands in most runs
of pure noise.

Each scenario has seeds of its own; 40 traces of 200 to 600 tokens and 30 layers, unless it says otherwise. What is
claimed for 200 runs without a band is counted in five times as many, because 18 of 200 is within the noise of twice
the rate. `by_forming_level` tries other cluster-forming thresholds on the same data, `by_position_degree` other degrees
of the polynomial that partials position out.

Run: python experiments/02_band_power.py [-n RUNS]     Writes data/results/02_band_power.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import write

from kvlens.discover.bands import tested
from kvlens.discover.clusters import FORMING_LEVEL, find_bands
from kvlens.discover.inputs import halves
from kvlens.discover.simulate import Simulated, rhos, simulate
from kvlens.stats import LEVEL, POSITION_DEGREE, beyond_position

PLANTED: dict[str, dict[str, Any]] = {
    "rho .15": {},
    "rho .10": {"rho": 0.10},
    "rho .15, two layers": {"band": (10, 12)},
    "rho -.15, 20 traces": {"rho": -0.15, "n_traces": 20},
}
NULL: dict[str, dict[str, Any]] = {
    "noise": {},
    "noise, 12 traces": {"n_traces": 12},
    "trend: line": {"trend": "line"},
    "trend: saturating": {"trend": "saturating"},
    "trend: hump": {"trend": "hump"},
    "trend: steep hump": {"trend": "hump", "strength": 3.0},
}
FORMING_LEVELS = (0.1, 0.05, 0.02, 0.01)
DEGREES = (1, 3)
N_SHUFFLES, TIMES_NULL = 200, 5


def one_run(rho: np.ndarray, seed: int, level: float) -> list[dict[str, Any]]:
    """The bands of one run, each tested on the other half."""
    discover = halves([f"{row:03d}" for row in range(len(rho))], seed)
    return [tested(rho, discover, cluster, seed) for cluster in find_bands(rho[discover], seed, level)]


def counted(runs: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """In how many runs something was discovered and confirmed."""
    return {
        "n_runs": len(runs),
        "discovered": sum(bool(run) for run in runs),
        "confirmed": sum(any(band["confirmed"] for band in run) for run in runs),
    }


def planted(runs: Sequence[list[dict[str, Any]]], sign: int, band: tuple[int, int]) -> dict[str, Any]:
    """How often the planted band was found (a band of its sign that shares a layer with it), and how far off."""
    hits = []
    for run in runs:
        touching = [b for b in run if b["sign"] == sign and b["start"] < band[1] and b["stop"] > band[0]]
        if touching:
            hits.append(max(touching, key=lambda b: min(b["stop"], band[1]) - max(b["start"], band[0])))
    errors = np.array([[abs(b["start"] - band[0]), abs(b["stop"] - band[1])] for b in hits]).reshape(-1, 2)
    return {
        "n_runs": len(runs),
        "found": len(hits),
        "found_and_confirmed": sum(b["confirmed"] for b in hits),
        "runs_with_another_band": sum(len(run) > 1 for run in runs),
        "edge_error_median": np.median(errors, 0).tolist() if hits else None,
        "edge_error_mean": errors.mean(0).round(3).tolist() if hits else None,
        "discover_rho_mean": float(np.mean([b["discover_rho"] for b in hits])) if hits else None,
        "confirm_rho_mean": float(np.mean([b["confirm_rho"] for b in hits])) if hits else None,
    }


def shuffled_bands(traces: Sequence[Simulated], seed: int) -> bool:
    """Whether the largest |mean rho| over layers exceeds .95 of those with labels shuffled within each trace.

    It is the wrong null: shuffled labels are rough, so their correlations vary far less than those of smooth ones.
    """
    random = np.random.default_rng(seed)
    total = np.zeros((N_SHUFFLES + 1, traces[0].signal.shape[1]))
    for signal, label in traces:
        positions = np.arange(len(label))
        columns = beyond_position(signal, positions)
        labels = [label, *(random.permutation(label) for _ in range(N_SHUFFLES))]
        rows = beyond_position(np.stack(labels, 1), positions)
        total += (rows / np.linalg.norm(rows, axis=0)).T @ (columns / np.linalg.norm(columns, axis=0))
    largest = np.abs(total).max(1)
    return bool((largest >= largest[0]).mean() <= LEVEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="runs of each scenario")
    n = parser.parse_args().n
    started = time.perf_counter()
    results: dict[str, Any] = {"n_runs": n, "forming_level": FORMING_LEVEL, "position_degree": POSITION_DEGREE}
    results |= {"planted": {}, "null": {}, "by_forming_level": {}, "by_position_degree": {}}
    for number, (name, changes) in enumerate(PLANTED.items()):
        profiles = [rhos(simulate((seed, number), **changes)) for seed in range(n)]
        sign, band = (-1 if changes.get("rho", 0) < 0 else 1), changes.get("band", (10, 16))
        found = {
            level: planted([one_run(rho, seed, level) for seed, rho in enumerate(profiles)], sign, band)
            for level in FORMING_LEVELS
        }
        results["planted"][name] = found[FORMING_LEVEL]
        results["by_forming_level"][name] = {f"{level:g}": counts for level, counts in found.items()}
        print(name, json.dumps(found[FORMING_LEVEL]), round(time.perf_counter() - started), flush=True)
    shuffled = []
    for number, (name, changes) in enumerate(NULL.items(), start=len(PLANTED)):
        levels = FORMING_LEVELS if name == "noise" else (FORMING_LEVEL,)
        runs: dict[tuple[int, float], list[Any]] = {(POSITION_DEGREE, level): [] for level in levels}
        runs |= {(degree, FORMING_LEVEL): [] for degree in (DEGREES if "trend" in changes else ())}
        for seed in range(n * TIMES_NULL):
            world = simulate((seed, number), rho=0.0, **changes)
            degrees = {degree for degree, _ in runs if degree == POSITION_DEGREE or seed < n}
            profiles_by_degree = {degree: rhos(world, degree) for degree in degrees}
            for (degree, level), found_runs in runs.items():
                if degree == POSITION_DEGREE or seed < n:
                    found_runs.append(one_run(profiles_by_degree[degree], seed, level))
            if name == "noise" and seed < n:
                shuffled.append(shuffled_bands(world, seed))
        for (degree, level), found_runs in runs.items():
            kind, key = ("by_position_degree", degree) if degree != POSITION_DEGREE else ("by_forming_level", level)
            results[kind].setdefault(name, {})[f"{key:g}"] = counted(found_runs)
        results["null"][name] = results["by_forming_level"][name][f"{FORMING_LEVEL:g}"]
        print(name, json.dumps(results["null"][name]), round(time.perf_counter() - started), flush=True)
    results["null_by_shuffling_within_traces"] = {"n_runs": len(shuffled), "discovered": sum(shuffled)}
    write("02_band_power", results)


if __name__ == "__main__":
    main()
