"""Do simulated traces hold what was planted, smoothed as said, and nothing else?"""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.discover.simulate import LABEL_WINDOW, SIGNAL_WINDOW, TRENDS, rhos, rolling_mean, simulate
from kvlens.errors import InputError
from kvlens.stats import spearman


@pytest.mark.parametrize("rho", [0.15, -0.3])
def test_the_planted_rank_correlation_is_in_the_band_and_nowhere_else(rho: float) -> None:
    worlds = simulate(0, n_traces=6, n_layers=8, band=(3, 5), rho=rho, n_tokens=(20_000, 20_000))
    found = np.mean([spearman(signal, label) for signal, label in worlds], axis=0)
    assert found[3:5] == pytest.approx([rho, rho], abs=0.03)
    assert np.abs(np.delete(found, [3, 4])).max() < 0.03


def test_signals_and_labels_are_as_smooth_as_their_windows() -> None:
    (world,) = simulate(1, n_traces=1, n_layers=2, rho=0.0, band=(0, 0), n_tokens=(40_000, 40_000))

    def correlation(values: np.ndarray, lag: int) -> float:
        return float(np.corrcoef(values[:-lag], values[lag:])[0, 1])

    assert correlation(world.signal[:, 0], SIGNAL_WINDOW // 2) == pytest.approx(0.5, abs=0.1)
    assert correlation(world.signal[:, 0], SIGNAL_WINDOW) == pytest.approx(0, abs=0.1)
    assert correlation(world.label, LABEL_WINDOW // 2) == pytest.approx(0.5, abs=0.05)
    assert correlation(world.label, LABEL_WINDOW) == pytest.approx(0, abs=0.05)
    assert np.corrcoef(world.signal.T)[0, 1] == pytest.approx(0.9, abs=0.05)


def test_rolling_mean_is_trailing_and_partial_at_the_start() -> None:
    values = np.random.default_rng(0).normal(size=(20, 3))
    found = rolling_mean(values, 5)
    for pos in range(20):
        assert found[pos] == pytest.approx(values[max(0, pos - 4) : pos + 1].mean(0))


def test_a_trend_is_the_same_curve_in_label_and_signal() -> None:
    for name, curve in TRENDS.items():
        plain, tilted = (
            simulate(2, n_traces=1, n_layers=3, rho=0.0, n_tokens=(300, 300), trend=trend, strength=2.0)[0]
            for trend in (None, name)
        )
        added = tilted.label - plain.label
        assert tilted.signal - plain.signal == pytest.approx(np.repeat(added[:, None], 3, axis=1))
        assert np.corrcoef(added, curve(np.linspace(0, 1, 300)))[0, 1] == pytest.approx(1)
        assert added.std() == pytest.approx(2)


def test_a_curved_trend_survives_a_line_and_a_steep_one_a_cubic() -> None:
    worlds = simulate(3, n_traces=40, n_layers=2, rho=0.0, trend="hump", strength=3.0)
    assert rhos(worlds, degree=1).mean() > 0.5
    assert rhos(worlds, degree=3).mean() > 0.12
    assert abs(rhos(worlds).mean()) < 0.06


def test_lengths_and_seeds() -> None:
    worlds = simulate((5, 1), n_traces=30, n_layers=2, n_tokens=(50, 60))
    assert {50, 60} <= {len(world.label) for world in worlds} <= set(range(50, 61))
    again, other = (simulate((5, seed), n_traces=30, n_layers=2, n_tokens=(50, 60)) for seed in (1, 2))
    assert (again[7].signal == worlds[7].signal).all()
    assert again[7].label[0] != other[7].label[0]


def test_more_than_smoothing_allows_is_refused() -> None:
    with pytest.raises(InputError, match=r"rho of 0\.5"):
        simulate(0, rho=0.5)
