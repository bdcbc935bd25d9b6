"""Do the swaps take the best step each time, and stop where none helps?"""

from __future__ import annotations

import numpy as np
import pytest
import subset_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.discover.balancing import balance, balance_all_keys, top_mass
from kvlens.discover.instances import instances, keep_errors, make_pool, set_errors


def slow_balance(weights: np.ndarray, values: np.ndarray, pool: list[int], budget: int) -> float:
    """Every swap written out, until none helps."""
    kept, error = set(pool[:budget]), oracle.error(weights, values, tuple(pool[:budget]))
    while True:
        swaps = [kept - {out} | {into} for out in sorted(kept) for into in pool if into not in kept]
        errors = [oracle.error(weights, values, tuple(sorted(s))) for s in swaps]
        if not errors or min(errors) >= error * (1 - 1e-12):
            return error
        kept, error = swaps[int(np.argmin(errors))], min(errors)


@given(seed=st.integers(0, 2**32), budget=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_swaps_are_those_of_the_plain_search(seed: int, budget: int) -> None:
    random = np.random.default_rng(seed)
    weights, values = oracle.softmax_rows(random, 3, 10), random.normal(size=(10, 3))
    pool = make_pool(instances(weights, values), budget)
    found = balance(pool, budget)
    np.testing.assert_array_equal(found.error, set_errors(pool, found.members))
    for row in range(3):
        expected = slow_balance(weights[row], values, pool.keys[row].tolist(), budget)
        assert found.error[row] == pytest.approx(expected, rel=1e-9)


def test_a_swap_by_hand() -> None:
    """p = (.4, .3, .2, .1), v = (1, 1, -2, -3): mu = 0. A* of two keys errs by 1, two swaps by nothing."""
    pool = make_pool(instances(np.array([[0.4, 0.3, 0.2, 0.1]]), np.array([[1.0], [1], [-2], [-3]])), 2)
    assert top_mass(pool, 2).error[0] == pytest.approx(1)
    found = balance(pool, 2)
    assert found.error.tolist() == [0.0]
    assert pool.keys[0, found.members[0]].tolist() in ([0, 2], [1, 3])  # .4 - .4 and .3 - .3


def test_all_keys_reach_further_than_the_pool_and_can_beat_its_optimum() -> None:
    random = np.random.default_rng(0)
    weights, values = oracle.softmax_rows(random, 30, 60), random.normal(size=(60, 4))
    rows = instances(weights, values)
    within, everywhere = balance(make_pool(rows, 8), 8).error, balance_all_keys(rows, 8)
    assert (everywhere < within).any()
    for row in range(3):
        order = rows.by_weight[row, :8].tolist()
        rest = [j for j in rows.by_single_error[row].tolist() if j not in order]
        assert everywhere[row] == pytest.approx(slow_balance(weights[row], values, order + rest, 8), rel=1e-9)


def test_a_swap_that_leaves_hardly_any_mass_does_not_hide_the_best_one() -> None:
    """Its error is rounding divided by a tiny mass squared, and can look like the lowest."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        weights = np.exp(8 * random.normal(size=(1, 40)))
        rows = instances(weights / weights.sum(), random.normal(size=(40, 6)))
        alone = [float(keep_errors(rows, np.eye(40, dtype=bool)[[key]])[0]) for key in range(40)]
        assert balance_all_keys(rows, 1)[0] == pytest.approx(min(alone), rel=1e-9)
