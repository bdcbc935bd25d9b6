"""Is a planted band found, and noise left alone? Few runs here; `experiments/02_band_power.py` has them in full.

The bounds allow for the noise of the counts: with the error rates that are claimed, each fails in under one of a
thousand suites.
"""

from __future__ import annotations

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
BAND = (4, 8)
RESULTS = EXPERIMENTS.parent / "data" / "results" / "02_band_power.json"


@cache
def experiment() -> dict[str, Any]:
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        return runpy.run_path(str(EXPERIMENTS / "02_band_power.py"))
    finally:
        sys.path.remove(str(EXPERIMENTS))


def bands(seed: int, **changes: Any) -> list[dict[str, Any]]:
    """The bands of one simulated run, each tested on the other half."""
    names = experiment()
    rho = names["rhos"](names["simulate"]((seed, 3), n_layers=12, band=BAND, **changes))
    return names["one_run"](rho, seed, names["FORMING_LEVEL"])


def test_a_planted_band_is_found_where_it_is_and_confirmed() -> None:
    found = experiment()["planted"]([bands(seed) for seed in range(12)], 1, BAND)
    assert found["found_and_confirmed"] >= 8  # 11 expected
    assert max(found["edge_error_median"]) <= 2
    assert found["confirm_rho_mean"] == pytest.approx(0.13, abs=0.03)


@pytest.mark.parametrize("trend", [None, "line", "saturating", "hump"])
def test_noise_and_trends_have_no_band(trend: str | None) -> None:
    counts = experiment()["counted"]([bands(seed, rho=0.0, trend=trend) for seed in range(30)])
    assert counts["discovered"] <= 6  # 1.5 expected
    assert counts["confirmed"] <= 1


def test_shuffling_labels_within_traces_calls_noise_a_band() -> None:
    """The null that must not be used: it destroys the autocorrelation that real labels have."""
    names = experiment()
    worlds = [names["simulate"]((seed, 4), rho=0.0) for seed in range(4)]
    assert sum(names["shuffled_bands"](world, seed) for seed, world in enumerate(worlds)) >= 3


def test_the_full_counts_hold_what_is_claimed() -> None:
    found = json.loads(RESULTS.read_text())
    names = experiment()
    assert found["n_runs"] == 200
    assert found["forming_level"] == names["FORMING_LEVEL"]
    assert found["position_degree"] == names["POSITION_DEGREE"]
    planted = found["planted"]["rho .15"]
    assert planted["found"] >= 180
    assert max(planted["edge_error_median"]) <= 2
    assert len(found["null"]) == 6
    for counts in found["null"].values():
        assert counts["n_runs"] == 1000
        assert counts["discovered"] <= 18 / 200 * 1000
        assert counts["confirmed"] <= 5 / 200 * 1000
    assert found["null_by_shuffling_within_traces"]["discovered"] > 150
    assert found["by_position_degree"]["trend: hump"]["1"]["confirmed"] > 150
    assert found["by_position_degree"]["trend: steep hump"]["3"]["confirmed"] > 150
