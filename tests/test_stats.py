"""Do the rank statistics equal scipy's, and are tests and intervals over traces what they claim?"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import roc_auc_score

from kvlens import stats
from kvlens.errors import EnvironmentLacks

TIED = arrays(np.float64, st.tuples(st.integers(8, 30), st.integers(1, 4)), elements=st.integers(0, 6).map(float))


def example(seed: int = 0, n: int = 60, n_layers: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals with ties, a label, and positions with gaps; everything drifts with the position."""
    random = np.random.default_rng(seed)
    positions = np.sort(random.choice(200, size=n, replace=False))
    signal = np.round(random.normal(size=(n, n_layers)) + positions[:, None] / 80, 1)
    label = np.round(signal[:, 0] + random.normal(size=n) + positions / 60, 1)
    return signal, label, positions


@given(TIED)
def test_ties_share_their_mean_rank(values: np.ndarray) -> None:
    for column, found in zip(values.T, stats.ranks(values).T, strict=True):
        for value, rank in zip(column, found, strict=True):
            assert rank == (column < value).sum() + ((column == value).sum() + 1) / 2


def test_spearman_is_scipys_for_every_layer() -> None:
    signal, label, _ = example()
    found = stats.spearman(signal, label)
    for layer, rho in enumerate(found):
        assert rho == pytest.approx(scipy.stats.spearmanr(signal[:, layer], label).statistic, abs=1e-12)
    assert abs(found[0]) > 0.4


def test_partial_spearman_with_a_line_is_the_textbook_formula() -> None:
    signal, label, positions = example()
    found = stats.partial_spearman(signal, label, positions, degree=1)
    for layer, rho in enumerate(found):
        xy, xz, yz = (
            scipy.stats.spearmanr(one, other).statistic
            for one, other in ((signal[:, layer], label), (signal[:, layer], positions), (label, positions))
        )
        assert rho == pytest.approx((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)), abs=1e-12)


def test_partial_spearman_takes_a_quartic_out_of_both_rankings() -> None:
    signal, label, positions = example()
    place = scipy.stats.rankdata(positions) / len(positions)
    powers = np.stack([place**power for power in range(5)], 1)

    def left(values: np.ndarray) -> np.ndarray:
        ranked = scipy.stats.rankdata(values)
        return ranked - powers @ np.linalg.lstsq(powers, ranked, rcond=None)[0]

    found = stats.partial_spearman(signal, label, positions)
    for layer, rho in enumerate(found):
        assert rho == pytest.approx(np.corrcoef(left(signal[:, layer]), left(label))[0, 1], abs=1e-9)


def left_over(values: np.ndarray, positions: np.ndarray, controls: np.ndarray, degree: int = 4) -> np.ndarray:
    """The ranks without what powers of the position's rank and the controls' ranks explain, by least squares."""
    place = scipy.stats.rankdata(positions) / len(positions)
    columns = [place**power for power in range(degree + 1)] + [scipy.stats.rankdata(one) for one in controls.T]
    ranked = scipy.stats.rankdata(values)
    return ranked - np.stack(columns, 1) @ np.linalg.lstsq(np.stack(columns, 1), ranked, rcond=None)[0]


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("n_controls", [1, 2, 5])
def test_partial_spearman_takes_the_ranks_of_controls_out_of_both_rankings(n_controls: int, degree: int) -> None:
    signal, label, positions = example(n_controls)
    random = np.random.default_rng(n_controls)
    controls = np.round(random.normal(size=(len(label), n_controls)) + label[:, None], 1)  # with ties
    found = stats.partial_spearman(signal, label, positions, degree, controls)
    of_label = left_over(label, positions, controls, degree)
    for layer, rho in enumerate(found):
        truth = np.corrcoef(left_over(signal[:, layer], positions, controls, degree), of_label)[0, 1]
        assert rho == pytest.approx(truth, abs=1e-9)
    assert np.abs(found - stats.partial_spearman(signal, label, positions, degree)).max() > 0.05
    curved = stats.partial_spearman(signal, label, positions, degree, np.exp(3 * controls))  # their ranks alone
    np.testing.assert_allclose(curved, found, atol=1e-9)


def test_one_control_and_a_line_is_the_inverse_of_the_matrix_of_rank_correlations() -> None:
    """The textbook partial correlation of several variables."""
    signal, label, positions = example()
    control = np.round(label + np.random.default_rng(1).normal(size=len(label)), 1)
    found = stats.partial_spearman(signal, label, positions, 1, control[:, None])
    for layer, rho in enumerate(found):
        columns = np.stack([signal[:, layer], label, positions, control], 1)
        inverse = np.linalg.inv(scipy.stats.spearmanr(columns).statistic)
        assert rho == pytest.approx(-inverse[0, 1] / np.sqrt(inverse[0, 0] * inverse[1, 1]), abs=1e-9)


def test_controls_that_say_nothing_new_change_nothing() -> None:
    signal, label, positions = example()
    plain = stats.partial_spearman(signal, label, positions)
    constant = np.full((len(label), 1), 3.0)
    place = positions[:, None].astype(float)
    for useless in (constant, place, -place, np.concatenate([constant, place, constant], 1), np.zeros((len(label), 0))):
        np.testing.assert_allclose(stats.partial_spearman(signal, label, positions, 4, useless), plain, atol=1e-9)
    control = np.random.default_rng(2).normal(size=(len(label), 1)) + label[:, None]
    once = stats.partial_spearman(signal, label, positions, 4, control)
    twice = np.concatenate([control, 2 * control + 1, -control, constant], 1)  # of one ranking
    np.testing.assert_allclose(stats.partial_spearman(signal, label, positions, 4, twice), once, atol=1e-9)


def test_a_signal_that_is_a_control_has_nothing_left() -> None:
    signal, label, positions = example()
    signal[:, 2] = -signal[:, 1]
    found = stats.partial_spearman(signal, label, positions, 4, signal[:, [1]])
    assert np.isnan(found).tolist() == [False, True, True, False, False]
    assert np.isnan(stats.partial_spearman(signal, label, positions, 4, label[:, None])).all()


def test_a_correlation_through_a_control_alone_goes_away() -> None:
    random = np.random.default_rng(0)
    common = random.normal(size=4000)
    signal, label = (common + random.normal(size=4000) for _ in range(2))
    positions = np.arange(4000)
    assert stats.partial_spearman(signal[:, None], label, positions)[0] > 0.4
    assert abs(stats.partial_spearman(signal[:, None], label, positions, 4, common[:, None])[0]) < 0.06


@given(st.floats(0.1, 3), st.floats(-5, 5), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_partial_spearman_sees_ranks_alone(scale: float, shift: float, seed: int) -> None:
    signal, label, positions = example(seed)
    found = stats.partial_spearman(np.exp(signal * scale) + shift, label, positions * 3 + 7)
    np.testing.assert_allclose(found, stats.partial_spearman(signal, label, positions), atol=1e-9)


def test_what_has_no_meaning_is_nan_and_does_not_spread() -> None:
    signal, label, positions = example()
    signal[:, 1] = 4.0
    signal[:, 2] = positions
    signal[:, 3] = -positions
    partial = stats.partial_spearman(signal, label, positions)
    assert np.isnan(partial[[1, 2, 3]]).all()
    assert partial[[0, 4]] == pytest.approx(stats.partial_spearman(signal[:, [0, 4]], label, positions), abs=1e-12)
    plain = stats.spearman(signal, label)
    assert np.isnan(plain).tolist() == [False, True, False, False, False]
    assert np.isnan(stats.spearman(signal, np.full(len(label), 2.0))).all()
    assert np.isnan(stats.partial_spearman(signal, np.full(len(label), 2.0), positions)).all()
    area = stats.auc(stats.beyond_position(signal, positions), label > 0)
    assert np.isnan(area).tolist() == [False, True, True, True, False]


@given(TIED, st.integers(0, 2**31))
@settings(deadline=None)
def test_auc_is_the_share_of_pairs_in_order(scores: np.ndarray, seed: int) -> None:
    truth = np.random.default_rng(seed).random(len(scores)) < 0.4
    found = stats.auc(scores, truth)
    if truth.all() or not truth.any():
        assert np.isnan(found).all()
        return
    for column, area in zip(scores.T, found, strict=True):
        pairs = [(a > b) + (a == b) / 2 for a, b in product(column[truth], column[~truth])]
        assert area == pytest.approx(np.mean(pairs), abs=1e-12)
        assert area == pytest.approx(roc_auc_score(truth, column), abs=1e-12)


def test_top_share_takes_the_largest_and_equal_ones_together() -> None:
    values = np.array([1.0, 5, 3, 5, 5, 2, 0, 0, 0, 0])
    assert np.flatnonzero(stats.top_share(values, 0.2)).tolist() == [1, 3, 4]
    assert np.flatnonzero(stats.top_share(values, 0.01)).tolist() == [1, 3, 4]
    assert np.flatnonzero(stats.top_share(values, 0.4)).tolist() == [1, 2, 3, 4]
    assert np.flatnonzero(stats.top_share(np.array([3.0, 2, 2, 2, 0]), 0.4)).tolist() == [0]  # room for one of three
    assert np.flatnonzero(stats.top_share(np.array([3.0, 2, 2, 2, 0]), 0.6)).tolist() == [0, 1, 2, 3]
    assert not stats.top_share(np.full(10, 2.0), 0.1).any()


def test_top_share_does_not_depend_on_the_order() -> None:
    values = np.random.default_rng(0).integers(0, 12, 60).astype(float)
    order = np.random.default_rng(1).permutation(60)
    np.testing.assert_array_equal(stats.top_share(values[order], 0.1), stats.top_share(values, 0.1)[order])


def test_intervals_are_percentiles_of_means_over_resampled_traces() -> None:
    values = np.random.default_rng(3).normal(0.2, 1.0, size=(50, 2))
    found = stats.over_traces(values, seed=1)
    np.testing.assert_allclose(found.mean, values.mean(0))
    assert found.n.tolist() == [50, 50]
    for column in range(2):
        sample = (values[:, column],)
        theirs = scipy.stats.bootstrap(sample, np.mean, method="percentile", n_resamples=9999, rng=0)
        assert found.low[column] == pytest.approx(theirs.confidence_interval.low, abs=0.03)
        assert found.high[column] == pytest.approx(theirs.confidence_interval.high, abs=0.03)
    again = stats.over_traces(values, seed=1)
    assert again.low.tolist() == found.low.tolist()
    assert stats.over_traces(values, seed=2).low.tolist() != found.low.tolist()


def test_a_bootstrap_sample_is_whole_traces_and_the_first_is_the_sample_itself() -> None:
    weights = stats.resampled(7, 500, 0)
    assert weights[0].tolist() == [1.0] * 7
    assert (weights.sum(1) == 7).all()
    assert len({tuple(row) for row in weights}) > 300
    assert weights[1:].mean(0) == pytest.approx(np.ones(7), abs=0.15)


def test_missing_values_are_left_out_of_their_column_alone() -> None:
    values = np.random.default_rng(0).normal(size=(20, 3))
    holes = values.copy()
    holes[3:9, 1] = np.nan
    holes[1:, 2] = np.nan
    found = stats.over_traces(holes, seed=0)
    assert found.n.tolist() == [20, 14, 1]
    assert found.mean == pytest.approx(np.nanmean(holes, 0))
    assert found.low[0] == stats.over_traces(values, seed=0).low[0]
    assert np.isfinite([found.low[1], found.high[1]]).all()
    assert np.isnan([found.low[2], found.high[2]]).all()
    assert np.isnan(stats.over_traces(np.zeros((0, 2)), seed=0).mean).all()
    t = stats.t_statistics(holes, np.ones((1, 20)))[0]
    assert t[1] == pytest.approx(scipy.stats.ttest_1samp(holes[:, 1], 0, nan_policy="omit").statistic)
    assert t[2] == 0
    assert np.isnan(stats.sign_flip_p(holes, 0)).tolist() == [False, False, True]


def test_few_traces_get_every_pattern_of_signs_once() -> None:
    flips = stats.sign_flips(5, seed=0)
    assert sorted(map(tuple, flips)) == sorted(product([-1.0, 1.0], repeat=5))
    assert (flips[0] == 1).all()


def test_many_traces_get_drawn_signs_by_their_seed() -> None:
    flips = stats.sign_flips(40, seed=0)
    assert flips.shape == (stats.N_DRAWS, 40)
    assert (flips[0] == 1).all()
    assert np.abs(flips[1:].mean(0)).max() < 0.1
    assert (flips == stats.sign_flips(40, seed=0)).all()
    assert (flips != stats.sign_flips(40, seed=1)).any()


def test_t_statistics_under_signs_and_counts_are_those_of_the_changed_sample() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, size=(9, 4))
    flips, counts = stats.sign_flips(9, 0)[:30], stats.resampled(9, 30, 0)
    for sign, count, under_signs, under_counts in zip(
        flips, counts, stats.t_statistics(values, flips), stats.t_statistics(values, counts), strict=True
    ):
        flipped, drawn = values * sign[:, None], np.repeat(values, count.astype(int), axis=0)
        assert under_signs == pytest.approx(scipy.stats.ttest_1samp(flipped, 0).statistic)
        assert under_counts == pytest.approx(scipy.stats.ttest_1samp(drawn, 0).statistic)


def test_traces_that_agree_to_the_last_digit_are_evidence() -> None:
    t = stats.t_statistics(np.ones((8, 1)), np.ones((1, 8)))
    assert np.isfinite(t).all()
    assert t[0, 0] > 100


def test_the_sign_flip_p_is_scipys_exact_one() -> None:
    values = np.random.default_rng(1).normal(0.4, 1, size=(9, 3))
    found = stats.sign_flip_p(values, seed=0)
    for layer, p in enumerate(found):
        theirs = scipy.stats.permutation_test(
            (values[:, layer],), np.mean, permutation_type="samples", n_resamples=np.inf
        )
        assert p == pytest.approx(theirs.pvalue)


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(EnvironmentLacks, match="scipy") as caught:
        stats.ranks(np.arange(3.0))
    assert ".[lens]" in caught.value.hint


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_the_chance_of_the_top_is_that_of_random_ties(values: list[float], seed: int) -> None:
    numbers, share = np.array(values), 0.3
    found = stats.top_chance(numbers, share)
    n_top = max(1, round(share * len(numbers)))
    assert found.sum() == pytest.approx(n_top)
    random = np.random.default_rng(seed)
    order = random.permutation(len(numbers))
    drawn = np.zeros(len(numbers), dtype=bool)
    drawn[order[np.argsort(-numbers[order], kind="stable")[:n_top]]] = True
    assert not (drawn & (found == 0)).any()
    assert drawn[found == 1].all()
    assert all(len(set(found[numbers == value])) == 1 for value in set(values))


def grouped(seed: int, n: int = 240, n_traces: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two columns of scores with ties, which rows are true, and the trace and stratum of each."""
    random = np.random.default_rng(seed)
    truth, trace = random.random(n) < 0.4, random.integers(0, n_traces, n) * 10
    scores = np.round(random.normal(size=(n, 2)) + truth[:, None] * np.array([1.0, 0.0]), 1)
    return scores, truth, trace, random.integers(0, 3, n)


@pytest.mark.parametrize("seed", range(4))
def test_an_auc_over_traces_is_sklearns_and_its_draws_are_repeated_rows(seed: int) -> None:
    scores, truth, trace, _ = grouped(seed)
    found = stats.auc_over_traces(scores, truth, trace, seed=1, n_draws=60)
    names, counts = np.unique(trace), stats.resampled(6, 60, 1).astype(int)
    for column in range(2):
        assert found.mean[column] == pytest.approx(roc_auc_score(truth, scores[:, column]))
        draws = []
        for count in counts[1:]:
            rows = np.concatenate(
                [np.flatnonzero(trace == name).repeat(c) for name, c in zip(names, count, strict=True)]
            )
            draws.append(roc_auc_score(truth[rows], scores[rows, column]))
        low, high = np.quantile(draws, [0.025, 0.975])
        assert (found.low[column], found.high[column]) == pytest.approx((low, high))
    assert found.n.tolist() == [6, 6]


def test_an_auc_within_strata_counts_pairs_of_one_stratum() -> None:
    scores, truth, trace, stratum = grouped(5)
    found = stats.auc_over_traces(scores, truth, trace, seed=0, stratum=stratum).mean
    for column in range(2):
        wins = pairs = 0.0
        for name in range(3):
            yes, no = (scores[(stratum == name) & kind, column] for kind in (truth, ~truth))
            wins += (yes[:, None] > no).sum() + 0.5 * (yes[:, None] == no).sum()
            pairs += len(yes) * len(no)
        assert found[column] == pytest.approx(wins / pairs)


def test_an_auc_over_traces_without_a_meaning_has_none() -> None:
    scores, truth, trace, _ = grouped(6)
    scores[3, 0] = np.nan
    found = stats.auc_over_traces(scores, truth, trace, seed=0)
    assert np.isnan([found.mean[0], found.low[0], found.high[0]]).all()
    assert np.isfinite([found.mean[1], found.low[1], found.high[1]]).all()
    assert np.isnan(stats.auc_over_traces(scores, np.ones(240, dtype=bool), trace, seed=0).mean).all()
    alone = stats.auc_over_traces(scores[:, 1:], truth, np.zeros(240, dtype=int), seed=0)
    assert np.isfinite(alone.mean).all()
    assert np.isnan(alone.low).all()


def test_the_interval_of_an_auc_covers_the_planted_one() -> None:
    """Scores of both kinds are normal, one apart, so the AUC is Phi(1 / sqrt 2); traces shift both kinds alike."""
    planted, covered = scipy.stats.norm.cdf(1 / np.sqrt(2)), []
    random = np.random.default_rng(0)
    for run in range(100):
        trace, truth = np.repeat(np.arange(30), 40), random.random(1200) < 0.5
        scores = random.normal(size=1200) + truth + 0.02 * random.normal(size=30)[trace]
        found = stats.auc_over_traces(scores[:, None], truth, trace, seed=run, n_draws=400)
        covered.append(found.low[0] <= planted <= found.high[0])
    assert 88 <= sum(covered) <= 99


@pytest.mark.parametrize("seed", range(4))
def test_a_median_over_traces_is_numpys_lower_one_and_its_draws_are_repeated_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    trace = random.integers(0, 5, 30 + seed) * 10
    values = np.round(random.normal(size=len(trace)) + trace / 20, 1)  # with ties
    found = stats.median_over_traces(values, trace, seed=1, n_draws=80)
    assert found.mean == np.quantile(values, 0.5, method="inverted_cdf")
    names, draws = np.unique(trace), []
    for count in stats.resampled(5, 80, 1)[1:].astype(int):
        rows = np.concatenate([values[trace == name].repeat(c) for name, c in zip(names, count, strict=True)])
        draws.append(np.quantile(rows, 0.5, method="inverted_cdf"))
    assert (found.low, found.high) == tuple(np.quantile(draws, [0.025, 0.975], method="inverted_cdf"))
    assert found.low < found.high
    assert found.n == 5
    order = random.permutation(len(values))
    assert stats.median_over_traces(values[order], trace[order], seed=1, n_draws=80) == found
    others = [stats.median_over_traces(values, trace, seed=other, n_draws=8) for other in range(20)]
    assert len({(float(other.low), float(other.high)) for other in others}) > 2


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_the_interval_of_a_median_is_made_of_values(pairs: list[tuple[int, int]]) -> None:
    values, trace = np.array(pairs, dtype=float)[:, 0], np.array(pairs)[:, 1]
    found = stats.median_over_traces(values, trace, seed=0, n_draws=30)
    assert found.mean == np.sort(values)[(len(values) - 1) // 2]
    assert found.n == len(set(trace.tolist()))
    if found.n > 1:
        assert found.low <= found.high
        assert {float(found.low), float(found.high)} <= set(values.tolist())
    else:
        assert np.isnan([found.low, found.high]).all()


def test_a_median_over_traces_leaves_nan_out_and_keeps_infinities() -> None:
    inf, nan = np.inf, np.nan
    values = np.array([1.0, nan, 3, inf, nan, nan, 2, inf, inf, inf])
    trace = np.array([0, 0, 0, 0, 7, 7, 3, 3, 3, 5])
    found = stats.median_over_traces(values, trace, seed=0)
    assert (found.mean, found.high, found.n) == (inf, inf, 3)  # of 1, 2, 3 and four infinities
    assert found.low == 3  # the first trace alone: 1, 3, infinity
    known = ~np.isnan(values)
    assert found == stats.median_over_traces(values[known], trace[known], seed=0)
    assert stats.median_over_traces(-values, trace, seed=0).mean == -inf
    alone = stats.median_over_traces(np.array([5.0, 1, nan]), np.array([0, 0, 1]), seed=0)
    assert (alone.mean, alone.n) == (1, 1)
    assert np.isnan([alone.low, alone.high]).all()
    for nothing in (np.zeros(0), np.full(3, nan)):
        found = stats.median_over_traces(nothing, np.arange(len(nothing)), seed=0)
        assert np.isnan([found.mean, found.low, found.high]).all()
        assert found.n == 0


def test_the_interval_of_a_median_covers_the_planted_one() -> None:
    """Traces shift all their values, so an interval of independent rows would be far too narrow."""
    covered, narrow = [], []
    random = np.random.default_rng(0)
    for run in range(100):
        trace = np.repeat(np.arange(30), 20)
        values = random.normal(size=600) + random.normal(size=30)[trace]
        for found, apart in ((covered, trace), (narrow, np.arange(600))):
            over = stats.median_over_traces(values, apart, seed=run, n_draws=200)
            found.append(over.low <= 0 <= over.high)
    assert 87 <= sum(covered) <= 100
    assert sum(narrow) < 70
