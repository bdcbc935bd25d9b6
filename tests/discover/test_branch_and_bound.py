"""Is what branch and bound calls proven the minimum, and its bound below it where nothing is proven?"""

from __future__ import annotations

import numpy as np
import pytest
import subset_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.discover import branch_and_bound as module
from kvlens.discover.balancing import top_mass
from kvlens.discover.branch_and_bound import branch_and_bound
from kvlens.discover.instances import Pool, instances, make_pool, set_errors
from kvlens.discover.subsets import best_subsets
from kvlens.errors import InputError


def some_pool(seed: int, n_keys: int, budget: int, d_head: int, *, sink: bool = False, n_rows: int = 3) -> Pool:
    random = np.random.default_rng(seed)
    weights, values = oracle.softmax_rows(random, n_rows, n_keys + 1), random.normal(size=(n_keys + 1, d_head)) + 0.3
    mass = weights[:, 0] if sink else np.zeros(n_rows)
    weights = weights[:, 1:] if sink else weights[:, 1:] / weights[:, 1:].sum(1, keepdims=True)
    return make_pool(instances(weights, values[1:], sink=mass), budget, n_extra=n_keys - budget)


@given(
    seed=st.integers(0, 2**32),
    n_keys=st.integers(3, 12),
    d_head=st.integers(1, 8),
    sink=st.booleans(),
    worth=st.sampled_from([0, 1, 5, 50]),
    directions=st.sampled_from([1, 6]),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_the_proven_minimum_is_that_of_all_subsets(
    seed: int, n_keys: int, d_head: int, sink: bool, worth: int, directions: int, data: st.DataObject
) -> None:
    """However far it splits: down to complete sets, or a few levels."""
    budget = data.draw(st.integers(1, n_keys - 1))
    pool = some_pool(seed, n_keys, budget, d_head, sink=sink)
    expected = best_subsets(pool, budget, device="cpu").error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH_SPLITTING", worth)
        patch.setattr(module, "DIRECTIONS", directions)
        found = branch_and_bound(pool, budget, start=top_mass(pool, budget))
    np.testing.assert_allclose(found.error, expected, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(set_errors(pool, found.members), expected, rtol=1e-9, atol=1e-14)
    np.testing.assert_array_equal(found.bound, found.error)
    assert found.exact.all()


@given(seed=st.integers(0, 2**32), max_nodes=st.integers(1, 60), d_head=st.sampled_from([2, 8, 32]))
@settings(max_examples=60, deadline=None)
def test_a_bound_is_below_the_minimum_and_the_error_above(seed: int, max_nodes: int, d_head: int) -> None:
    pool = some_pool(seed, 14, 6, d_head)
    expected = best_subsets(pool, 6, device="cpu").error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH_SPLITTING", 0)
        found = branch_and_bound(pool, 6, max_nodes=max_nodes, max_subsets=0)
    assert (found.bound <= expected * (1 + 1e-9)).all()
    assert (found.error >= expected * (1 - 1e-9)).all()
    np.testing.assert_array_equal(found.exact, found.bound == found.error)


def test_bounds_rise_with_nodes_and_are_worth_something() -> None:
    pool = some_pool(1, 20, 6, 32, n_rows=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH_SPLITTING", 0)
        bounds = [branch_and_bound(pool, 6, max_nodes=n, max_subsets=0).bound for n in (1, 40, 400)]
    error = best_subsets(pool, 6).error
    assert (np.diff(np.array(bounds), axis=0) >= -1e-12).all()
    assert (bounds[-1] / error).mean() > (bounds[0] / error).mean() + 0.1


def test_far_fewer_nodes_than_subsets_and_the_larger_pool_is_no_worse() -> None:
    random = np.random.default_rng(2)
    rows = instances(oracle.softmax_rows(random, 4, 60, 3.0), random.normal(size=(60, 32)))
    small, large = best_subsets(make_pool(rows, 8), 8).error, make_pool(rows, 8, n_extra=32)
    found = branch_and_bound(large, 8)
    assert found.exact.all()
    assert (found.error <= small * (1 + 1e-9)).all()
    assert (found.n_nodes + found.n_enumerated < 76_904_685).all()


def test_sets_that_no_direction_picks_are_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split to the end, with one direction a node and without the swaps that follow a pick."""
    monkeypatch.setattr(module, "WORTH_SPLITTING", 0)
    monkeypatch.setattr(module, "DIRECTIONS", 1)
    monkeypatch.setattr(module, "balance", lambda pool, budget, start: start)
    pool = some_pool(3, 8, 2, 2, n_rows=400)
    found = branch_and_bound(pool, 2, start=top_mass(pool, 2))
    np.testing.assert_allclose(found.error, best_subsets(pool, 2, device="cpu").error, rtol=1e-9)


def test_budgets_that_keep_everything_are_refused() -> None:
    with pytest.raises(InputError, match="budget of 5"):
        branch_and_bound(some_pool(0, 5, 3, 2), 5)
