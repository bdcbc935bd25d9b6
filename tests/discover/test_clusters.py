"""Are clusters, their p-values and their stability what a slow search over layers finds?"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvlens.discover import clusters
from kvlens.discover.clusters import Cluster, depths, find_bands, forming_threshold, heaviest, layers_of, runs

T_VALUES = arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.floats(-4, 4))


def slow_clusters(t: np.ndarray, threshold: float) -> list[tuple[float, int, int]]:
    """Every maximal run of neighbouring layers above the threshold: its mass above it, start and stop."""
    found, layer = [], 0
    while layer < len(t):
        start = layer
        while layer < len(t) and t[layer] > threshold:
            layer += 1
        if layer > start:
            found.append((sum(t[i] - threshold for i in range(start, layer)), start, layer))
        layer += 1
    return found


@given(T_VALUES, st.floats(0.1, 3))
def test_the_heaviest_cluster_of_each_row(t: np.ndarray, threshold: float) -> None:
    mass, start, stop, centre = heaviest(t, threshold)
    for row in range(len(t)):
        everything = slow_clusters(t[row], threshold)
        assert mass[row] == pytest.approx(max([m for m, _, _ in everything], default=0.0))
        place = (int(start[row]), int(stop[row]))
        if not everything:
            assert (place, centre[row]) == ((0, 0), 0)
            continue
        assert place in [(a, b) for m, a, b in everything if m == pytest.approx(mass[row])]
        layers = np.arange(*place)
        assert centre[row] == pytest.approx(np.average(layers + 0.5, weights=t[row, layers] - threshold))


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_runs_are_maximal(inside: list[bool]) -> None:
    found = runs(np.array(inside))
    assert found == [(a, b) for _, a, b in slow_clusters(np.array(inside, dtype=float), 0.5)]


def test_p_values_are_those_of_all_patterns_of_signs() -> None:
    random = np.random.default_rng(0)
    values = random.normal(0, 0.1, size=(8, 6))
    values[:, 2:4] += 0.25
    values[:, 5] -= 0.3
    threshold = scipy.stats.t.ppf(0.975, 7)

    def largest(sample: np.ndarray) -> float:
        t = scipy.stats.ttest_1samp(sample, 0).statistic
        return max([m for side in (t, -t) for m, _, _ in slow_clusters(side, threshold)], default=0.0)

    null = [largest(values * np.array(signs)[:, None]) for signs in product([-1, 1], repeat=8)]
    found = find_bands(values, seed=0)
    assert [(band.sign, band.start, band.stop) for band in found] == [(1, 2, 4), (-1, 5, 6)]
    t = scipy.stats.ttest_1samp(values, 0).statistic
    for band in found:
        side = slow_clusters(band.sign * t, threshold)
        (mass,) = [m for m, start, stop in side if (start, stop) == (band.start, band.stop)]
        assert band.mass == pytest.approx(mass)
        assert band.p_value == pytest.approx(np.mean([m >= mass - 1e-9 for m in null]))


def test_the_threshold_is_students() -> None:
    assert forming_threshold(20) == pytest.approx(scipy.stats.t.ppf(0.975, 19))
    assert forming_threshold(20, 0.01) == pytest.approx(scipy.stats.t.ppf(0.995, 19))


def test_flipping_every_value_flips_the_bands_alone() -> None:
    values = np.random.default_rng(4).normal(0, 0.1, size=(14, 8))
    values[:, 1:4] += 0.2
    here, there = find_bands(values, 0), find_bands(-values, 0)
    assert [(b.start, b.stop, b.p_value) for b in here] == [(b.start, b.stop, b.p_value) for b in there]
    assert [b.sign for b in here] == [1]
    assert [b.sign for b in there] == [-1]


def test_too_few_traces_have_no_band_whatever_they_show() -> None:
    strong = np.full((5, 6), 0.8) + np.random.default_rng(0).normal(0, 0.01, size=(5, 6))
    assert find_bands(strong, 0) == []  # 32 patterns of signs, two of them as extreme: .0625
    assert find_bands(strong[:1], 0) == []
    assert find_bands(np.vstack([strong, strong[:1]]), 0) != []


def test_missing_values_do_not_hide_or_make_a_band() -> None:
    values = np.random.default_rng(0).normal(0, 0.1, size=(20, 6))
    values[:, 2:4] += 0.3
    values[::4, 3] = np.nan
    values[:, 5] = np.nan
    values[1:, 0] = np.nan
    assert [(b.sign, b.start, b.stop) for b in find_bands(values, 0)] == [(1, 2, 4)]


def test_stability_tells_a_band_of_all_traces_from_one_on_the_edge() -> None:
    random = np.random.default_rng(3)
    steady = random.normal(0.3, 0.05, size=(10, 4))
    band = find_bands(steady, 0)[0]
    assert clusters.stability(steady, band, 0) == (1.0, [1.0] * 4)
    edge = random.normal(0, 0.1, size=(6, 4))
    edge[:, 1:3] = 0.2 + np.abs(edge[:, 1:3])  # six traces can show it, five cannot
    band = find_bands(edge, 0)[0]
    assert clusters.stability(edge, band, 0) == (0.0, [0.0] * (band.stop - band.start))


def test_stability_is_of_each_layer_and_of_the_same_sign() -> None:
    random = np.random.default_rng(0)
    values = random.normal(0, 0.1, size=(14, 5))
    values[:, 2] += 0.4
    found = find_bands(values, 0)
    assert [(b.start, b.stop) for b in found] == [(2, 3)]
    share, layers = clusters.stability(values, Cluster(1, 1, 4, 1.0, 0.01), 0)
    assert share == 1.0
    assert layers[1] == 1.0
    assert layers[0] < 0.5 > layers[2]
    assert clusters.stability(values, Cluster(-1, 2, 3, 1.0, 0.01), 0) == (0.0, [0.0])


@pytest.mark.parametrize("n_layers", [1, 12, 22, 24, 25, 26, 28, 30, 32, 36, 61, 80])
def test_depths_of_a_model_are_its_own_layers_again(n_layers: int) -> None:
    for start, stop in product(range(n_layers), range(1, n_layers + 1)):
        if start < stop:
            assert layers_of(*depths(start, stop, n_layers), n_layers) == (start, stop)


@pytest.mark.parametrize(
    ("band", "n_layers", "other", "expected"),
    [
        ((7, 14), 32, 12, (2, 6)),  # 2.625 and 5.25
        ((7, 14), 32, 30, (6, 14)),  # 6.5625 and 13.125
        ((18, 26), 32, 12, (6, 10)),  # 6.75 and 9.75
        ((18, 26), 32, 30, (16, 25)),  # 16.875 and 24.375
        ((4, 6), 12, 30, (10, 15)),  # exactly
        ((10, 15), 30, 12, (4, 6)),
        ((0, 1), 12, 30, (0, 3)),
        ((29, 30), 30, 12, (11, 12)),
    ],
)
def test_depths_become_layers_of_another_model_by_floor_and_ceil(
    band: tuple[int, int], n_layers: int, other: int, expected: tuple[int, int]
) -> None:
    assert layers_of(*depths(*band, n_layers), other) == expected


@given(st.integers(1, 90), st.integers(1, 90), st.data())
@settings(max_examples=200)
def test_a_converted_band_covers_the_depths_and_no_layer_more(n_layers: int, other: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n_layers - 1))
    stop = data.draw(st.integers(start + 1, n_layers))
    a, b = layers_of(*depths(start, stop, n_layers), other)
    assert 0 <= a < b <= other
    assert a * n_layers <= start * other < (a + 1) * n_layers
    assert (b - 1) * n_layers < stop * other <= b * n_layers
