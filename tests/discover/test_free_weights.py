"""Are distances to convex hulls right, never above forced weights, and bounded by their gap?"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import subset_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.discover import free_weights
from kvlens.discover.balancing import top_mass
from kvlens.discover.free_weights import frank_wolfe, hull_distance, nearest_point
from kvlens.discover.instances import Instances, instances, make_pool
from kvlens.discover.subsets import best_subsets


def slow_distance(atoms: np.ndarray) -> float:
    """The distance from 0 to the hull of the atoms, by non-negative least squares with the sum as a heavy row."""
    heavy = 1e5 * np.abs(atoms).max()
    matrix = np.vstack([atoms.T, np.full(len(atoms), heavy)])
    weights, _ = scipy.optimize.nnls(matrix, np.r_[np.zeros(atoms.shape[1]), heavy])
    return float(np.linalg.norm(weights / weights.sum() @ atoms))


@given(
    seed=st.integers(0, 2**32),
    n_atoms=st.integers(1, 12),
    d_head=st.integers(1, 8),
    away=st.floats(0, 3),
    twice=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_nearest_point_is_that_of_least_squares(
    seed: int, n_atoms: int, d_head: int, away: float, twice: bool
) -> None:
    random = np.random.default_rng(seed)
    atoms = random.normal(size=(4, n_atoms, d_head)) + away
    atoms = np.concatenate([atoms, atoms[:, :1]], 1) if twice else atoms
    found = nearest_point(atoms, np.ones(atoms.shape[:2], dtype=bool))
    assert (found.weights >= 0).all()
    np.testing.assert_allclose(found.weights.sum(1), 1)
    np.testing.assert_allclose(np.einsum("rk,rkd->rd", found.weights, atoms), found.point, atol=1e-12)
    for row in range(4):
        expected = slow_distance(atoms[row])
        assert found.error[row] == pytest.approx(expected, abs=1e-7)
        assert found.error[row] - found.gap[row] <= expected + 1e-7
        assert found.gap[row] <= 1e-7


def test_the_gap_says_what_is_missing_where_the_search_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    atoms = random.normal(size=(20, 6, 8)) + 0.5
    exact = nearest_point(atoms, np.ones((20, 6), dtype=bool)).error
    monkeypatch.setattr(free_weights, "MOST_PASSES", 0)
    cut = nearest_point(atoms, np.ones((20, 6), dtype=bool))
    assert (cut.error > exact).all()
    assert (cut.error - cut.gap <= exact + 1e-12).all()
    assert (cut.error - cut.gap > 0).any()


def test_atoms_that_are_not_there_do_not_count() -> None:
    random = np.random.default_rng(0)
    atoms = random.normal(size=(3, 6, 4)) + 1
    usable = np.ones((3, 6), dtype=bool)
    usable[1, 2:4] = False
    found = nearest_point(atoms, usable)
    assert found.error[1] == pytest.approx(slow_distance(atoms[1][usable[1]]))
    assert (found.weights[~usable] == 0).all()


def test_a_segment_and_a_triangle_by_hand() -> None:
    """From (1, 1) to (-1, 1) the nearest point is (0, 1); adding (0, -1) brings the origin inside."""
    segment = np.array([[[1.0, 1], [-1, 1], [0, -1]]])
    found = nearest_point(segment, np.array([[True, True, False]]))
    assert found.error[0] == pytest.approx(1)
    assert found.weights[0] == pytest.approx([0.5, 0.5, 0])
    assert nearest_point(segment, np.ones((1, 3), dtype=bool)).error[0] == pytest.approx(0, abs=1e-12)


def rows_of(seed: int, n_rows: int = 12, n_keys: int = 40, d_head: int = 16) -> Instances:
    random = np.random.default_rng(seed)
    return instances(oracle.softmax_rows(random, n_rows, n_keys), random.normal(size=(n_keys, d_head)))


@pytest.mark.parametrize("budget", [4, 8, 16])
def test_free_weights_never_do_worse_than_forced_ones_on_the_same_keys(budget: int) -> None:
    rows = rows_of(budget)
    pool = make_pool(rows, budget)
    for chosen in (top_mass(pool, budget), best_subsets(pool, budget)):
        free = hull_distance(rows, np.take_along_axis(pool.keys, chosen.members, 1))
        assert (free.error <= chosen.error + 1e-12).all()
        assert (free.error < 0.99 * chosen.error).any()


def test_one_kept_key_has_no_weight_to_free() -> None:
    rows = rows_of(1)
    pool = make_pool(rows, 1)
    chosen = best_subsets(pool, 1)
    free = hull_distance(rows, np.take_along_axis(pool.keys, chosen.members, 1))
    np.testing.assert_allclose(free.error, chosen.error, rtol=1e-12)


def test_frank_wolfe_keeps_at_most_its_budget_and_falls_below_sigma_over_root_s() -> None:
    rows = rows_of(2, d_head=32)
    found, keys = frank_wolfe(rows, (1, 4, 8))
    sigma = np.sqrt((rows.weights * rows.distances**2).sum(1))
    for budget, free in found.items():
        direct = hull_distance(rows, keys[:, :budget])
        np.testing.assert_allclose(free.error, direct.error, rtol=1e-9)
        assert (free.error <= sigma / np.sqrt(budget)).all()
    np.testing.assert_array_equal(found[1].error, rows.distances.min(1))
    assert (found[8].error < found[4].error).all()


def test_frank_wolfe_stops_where_nothing_is_left() -> None:
    """Two keys hold mu exactly; more are not needed, and padding never enters."""
    values = np.array([[1.0, 0], [-1, 0], [7, 7], [-9, 0]])
    weights = np.array([[0.5, 0.5, 0.0, 0.0]])
    visible = np.array([[True, True, True, False]])
    found, keys = frank_wolfe(instances(weights, values, visible=visible), (3,))
    assert found[3].error.tolist() == [0.0]
    assert set(keys[0].tolist()) == {0, 1}


def test_a_sink_is_one_more_atom() -> None:
    random = np.random.default_rng(3)
    weights, values = oracle.softmax_rows(random, 5, 9), random.normal(size=(9, 4)) + 0.5
    values[0] = 0
    with_key, with_sink = instances(weights, values), instances(weights[:, 1:], values[1:], sink=weights[:, 0])
    keys = np.tile(np.array([1, 4]), (5, 1))
    expected = hull_distance(with_key, np.concatenate([np.zeros((5, 1), dtype=int), keys + 1], 1))
    np.testing.assert_allclose(hull_distance(with_sink, keys).error, expected.error, rtol=1e-9)
    searched, chosen = frank_wolfe(with_sink, (3,))
    np.testing.assert_allclose(searched[3].error, hull_distance(with_sink, chosen).error, rtol=1e-9)


def test_an_output_inside_the_hull_is_at_distance_zero() -> None:
    """More keys than dimensions: mu lies inside their hull, and what is left is rounding."""
    random = np.random.default_rng(4)
    rows = instances(oracle.softmax_rows(random, 6, 200), random.normal(size=(200, 4)))
    keys = np.argsort(-rows.weights, 1)[:, :60]
    found = hull_distance(rows, keys)
    assert (found.error == 0).all()
    assert (found.gap == 0).all()
    search, order = frank_wolfe(rows, (2, 60))
    assert (search[60].error == 0).all()
    assert (search[2].error > 0).all()
    assert order.shape == (6, 60)
