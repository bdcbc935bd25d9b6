"""Are the error, the pool and what is refused as METHODS defines them?"""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
import subset_oracles as oracle
from hypothesis import given
from hypothesis import strategies as st

from kvlens.discover.balancing import top_mass
from kvlens.discover.instances import (
    extra_keys,
    forced_weight_error,
    instances,
    keep_errors,
    make_pool,
    set_errors,
)
from kvlens.errors import InputError


@given(seed=st.integers(0, 2**32), n_keys=st.integers(2, 9), d_head=st.integers(1, 5), shared=st.booleans())
def test_the_error_is_the_distance_of_two_outputs_and_keeps_its_bound(
    seed: int, n_keys: int, d_head: int, shared: bool
) -> None:
    random = np.random.default_rng(seed)
    weights = oracle.softmax_rows(random, 3, n_keys)
    values = random.normal(size=(n_keys, d_head) if shared else (3, n_keys, d_head)) + 3
    keep = random.random((3, n_keys)) < 0.5
    keep[:, 0] = True
    found = forced_weight_error(weights, values, keep)
    for row in range(3):
        own = values if shared else values[row]
        assert found[row] == pytest.approx(oracle.error(weights[row], own, tuple(np.flatnonzero(keep[row]))), abs=1e-12)
        farthest = max(np.linalg.norm(v - weights[row] @ own) for v in own)
        dropped = 1 - weights[row, keep[row]].sum()
        assert found[row] <= 2 * farthest * dropped + 1e-12 or dropped > 0.5


@given(seed=st.integers(0, 2**32), budget=st.integers(1, 4))
def test_the_largest_weights_err_by_at_most_twice_the_dropped_mass(seed: int, budget: int) -> None:
    random = np.random.default_rng(seed)
    rows = instances(oracle.softmax_rows(random, 4, 8), random.normal(size=(8, 3)))
    pool = make_pool(rows, budget)
    dropped = 1 - pool.weights[:, :budget].sum(1)
    assert (top_mass(pool, budget).error <= 2 * rows.distances.max(1) * dropped + 1e-12).all()


def test_three_keys_by_hand() -> None:
    """p = (.5, .3, .2), v = (1, 0, -2): mu = .1."""
    weights, values = np.array([[0.5, 0.3, 0.2]]), np.array([[1.0], [0.0], [-2.0]])
    by_hand = {
        (0,): 0.9,  # 1 - .1
        (1,): 0.1,
        (2,): 2.1,
        (0, 1): abs(0.1 - 0.5 / 0.8),
        (0, 2): abs(0.1 - 0.1 / 0.7),
        (1, 2): abs(0.1 + 0.4 / 0.5),
        (0, 1, 2): 0.0,
    }
    for kept, expected in by_hand.items():
        keep = np.isin(np.arange(3), kept)[None]
        assert forced_weight_error(weights, values, keep)[0] == pytest.approx(expected, abs=1e-15)


def test_a_set_without_mass_has_an_infinite_error_and_all_keys_none() -> None:
    weights, values = np.array([[0.25, 0.75, 0.0]]), np.array([[1.0, 2], [3, -1], [5, 5]])
    assert forced_weight_error(weights, values, np.array([[False, False, True]]))[0] == np.inf
    assert forced_weight_error(weights, values, np.array([[False, False, False]]))[0] == np.inf
    assert forced_weight_error(weights, values, np.array([[True, True, False]]))[0] == 0


def test_a_sink_is_an_always_kept_key_with_value_0() -> None:
    random = np.random.default_rng(0)
    weights, values = oracle.softmax_rows(random, 5, 7), random.normal(size=(7, 3)) + 1
    values[0] = 0
    keep = random.random((5, 7)) < 0.5
    keep[:, 0] = True
    as_key = forced_weight_error(weights, values, keep)
    as_sink = forced_weight_error(weights[:, 1:], values[1:], keep[:, 1:], sink=weights[:, 0])
    np.testing.assert_allclose(as_sink, as_key, rtol=1e-12)
    pool = make_pool(instances(weights[:, 1:], values[1:], sink=weights[:, 0]), 2)
    for row in range(5):
        assert top_mass(pool, 2).error[row] == pytest.approx(
            oracle.error(weights[row], values, (0, *(pool.keys[row, :2] + 1).tolist())), rel=1e-12
        )


def test_padding_is_as_if_it_were_not_there() -> None:
    random = np.random.default_rng(1)
    weights, values = oracle.softmax_rows(random, 2, 9), random.normal(size=(9, 4))
    visible = np.arange(9) < np.array([[6], [9]])
    weights = np.where(visible, weights, 0)
    weights /= weights.sum(1, keepdims=True)
    both = instances(weights, values, visible=visible)
    alone = instances(weights[:1, :6], values[:6])
    np.testing.assert_array_equal(both.take(np.array([0])).by_single_error[:, :6], alone.by_single_error)
    assert both.n_keys.tolist() == [6, 9]
    pool = make_pool(both.take(np.array([0])), 2)
    assert pool.size == 6
    np.testing.assert_array_equal(pool.keys, make_pool(alone, 2).keys)
    np.testing.assert_array_equal(
        keep_errors(both, np.ones((2, 9), dtype=bool)), [0, 0]
    )  # keeping padding keeps nothing more


@pytest.mark.parametrize(("budget", "n_extra"), [(4, 24), (8, 12), (16, 6), (32, 4)])
def test_pools_have_the_papers_sizes(budget: int, n_extra: int) -> None:
    assert extra_keys(budget) == n_extra
    subsets = {4: 20_475, 8: 125_970, 16: 74_613, 32: 58_905}[budget]
    assert comb(budget + n_extra, budget) == subsets


def test_a_pool_is_the_largest_weights_and_the_largest_single_key_errors_beyond() -> None:
    random = np.random.default_rng(2)
    weights, values = oracle.softmax_rows(random, 6, 60), random.normal(size=(60, 4))
    pool = make_pool(instances(weights, values), 8)
    for row in range(6):
        top = sorted(range(60), key=lambda j: (-weights[row, j], j))[:8]
        single = weights[row] * np.linalg.norm(values - weights[row] @ values, axis=1)
        extra = sorted(set(range(60)) - set(top), key=lambda j: (-single[j], j))[:12]
        assert pool.keys[row].tolist() == top + extra


def test_ties_go_to_the_lower_position() -> None:
    weights, values = np.full((1, 8), 1 / 8), np.array([[1.0], [-1]] * 4)
    pool = make_pool(instances(weights, values), 3, n_extra=2)
    assert pool.keys.tolist() == [[0, 1, 2, 3, 4]]


def test_sets_are_evaluated_directly() -> None:
    random = np.random.default_rng(3)
    weights, values = oracle.softmax_rows(random, 4, 12), random.normal(size=(12, 6))
    pool = make_pool(instances(weights, values), 3)
    members = np.array([[0, 4, 7], [1, 2, 3], [0, 1, 11]])
    rows = np.array([3, 0, 3])
    found = set_errors(pool, members, rows)
    for i in range(3):
        kept = tuple(pool.keys[rows[i], members[i]].tolist())
        assert found[i] == pytest.approx(oracle.error(weights[rows[i]], values, kept), rel=1e-12)


GOOD = np.array([[0.5, 0.3, 0.2]])


@pytest.mark.parametrize(
    ("weights", "values", "options", "message"),
    [
        (np.array([[0.5, np.nan, 0.5]]), np.ones((3, 2)), {}, "NaN"),
        (GOOD, np.array([[1.0], [np.inf], [0.0]]), {}, "values hold"),
        (np.array([[0.7, -0.2, 0.5]]), np.ones((3, 2)), {}, "negative"),
        (np.array([[0.5, 0.3, 0.1]]), np.ones((3, 2)), {}, "sum to 0.9"),
        (GOOD, np.ones((3, 2)), {"sink": np.array([0.5])}, "sum to 1.5"),
        (GOOD, np.ones((4, 2)), {}, "do not fit"),
        (GOOD, np.ones((2, 3, 2)), {}, "do not fit"),
        (GOOD, np.ones((3, 2)), {"visible": np.array([[True, True, False]])}, "does not see has a weight"),
    ],
)
def test_rows_without_an_error_to_speak_of_are_refused(
    weights: np.ndarray, values: np.ndarray, options: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        instances(weights, values, **options)
    assert caught.value.hint


def test_pools_that_cannot_be_are_refused() -> None:
    rows = instances(GOOD, np.ones((3, 2)))
    with pytest.raises(InputError, match="3 to 3 candidates"):
        make_pool(rows, 3)
    with pytest.raises(InputError, match="budget of 0"):
        make_pool(rows, 0)
