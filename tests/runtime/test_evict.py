"""Which slots stay, against a reference that sorts one row at a time in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.errors import InputError
from kvlens.policy import Protect
from kvlens.runtime.evict import choose, protected

TIES = st.sampled_from([0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])


def kept_by_hand(
    scores: list[float], positions: list[int], budget: int, sinks: int, recent: int, prompt: int
) -> list[int]:
    """Positions that stay of one head: protected ones, then unjudged ones, then by score, then by position."""
    n_own = max(positions, default=-1) + 1
    slots = [(p, s) for p, s in zip(positions, scores, strict=True) if p >= 0]

    def rank(slot: tuple[int, float]) -> tuple[int, float, int]:
        position, score = slot
        if position < sinks or position >= n_own - recent or position < prompt:
            return 0, 0.0 if math.isnan(score) else -score, position
        if math.isnan(score):
            return 1, 0.0, position
        return 2, -score, position

    return sorted(position for position, _ in sorted(slots, key=rank)[:budget])


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    batch, heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 24))
    pads = [draw(st.integers(0, length - 1)) for _ in range(batch)]
    gaps = [draw(st.integers(0, 3)) for _ in range(batch)]  # tokens that left before
    sinks, recent = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    prompt = draw(st.sampled_from([0, 0, 3]))
    budget = draw(st.integers(sinks + recent + prompt + 1, 30))
    values = st.one_of(TIES, st.floats(-3, 3, width=32), st.integers(0, 2).map(float))
    scores = draw(st.lists(values, min_size=batch * heads * length, max_size=batch * heads * length))
    return locals()


@settings(max_examples=200, deadline=None)
@given(cases())
def test_pitfalls_06_08_28_exact_budgets_protection_and_order(case: dict[str, Any]) -> None:
    batch, heads, length = case["batch"], case["heads"], case["length"]
    positions = torch.full((batch, heads, length), -1)
    for row, (pad, gap) in enumerate(zip(case["pads"], case["gaps"], strict=True)):
        own = torch.arange(length - pad)
        positions[row, :, pad:] = own + (own >= 2) * gap
    scores = torch.tensor(case["scores"], dtype=torch.float32).view(batch, heads, length)
    n_own = positions[:, 0].max(-1).values + 1
    protect = Protect(sinks=case["sinks"], recent=case["recent"], prompt=case["prompt"] > 0)
    safe = protected(protect, positions, n_own, torch.full_like(n_own, case["prompt"]))
    choice = choose(scores, positions, torch.tensor([[case["budget"]]]), safe)
    for row in range(batch):
        for head in range(heads):
            expected = kept_by_hand(
                scores[row, head].tolist(),
                positions[row, head].tolist(),
                case["budget"],
                case["sinks"],
                case["recent"],
                case["prompt"],
            )
            found = choice.positions[row, head].tolist()
            n_empty = len(found) - len(expected)
            assert found == [-1] * n_empty + expected  # in order, filling on the left
            assert len(expected) == min(case["budget"], int((positions[row, head] >= 0).sum()))
            index = choice.index[row, head][n_empty:]
            assert positions[row, head][index].tolist() == expected
            left = positions[row, head][choice.leaves[row, head]].tolist()
            assert sorted(left + expected) == [p for p in positions[row, head].tolist() if p >= 0]


@pytest.mark.parametrize("size", [0, 1, 10, 25])
def test_pitfall_07_windows_of_no_one_and_every_token(size: int) -> None:
    positions, n_own = torch.arange(10).view(1, 1, 10), torch.tensor([10])
    sinks = protected(Protect(sinks=size), positions, n_own, n_own)
    recent = protected(Protect(sinks=0, recent=size), positions, n_own, n_own)
    assert int(sinks.sum()) == int(recent.sum()) == min(size, 10)
    if size == 1:
        assert sinks[0, 0].tolist() == [True] + [False] * 9
        assert recent[0, 0].tolist() == [False] * 9 + [True]


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf, torch.nan, torch.finfo(torch.float32).max])
def test_pitfall_06_constant_scores_never_take_a_protected_token(value: float) -> None:
    positions, n_own = torch.arange(10).view(1, 1, 10), torch.tensor([10])
    safe = protected(Protect(sinks=2, recent=3), positions, n_own, n_own)
    scores = torch.full((1, 1, 10), value)
    assert choose(scores, positions, torch.tensor([[6]]), safe).positions.tolist() == [[[0, 1, 2, 7, 8, 9]]]


def test_unlike_budgets_give_each_head_its_own() -> None:
    positions = torch.arange(6).expand(1, 2, 6)
    scores = torch.arange(6.0).expand(1, 2, 6)
    choice = choose(scores, positions, torch.tensor([[2, 4]]), torch.zeros(1, 2, 6, dtype=torch.bool))
    assert choice.positions.tolist() == [[[-1, -1, 4, 5], [2, 3, 4, 5]]]


def test_more_protected_than_the_budget_holds_is_refused() -> None:
    positions = torch.arange(6).view(1, 1, 6)
    with pytest.raises(InputError, match="6 tokens are protected, more than the budget of 4"):
        choose(torch.zeros(1, 1, 6), positions, torch.tensor([[4]]), torch.ones(1, 1, 6, dtype=torch.bool))


def test_protected_pages_must_fit() -> None:
    positions = torch.arange(12).view(1, 1, 12)
    safe = (positions == 5) | (positions == 11)
    scores = torch.zeros(1, 1, 12)
    kept = choose(scores, positions, torch.tensor([[8]]), safe, page_size=4).positions
    assert kept.tolist() == [[[4, 5, 6, 7, 8, 9, 10, 11]]]
    with pytest.raises(InputError, match="8 tokens are protected, more than the budget of 7"):
        choose(scores, positions, torch.tensor([[7]]), safe, page_size=4)


def test_pitfall_09_ties_are_counted_among_what_a_score_decides_on() -> None:
    positions, n_own = torch.arange(8).view(1, 1, 8), torch.tensor([8])
    safe = protected(Protect(sinks=2), positions, n_own, n_own)
    scores = torch.tensor([[[5.0, 5.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0]]])
    choice = choose(scores, positions, torch.tensor([[4]]), safe)
    assert (int(choice.n_tied), int(choice.n_scored)) == (5, 6)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**31))
def test_pages_leave_as_a_whole(page_size: int, length: int, budget: int, seed: int) -> None:
    scores = torch.randn(1, 1, length, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).view(1, 1, length)
    none = torch.zeros(1, 1, length, dtype=torch.bool)
    choice = choose(scores, positions, torch.tensor([[budget]]), none, page_size=page_size)
    pages = [list(range(start, min(start + page_size, length))) for start in range(0, length, page_size)]
    expected, room = [], budget
    for page in sorted(pages, key=lambda page: -max(scores[0, 0, page].tolist())):
        if len(page) > room:
            break
        room -= len(page)
        expected += page
    assert choice.positions[0, 0].tolist() == sorted(expected)
