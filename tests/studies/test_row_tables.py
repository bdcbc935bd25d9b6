"""Rules by hand, on a few keys; blocks of rows are tried on whole models in test_ceilings.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvlens.discover.ceilings import ceilings
from kvlens.discover.instances import Instances, instances, keep_errors
from kvlens.discover.nulls import NULLS
from kvlens.probe.row_block import make_block
from kvlens.studies.row_tables import RULES, TABLES, kept_by, measure_block, predictor_budget

SEED = (0, 1, 2)
WEIGHTS = np.array([[0.1, 0.05, 0.4, 0.05, 0.1, 0.1, 0.2], [0.5, 0.2, 0.2, 0.1, 0, 0, 0]])
VISIBLE = np.arange(7) <= np.array([[6], [3]])
# Lengths 1, 9, 1, 0, 5, 5, 2 of the values; with the weights .1, .45, .4, 0, .5, .5, .4 and .5, 1.8, .2, 0.
VALUES = np.array([[1, 0], [0, -9], [0, 1], [0, 0], [3, 4], [-5, 0], [0, 2]], dtype=float)
NORMS = np.array([3.0, 1, 2, 1, 5, 0.5, 4])


@pytest.fixture
def rows() -> Instances:
    return instances(WEIGHTS, VALUES, visible=VISIBLE)


def keys(rows: Instances, rule: str, budget: int) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in kept_by(rule, rows, NORMS, budget, SEED)]


@pytest.mark.parametrize(
    ("rule", "budget", "expected"),
    [
        ("streaming", 1, [[6], [3]]),
        ("streaming", 2, [[0, 6], [0, 3]]),
        ("streaming", 4, [[0, 1, 2, 6], [0, 1, 2, 3]]),
        ("streaming", 5, [[0, 1, 2, 3, 6], [0, 1, 2, 3]]),
        ("streaming", 6, [[0, 1, 2, 3, 5, 6], [0, 1, 2, 3]]),
        ("key_norm", 1, [[5], [1]]),  # of equal norms the earlier key
        ("key_norm", 3, [[1, 3, 5], [1, 2, 3]]),
        ("value_weighted", 1, [[4], [1]]),  # of equal products the earlier key
        ("value_weighted", 3, [[1, 4, 5], [0, 1, 2]]),
        ("value_weighted", 4, [[1, 2, 4, 5], [0, 1, 2, 3]]),  # .4 twice
    ],
)
def test_what_a_rule_keeps(rows: Instances, rule: str, budget: int, expected: list[list[int]]) -> None:
    assert keys(rows, rule, budget) == expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("budget", [1, 3, 7, 9])
def test_a_rule_keeps_as_many_keys_as_there_are_and_only_seen_ones(rows: Instances, rule: str, budget: int) -> None:
    kept = kept_by(rule, rows, NORMS, budget, SEED)
    assert kept.sum(1).tolist() == [min(budget, 7), min(budget, 4)]
    assert not (kept & ~VISIBLE).any()


def test_random_sets_depend_on_seed_and_budget_and_favour_no_key() -> None:
    many = instances(np.full((2000, 7), 1 / 7), VALUES)
    kept = kept_by("random", many, NORMS, 3, SEED)
    assert (kept == kept_by("random", many, NORMS, 3, SEED)).all()
    assert (kept != kept_by("random", many, NORMS, 3, (0, 1, 3))).any()
    assert kept.mean(0) == pytest.approx(np.full(7, 3 / 7), abs=0.05)
    assert len({tuple(row) for row in kept}) == 35  # every one of 7 over 3
    smaller = kept_by("random", many, NORMS, 2, SEED)
    assert (smaller & ~kept).any()  # drawn anew, not a part of it


@pytest.mark.parametrize(
    ("budgets", "expected"), [((4, 8, 16, 32), 8), ((2, 4), 4), ((6, 10), 6), ((10, 6), 6), ((9,), 9), ((1, 16), 1)]
)
def test_rows_are_told_apart_at_eight_keys_or_the_nearest_budget(budgets: tuple[int, ...], expected: int) -> None:
    assert predictor_budget(budgets) == expected


def block(trace_id: str = "t", *, window: int | None = None, n_keys: int = 12) -> Any:
    """One layer of four heads over two key heads, three queries each; the second key head asks early ones."""
    random = np.random.default_rng(3)
    queries = torch.tensor([[6, 9, 11], [5, 7, 8]])
    scores = torch.from_numpy(random.normal(size=(4, 3, n_keys)) * 2)
    at = queries.repeat_interleave(2, 0)[..., None]
    pos = torch.arange(n_keys)
    hidden = (pos > at) | (pos <= at - (window or n_keys))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    values, keys = (torch.from_numpy(random.normal(size=(2, n_keys, 5))).float() for _ in range(2))
    dense = weights @ values.double().repeat_interleave(2, 0)
    sink = torch.zeros(4, 3)
    return make_block(
        trace_id,
        4,
        queries,
        weights,
        values,
        dense,
        sink=sink,
        keys=keys,
        own=dense,
        plain=dense,
        window=window,
    )


@pytest.mark.parametrize("window", [None, 5])
def test_a_block_becomes_rows_of_each_head_over_what_it_sees(window: int | None) -> None:
    found = block(window=window)
    tables = measure_block(found, (2, 3), NULLS, seed=0)
    assert set(tables) == set(TABLES)
    rows = tables["rows"]
    at = [(head, query) for head in range(4) for query in ([6, 9, 11], [5, 7, 8])[head // 2]]
    assert list(zip(rows["head"], rows["query"], strict=True)) == [pair for pair in at for _ in (2, 3)]
    assert rows["budget"].tolist() == [2, 3] * 12
    assert set(rows["trace_id"]) == {"t"}
    assert set(rows["layer"]) == {4}
    assert rows["n_keys"].tolist() == [min(query + 1, window or 12) for _, query in at for _ in (2, 3)]
    for place, (head, query) in enumerate(at):
        seen = slice(query + 1 - min(query + 1, window or 12), query + 1)
        p, v = found.weights[place, seen].double().numpy(), found.values[head // 2, seen].double().numpy()
        alone = ceilings(instances(p[None] / p.sum(), v), (2, 3))
        for name in ("top_mass_error", "best_error", "dropped_mass", "free_error", "effective_rank"):
            assert rows[name][2 * place : 2 * place + 2] == pytest.approx(alone[name], rel=1e-6, abs=1e-9), name
        for rule in RULES[:2]:
            norms = found.key_norms[head // 2, seen].double().numpy()
            # Sinks are the first keys of the trace, in a window or not.
            one = instances(p[None] / p.sum(), v)
            line = (tables["excess"]["head"] == head) & (tables["excess"]["query"] == query)
            line &= (tables["excess"]["rule"] == rule) & (tables["excess"]["budget"] == 2)
            if rule == "key_norm" or seen.start == 0:
                expected = keep_errors(one, kept_by(rule, one, norms, 2, SEED))
                assert tables["excess"]["error"][line] == pytest.approx(expected, rel=1e-6)
    groups = tables["groups"]
    assert groups["first_head"].tolist() == [0] * 6 + [2] * 6
    assert groups["query"].tolist() == [6, 9, 11] * 2 + [5, 7, 8] * 2
    assert groups["n_heads"].tolist() == [2] * 12


def test_draws_depend_on_the_seed_the_trace_and_nothing_else() -> None:
    one = measure_block(block(), (2,), NULLS, seed=0)
    for other, same in (
        (measure_block(block(), (2,), NULLS, seed=0), True),
        (measure_block(block(), (2,), NULLS, seed=1), False),
        (measure_block(block("u"), (2,), NULLS, seed=0), False),
    ):
        random = one["excess"]["rule"] == "random"
        assert (one["excess"]["error"][random] == other["excess"]["error"][random]).all() == same
        assert (one["nulls"]["best_error"] == other["nulls"]["best_error"]).all() == same
        assert (one["rows"]["best_error"] == other["rows"]["best_error"]).all()
    fewer = measure_block(block(), (2,), ("permuted",), seed=0)
    permuted = one["nulls"]["null"] == "permuted"
    assert (fewer["nulls"]["best_error"] == one["nulls"]["best_error"][permuted]).all()
    assert "nulls" not in measure_block(block(), (2,), (), seed=0)
