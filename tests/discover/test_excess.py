"""Are excess over the optimum and the cost of a shared set what a plain computation gives?"""

from __future__ import annotations

import numpy as np
import pytest
import subset_oracles as oracle

from kvlens.discover.ceilings import ceilings
from kvlens.discover.excess import excess, largest, shared_set
from kvlens.discover.instances import instances
from kvlens.errors import InputError


def test_excess_at_its_ends() -> None:
    found = excess(np.array([0.0, 1.0, 3.0, 1.0]), np.array([0.0, 0.0, 2.0, 2.0]))
    assert found.tolist() == [1.0, np.inf, 1.5, 0.5]


def test_the_largest_scores_among_visible_keys() -> None:
    scores = np.array([[1.0, 3, 3, 2], [9, 1, 1, 1]])
    visible = np.array([[True, True, True, True], [False, True, True, False]])
    assert largest(scores, visible, 2).tolist() == [[False, True, True, False], [False, True, True, False]]
    assert largest(scores, visible, 1).tolist() == [[False, True, False, False], [False, True, False, False]]
    assert largest(scores, visible, 3)[1].tolist() == [False, True, True, False]


def test_a_shared_set_is_the_mean_over_heads_top_and_errors_are_those_of_joined_outputs() -> None:
    random = np.random.default_rng(0)
    weights, values = oracle.softmax_rows(random, 6, 20), random.normal(size=(20, 3))
    rows = instances(weights, values)
    group = np.array([7, 2, 7, 2, 7, 2])
    best = ceilings(rows, (4,), free_weights=False)["best_error"]
    found = shared_set(rows, group, 4, best)
    assert found["group"].tolist() == [2, 7]
    assert found["n_heads"].tolist() == [3, 3]
    for line, name in enumerate((2, 7)):
        inside = np.flatnonzero(group == name)
        kept = tuple(np.argsort(-weights[inside].mean(0), kind="stable")[:4].tolist())
        shared = np.sqrt(np.mean([oracle.error(weights[row], values, kept) ** 2 for row in inside]))
        tops = [tuple(np.argsort(-weights[row], kind="stable")[:4].tolist()) for row in inside]
        own = np.sqrt(np.mean([oracle.error(weights[r], values, t) ** 2 for r, t in zip(inside, tops, strict=True)]))
        optimum = np.sqrt(np.mean(best[inside] ** 2))
        assert found["shared_error"][line] == pytest.approx(shared)
        assert found["cost"][line] == pytest.approx(shared / own)
        assert found["excess"][line] == pytest.approx(shared / optimum)
    assert (found["excess"] > found["cost"]).all()


def test_a_head_alone_shares_at_no_cost() -> None:
    random = np.random.default_rng(1)
    rows = instances(oracle.softmax_rows(random, 3, 20), random.normal(size=(20, 3)))
    found = shared_set(rows, np.arange(3), 4, np.ones(3))
    assert found["cost"].tolist() == [1.0, 1.0, 1.0]


def test_heads_of_other_queries_are_no_group() -> None:
    visible = np.array([[True, True, True], [True, True, False]])
    rows = instances(np.array([[0.5, 0.3, 0.2], [0.5, 0.5, 0]]), np.ones((3, 1)), visible=visible)
    with pytest.raises(InputError, match="same keys"):
        shared_set(rows, np.array([0, 0]), 1, np.ones(2))
