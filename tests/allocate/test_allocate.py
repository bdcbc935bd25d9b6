"""Exact totals, floors, ties, protection and short cells, against slow references."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import allocation_oracles as oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.allocate.contour_mass import dropped_mass
from kvlens.allocate.interface import Cells
from kvlens.allocate.spread import spread
from kvlens.allocate.table import TABLE, make
from kvlens.errors import InputError
from kvlens.policy import Protect
from kvlens.runtime.evict import choose, protected

SHARED = ("pyramid", "ada", "contour", "contour_mass")  # those whose total is exact
FLOORED = ("contour", "contour_mass")


def made(
    *, seed: int, batch: int, layers: int, heads: int, n: int, free: int, sinks: int, recent: int, values: str
) -> Cells:
    """What a cache may hold: rows padded to unlike lengths, cells that lost unlike tokens before, tied scores.

    The budget is what may be protected and `free` tokens more.
    """
    draw = random.Random(seed)
    scores, positions = [], []
    lengths = [draw.randint(1, n) for _ in range(batch)]
    for _ in range(layers):
        cells = []
        for length in lengths:
            keeps = draw.choice([1.0, 0.7, 0.3])
            for _ in range(heads):
                kept = [p for p in range(length) if p < sinks or p >= length - recent or draw.random() < keeps]
                cells.append(kept or [length - 1])
        width = max(map(len, cells)) + draw.choice([0, 0, 2])
        table = torch.tensor([[-1] * (width - len(cell)) + cell for cell in cells]).view(batch, heads, width)
        pool = {
            "ties": [0.0, 1.0, 0.5],
            "wild": [0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.5],
            "mass": [0.0, 0.25, 0.5, 2.0, math.nan],
        }[values]
        pool += [draw.random() for _ in range(3)]
        score = [draw.choice(pool) for _ in range(table.numel())]
        scores.append(torch.tensor(score, dtype=draw.choice([torch.float32, torch.float64])).view(table.shape))
        positions.append(table)
    n_own = torch.tensor(lengths)
    protect = Protect(sinks=sinks, recent=recent)
    safe = [protected(protect, table, n_own, n_own) for table in positions]
    means = torch.tensor(
        [sinks + recent + free + row % 2 for row in range(batch)]
    )  # a fraction of a prompt differs from row to row
    return Cells(tuple(range(layers)), means, positions, safe, scores)


def cases(*values: str) -> st.SearchStrategy[dict[str, Any]]:
    """What `made` takes."""
    sizes = {"batch": (1, 3), "layers": (1, 4), "heads": (1, 3), "n": (1, 24), "free": (1, 22)}
    sizes |= {"seed": (0, 2**32), "sinks": (0, 3), "recent": (0, 4)}
    parts = {name: st.integers(*bounds) for name, bounds in sizes.items()}
    return st.fixed_dictionaries(parts | {"values": st.sampled_from(values or ("ties", "wild"))})


def row_of(cells: Cells, row: int) -> oracles.Row:
    """One row as the references take it."""
    return [
        [
            [(p, s, f) for p, s, f in zip(*map(torch.Tensor.tolist, parts), strict=True) if p >= 0]
            for parts in zip(positions[row], scores[row], safe[row], strict=True)
        ]
        for positions, scores, safe in zip(cells.positions, cells.scores, cells.safe, strict=True)
    ]


def kept(cells: Cells, budgets: list[torch.Tensor], row: int) -> list[list[list[int]]]:
    """Positions that each cell of a row keeps under these budgets."""
    choices = map(choose, cells.scores, cells.positions, budgets, cells.safe)
    return [[[p for p in head if p >= 0] for head in choice.positions[row].tolist()] for choice in choices]


def check_sums(cells: Cells, budgets: list[torch.Tensor]) -> None:
    """Whole numbers, each between what is protected and what is held; the sum as it was asked for."""
    flat = torch.cat(budgets, 1)
    assert flat.dtype == torch.long
    assert (flat >= cells.least).all()
    assert (flat <= cells.held).all()
    n_cells = flat.shape[1]
    for row, total in enumerate(flat.sum(-1).tolist()):
        assert total == min(int(cells.mean[row]) * n_cells, int(cells.held[row].sum()))


@settings(max_examples=250, deadline=None)
@given(cases(), st.sampled_from([name for name in SHARED if name != "contour_mass"]))
def test_totals_are_exact_and_protected_tokens_fit(case: dict[str, Any], name: str) -> None:
    cells = made(**case)
    check_sums(cells, make(name, {}).budgets(cells))


@settings(max_examples=150, deadline=None)
@given(cases("mass"), st.integers(0, 2))
def test_totals_by_mass_are_exact_too(case: dict[str, Any], zeros: int) -> None:
    cells = made(**case)
    if zeros:  # cells, or all, without any mass
        scores = [s.masked_fill(torch.arange(s.shape[1])[:, None] < zeros, 0.0) for s in cells.scores]
        cells = dataclasses.replace(cells, scores=scores)
    check_sums(cells, make("contour_mass", {}).budgets(cells))


@pytest.mark.parametrize("name", FLOORED)
def test_a_thousand_cases_meet_the_total_and_no_head_is_under_its_floor(name: str) -> None:
    for seed in range(1000):
        draw = random.Random(seed)
        floor, n = draw.randint(0, 8), draw.randint(1, 60)
        cells = made(
            seed=seed, batch=2, layers=draw.randint(1, 5), heads=draw.randint(1, 4), n=n,
            free=draw.randint(1, 30), sinks=2, recent=floor,
            values="mass" if name == "contour_mass" else draw.choice(["ties", "wild"]),
        )  # fmt: skip
        allocator = make(name, {"floor": floor})
        budgets = allocator.budgets(cells)
        check_sums(cells, budgets)
        assert allocator.recent == floor
        for row, positions in enumerate(kept(cells, budgets, 0)):
            for head, found in enumerate(positions):
                own = int(max(p.max() for p in cells.positions[row][0])) + 1
                assert set(range(max(0, own - floor), own)) <= set(found), (seed, head)


@settings(max_examples=250, deadline=None)
@given(cases())
def test_contour_keeps_the_best_of_all_cells_and_ties_go_to_the_first(case: dict[str, Any]) -> None:
    cells = made(**case)
    budgets = make("contour", {}).budgets(cells)
    for row in range(len(cells.mean)):
        assert kept(cells, budgets, row) == oracles.contour(row_of(cells, row), int(cells.mean[row]))


@settings(max_examples=250, deadline=None)
@given(cases(), st.sampled_from(["0", "0.2", "0.29", "0.5", "1"]))
def test_ada_keeps_the_best_of_each_layer_above_each_heads_own(case: dict[str, Any], alpha: str) -> None:
    cells = made(**case)
    budgets = make("ada", {"alpha": float(alpha)}).budgets(cells)
    for row, mean in enumerate(cells.mean.tolist()):
        layers = row_of(cells, row)
        if all(sum(map(len, heads)) >= mean * len(heads) for heads in layers):  # else see the test of short layers
            assert kept(cells, budgets, row) == oracles.ada(layers, mean, alpha)


def test_a_short_layer_leaves_its_share_to_the_others() -> None:
    positions = [torch.arange(n).view(1, 1, n).expand(1, 2, n) for n in (3, 20, 20)]
    safe = [torch.zeros_like(p, dtype=torch.bool) for p in positions]
    scores = [torch.arange(float(p.numel())).view(p.shape) for p in positions]
    cells = Cells((0, 1, 2), torch.tensor([8]), positions, safe, scores)
    assert [b.sum().item() for b in make("ada", {}).budgets(cells)] == [6, 21, 21]
    assert [b.tolist() for b in make("pyramid", {"beta": 1.0}).budgets(cells)] == [[[3, 3]], [[11, 11]], [[10, 10]]]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_wishes_become_whole_numbers_with_the_largest_fractions_first(seed: int, n: int) -> None:
    draw = random.Random(seed)
    wanted = [draw.choice([draw.uniform(-3, 12), draw.randint(-3, 12), draw.randint(0, 40) / 4]) for _ in range(n)]
    least = [draw.randint(0, 4) for _ in range(n)]
    most = [low + draw.randint(0, 9) for low in least]
    total = draw.randint(sum(least), sum(most))
    found = spread(
        torch.tensor([wanted], dtype=torch.float64), torch.tensor([least]), torch.tensor([most]), torch.tensor([total])
    )
    assert found.tolist() == [oracles.one_by_one(wanted, least, most, total)]


@settings(max_examples=150, deadline=None)
@given(cases("mass"))
def test_budgets_by_mass_are_proportional_between_their_bounds(case: dict[str, Any]) -> None:
    cells = made(**case)
    flat = torch.cat(make("contour_mass", {}).budgets(cells), 1)
    for row, mean in enumerate(cells.mean.tolist()):
        weights = [oracles.dropped(cell, mean) for layer in row_of(cells, row) for cell in layer]
        found = torch.cat(
            [dropped_mass(s, p >= 0, cells.mean) for s, p in zip(cells.scores, cells.positions, strict=True)], 1
        )[row]
        assert found.tolist() == pytest.approx([float(w) for w in weights], abs=1e-12)
        # any two cells: one could not give a token to the other without going further from the proportion
        for i, wi in enumerate(weights):
            for j, wj in enumerate(weights):
                above, below = int(flat[row, i]), int(flat[row, j])
                free = above > cells.least[row, i] and below < cells.held[row, j]
                if free and wi > 0 and wj > 0:
                    assert (above - 1) / wi <= (below + 1) / wj
                elif free and wi == 0:
                    assert wj == 0  # what has no mass grows only when all that has some is full


def test_mass_by_hand() -> None:
    positions = torch.arange(4).view(1, 1, 4)
    safe = torch.zeros(1, 1, 4, dtype=torch.bool)
    scores = [torch.tensor([[row]]) for row in ([6.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0])]
    cells = Cells((0, 1, 2), torch.tensor([2]), [positions] * 3, [safe] * 3, scores)
    # dropped at 2: .2, .5, 0; six tokens: the second is full with 4 at scale 8, the first then wants 2
    assert [b.item() for b in make("contour_mass", {}).budgets(cells)] == [2, 4, 0]
    ended = dataclasses.replace(cells, mean=torch.tensor([3]))  # dropped at 3: .1, .25, 0; nine tokens
    assert [b.item() for b in make("contour_mass", {}).budgets(ended)] == [4, 4, 1]


@pytest.mark.parametrize("value", [-0.5, math.inf, -math.inf])
def test_scores_that_are_no_mass_are_refused(value: float) -> None:
    positions = torch.arange(4).view(1, 1, 4)
    scores = torch.tensor([[[1.0, value, math.nan, 0.0]]])
    safe = torch.zeros(1, 1, 4, dtype=torch.bool)
    cells = Cells((0,), torch.tensor([2]), [positions], [safe], [scores])
    with pytest.raises(InputError, match=f"reads scores as a mass, but this scorer says {value:g}") as caught:
        make("contour_mass", {}).budgets(cells)
    assert "h2o" in caught.value.hint
    empty = torch.tensor([[[-1, -1, 0, 1]]])  # what a scorer says of an empty slot does not count
    make("contour_mass", {}).budgets(dataclasses.replace(cells, positions=[empty]))


def test_contour_by_hand() -> None:
    positions = torch.arange(4).view(1, 1, 4)
    scores = [torch.tensor([[[9.0, 1.0, 5.0, 0.0]]]), torch.tensor([[[1.0, 1.0, 0.0, 7.0]]])]
    safe = [positions == 3] * 2  # the floor: one recent token
    cells = Cells((0, 1), torch.tensor([2]), [positions] * 2, safe, scores)
    # four tokens: the two recent ones, then 9 and 5, both of the first layer
    assert kept(cells, make("contour", {"floor": 1}).budgets(cells), 0) == [[[0, 2, 3]], [[3]]]
    more = dataclasses.replace(cells, mean=torch.tensor([3]))
    # six: then the ones, at position 0 of the second layer, at position 1 the first layer goes first
    assert kept(more, make("contour", {"floor": 1}).budgets(more), 0) == [[[0, 1, 2, 3]], [[0, 3]]]


@pytest.mark.parametrize(("beta", "mean", "expected"), [
    (20.0, 100, [195, 148, 100, 52, 5]),
    (2.0, 12, [18, 15, 12, 9, 6]),
    (1.0, 7, [7, 7, 7, 7, 7]),
])  # fmt: skip
def test_the_pyramid_by_hand(beta: float, mean: int, expected: list[int]) -> None:
    positions = [torch.arange(200).view(1, 1, 200).expand(2, 3, 200)] * 5
    safe = [torch.zeros(2, 3, 200, dtype=torch.bool)] * 5
    found = make("pyramid", {"beta": beta}).budgets(Cells(tuple(range(5)), torch.tensor([mean] * 2), positions, safe))
    assert [part.tolist() for part in found] == [[[n] * 3] * 2 for n in expected]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 20), st.integers(1, 60), st.floats(1, 30))
def test_a_pyramid_falls_and_its_heads_are_alike(layers: int, heads: int, protect: int, more: int, beta: float) -> None:
    positions = torch.arange(400).view(1, 1, 400).expand(1, heads, 400)
    safe = positions < protect
    cells = Cells(tuple(range(layers)), torch.tensor([protect + more]), [positions] * layers, [safe] * layers)
    found = torch.cat(make("pyramid", {"beta": beta}).budgets(cells))
    assert (found == found[:, :1]).all()
    line = found[:, 0].tolist()
    assert sum(line) == layers * (protect + more)
    assert line == sorted(line, reverse=True)
    if layers > 1:
        assert abs(line[-1] - protect - more / beta) <= 1


def test_one_layer_is_no_pyramid() -> None:
    positions = torch.arange(30).view(1, 1, 30)
    cells = Cells((4,), torch.tensor([9]), [positions], [positions < 2])
    assert make("pyramid", {}).budgets(cells)[0].tolist() == [[9]]


@pytest.mark.parametrize("name", ["pyramid", "ada", "contour_mass"])
def test_more_protected_than_the_budget_holds_is_refused(name: str) -> None:
    positions = torch.arange(6).view(1, 1, 6)
    cells = Cells((0,), torch.tensor([4]), [positions], [positions < 5], [torch.ones(1, 1, 6)])
    with pytest.raises(InputError, match="5 tokens are protected, more than the budget of 4"):
        make(name, {}).budgets(cells)


def test_uniform_and_table_say_what_they_said() -> None:
    positions = torch.arange(6).view(1, 1, 6).expand(2, 2, 6)
    cells = Cells((1, 3), torch.tensor([4, 5]), [positions] * 2, [positions < 1] * 2)
    assert [part.tolist() for part in make("uniform", {}).budgets(cells)] == [[[4], [5]]] * 2
    rows = ((9, 9), (1, 2), (9, 9), (3, 4))
    assert [part.tolist() for part in TABLE["table"](rows).budgets(cells)] == [[[1, 2]], [[3, 4]]]


def test_wrong_names_and_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="no allocator 'contur'") as caught:
        make("contur", {})
    assert caught.value.hint == "did you mean contour or contour_mass?"
    for name, parameters, says in [
        ("contour", {"floor": 1.5}, "floor is 1.5"),
        ("contour", {"floor": True}, "floor is True"),
        ("ada", {"alpha": -0.1}, "alpha is -0.1"),
        ("ada", {"alpha": math.nan}, "alpha is nan"),
        ("pyramid", {"beta": math.inf}, "beta is inf"),
        ("uniform", {"floor": 3}, "no parameter 'floor'"),
    ]:
        with pytest.raises(InputError, match=f"allocator {name}.*{says}"):
            make(name, parameters)
