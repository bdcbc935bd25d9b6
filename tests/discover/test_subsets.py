"""Is the best subset of a pool the one that itertools finds in float64?"""

from __future__ import annotations

import sys
from itertools import combinations

import numpy as np
import pytest
import subset_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.discover import halves, kernel, subsets
from kvlens.discover.balancing import Chosen, balance, top_mass
from kvlens.discover.instances import Pool, instances, make_pool, set_errors
from kvlens.discover.subsets import best_subsets
from kvlens.errors import EnvironmentLacks


def slow_best(pool: Pool, row: int, budget: int) -> float:
    """All subsets in turn, float64, directly."""
    sets = np.array(list(combinations(range(pool.size), budget)))
    return float(set_errors(pool, sets, np.full(len(sets), row)).min())


@given(
    seed=st.integers(0, 2**32),
    n_keys=st.integers(2, 11),
    d_head=st.integers(1, 6),
    spread=st.floats(0, 6),
    offset=st.floats(0, 100),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_minimum_is_that_of_all_subsets(
    seed: int, n_keys: int, d_head: int, spread: float, offset: float, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    budget = data.draw(st.integers(1, n_keys - 1))
    weights = oracle.softmax_rows(random, 3, n_keys, spread)
    values = random.normal(size=(n_keys, d_head)) + offset
    pool = make_pool(instances(weights, values), budget)
    found = best_subsets(pool, budget, n_threads=1)
    np.testing.assert_array_equal(found.error, set_errors(pool, found.members))
    for row in range(3):
        expected = oracle.best(weights[row], values, pool.keys[row], budget)
        assert found.error[row] == pytest.approx(expected, rel=1e-9, abs=1e-13 * (1 + offset))


@pytest.mark.parametrize("budget", [4, 8, 16, 32])
@pytest.mark.parametrize("d_head", [1, 2, 64])
def test_the_papers_pools_against_all_subsets(budget: int, d_head: int) -> None:
    """One and two dimensions are the hard ones: thousands of sets lie within the rounding of float32."""
    random = np.random.default_rng(budget)
    rows = instances(oracle.softmax_rows(random, 2, 80), random.normal(size=(80, d_head)))
    pool = make_pool(rows, budget)
    found = best_subsets(pool, budget)
    for row in range(2):
        assert found.error[row] == pytest.approx(slow_best(pool, row, budget), rel=1e-9)
    np.testing.assert_array_equal(found.error, set_errors(pool, found.members))


@pytest.mark.parametrize("budget", [3, 9])
def test_the_start_the_threads_and_the_device_do_not_matter(budget: int) -> None:
    random = np.random.default_rng(7)
    rows = instances(oracle.softmax_rows(random, 40, 50), random.normal(size=(50, 8)))
    pool = make_pool(rows, budget, n_extra=5)
    reference = best_subsets(pool, budget, n_threads=1)
    for other in (
        best_subsets(pool, budget, start=top_mass(pool, budget)),
        best_subsets(pool, budget, n_threads=3),
        best_subsets(pool, budget, device="cpu"),
    ):
        np.testing.assert_array_equal(other.error, reference.error)
        np.testing.assert_array_equal(other.members, reference.members)


def test_blocks_of_every_size_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than run side by side, in blocks of a few; on a device one row at a time, few sets at once."""
    random = np.random.default_rng(8)
    rows = instances(oracle.softmax_rows(random, 150, 40), random.normal(size=(40, 2)))
    for budget in (5, 12):
        pool = make_pool(rows, budget, n_extra=4)
        expected = [slow_best(pool, row, budget) for row in range(150)]
        np.testing.assert_allclose(best_subsets(pool, budget).error, expected, rtol=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(subsets, "ROWS_AT_ONCE", 7)
            np.testing.assert_allclose(best_subsets(pool, budget).error, expected, rtol=1e-9)
            patch.setattr(halves, "BLOCK_FLOATS", 1)
            patch.setattr(halves, "EVALUATED_AT_ONCE", 3)
            np.testing.assert_allclose(best_subsets(pool, budget, device="cpu").error, expected, rtol=1e-9)


@pytest.mark.parametrize("budget", [4, 10])
def test_a_bad_start_is_left_behind_step_by_step(budget: int) -> None:
    """From the last keys of the pool a row finds better sets many times over, in the middle of the tree."""
    random = np.random.default_rng(16)
    rows = instances(oracle.softmax_rows(random, 300, 40, 1.0), random.normal(size=(40, 3)))
    pool = make_pool(rows, budget, n_extra=4)
    last = np.tile(np.arange(4, 4 + budget), (300, 1))
    found = best_subsets(pool, budget, start=Chosen(set_errors(pool, last), last))
    np.testing.assert_allclose(found.error, best_subsets(pool, budget, device="cpu").error, rtol=1e-9)


def test_repeated_tokens_tie_by_the_thousand_and_keep_the_largest_weights() -> None:
    """In a first layer a repeated token has one value: every set of them has the same output."""
    random = np.random.default_rng(14)
    values = np.vstack([np.ones((30, 3)), random.normal(size=(4, 3))])
    weights = np.concatenate([np.full(30, 1 / 31), np.full(4, 1 / 124)])[None]
    pool = make_pool(instances(weights, values), 8, n_extra=10)
    for device in (None, "cpu"):
        found = best_subsets(pool, 8, device=device)
        assert found.error[0] == pytest.approx(slow_best(pool, 0, 8), rel=1e-9)


def test_the_order_of_keys_does_not_matter() -> None:
    random = np.random.default_rng(9)
    weights, values = oracle.softmax_rows(random, 6, 50), random.normal(size=(50, 8))
    order = random.permutation(50)
    for budget in (4, 8):
        here = best_subsets(make_pool(instances(weights, values), budget), budget)
        there = best_subsets(make_pool(instances(weights[:, order], values[order]), budget), budget)
        np.testing.assert_allclose(there.error, here.error, rtol=1e-12)


def test_four_keys_by_hand() -> None:
    """Equal weights, v = (3, 1, -1, -3): mu = 0, and two pairs balance it exactly; the largest weights tie."""
    pool = make_pool(instances(np.full((1, 4), 0.25), np.array([[3.0], [1], [-1], [-3]])), 2)
    assert pool.keys.tolist() == [[0, 1, 3, 2]]
    assert top_mass(pool, 2).error.tolist() == [2.0]  # (3 + 1) / 2
    found = best_subsets(pool, 2)
    assert found.error.tolist() == [0.0]
    assert sorted(pool.keys[0, found.members[0]].tolist()) in ([0, 3], [1, 2])


def test_duplicated_values_and_equal_weights_keep_the_largest_weights_where_nothing_is_better() -> None:
    values = np.repeat(np.array([[1.0, 0], [0, 1], [-1, -1]]), 4, axis=0)
    pool = make_pool(instances(np.full((2, 12), 1 / 12), values), 3)
    found = best_subsets(pool, 3)
    assert (found.error == 0).all()  # one of each kind
    same = make_pool(instances(np.full((1, 12), 1 / 12), np.ones((12, 2)) * 0.1), 3)
    found = best_subsets(same, 3)
    assert found.error.tolist() == [0.0]
    assert found.members.tolist() == [[0, 1, 2]]


def test_weights_of_zero_and_all_on_one_key() -> None:
    random = np.random.default_rng(10)
    values = random.normal(size=(12, 3))
    one_hot = np.zeros((1, 12))
    one_hot[0, 5] = 1
    pool = make_pool(instances(one_hot, values), 4)
    assert best_subsets(pool, 4).error.tolist() == [0.0]
    sparse = np.zeros((1, 12))
    sparse[0, :6] = oracle.softmax_rows(random, 1, 6)
    pool = make_pool(instances(sparse, values), 4)
    found = best_subsets(pool, 4)
    assert found.error[0] == pytest.approx(oracle.best(sparse[0], values, pool.keys[0], 4), rel=1e-9)


def test_a_sink_takes_no_budget_and_is_in_every_set() -> None:
    random = np.random.default_rng(11)
    weights, values = oracle.softmax_rows(random, 4, 10), random.normal(size=(10, 3)) + 1
    for budget in (2, 7):
        pool = make_pool(instances(weights[:, 1:], values[1:], sink=weights[:, 0]), budget)
        found = best_subsets(pool, budget)
        for row in range(4):
            expected = oracle.best(weights[row, 1:], values[1:], pool.keys[row], budget, sink=weights[row, 0])
            assert found.error[row] == pytest.approx(expected, rel=1e-9)


def test_scales_from_tiny_to_huge_are_as_exact() -> None:
    random = np.random.default_rng(12)
    weights, values = oracle.softmax_rows(random, 3, 30, 3.0), random.normal(size=(30, 4))
    reference = best_subsets(make_pool(instances(weights, values), 4), 4)
    for scale in (1e-30, 1e30):
        scaled = best_subsets(make_pool(instances(weights, values * scale), 4), 4)
        np.testing.assert_allclose(scaled.error, reference.error * scale, rtol=1e-9)


def test_nothing_beats_the_optimum_and_balancing_reaches_it_in_most_rows() -> None:
    random = np.random.default_rng(13)
    rows = instances(oracle.softmax_rows(random, 200, 100), random.normal(size=(100, 16)))
    reached = []
    for budget in (4, 8):
        pool = make_pool(rows, budget)
        first, balanced, best = top_mass(pool, budget), balance(pool, budget), best_subsets(pool, budget)
        assert (best.error <= balanced.error).all()
        assert (balanced.error <= first.error).all()
        assert (best.error < balanced.error).any()
        assert (balanced.error < first.error).any()
        reached.append((best.error == balanced.error).mean())
    assert min(reached) > 0.5


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(15)
    pool = make_pool(instances(oracle.softmax_rows(random, 2, 20), random.normal(size=(20, 3))), 3)
    expected = best_subsets(pool, 3).error
    monkeypatch.delitem(sys.modules, "kvlens.discover.kernel")
    monkeypatch.delattr("kvlens.discover.kernel")
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(EnvironmentLacks, match="numba") as caught:
        best_subsets(pool, 3)
    assert "lens" in caught.value.hint
    np.testing.assert_array_equal(best_subsets(pool, 3, device="cpu").error, expected)


def test_a_folder_that_cannot_be_written_to_costs_only_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it = kernel.numba.njit

    def no_place(**options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_it(**options)

    monkeypatch.setattr(kernel.numba, "njit", no_place)
    assert kernel.compiled(lambda x: x + 1)(2) == 3
