"""What stays of a cache is the top of a plain sort, for any protection, ties and padding; what cannot be is refused."""

from __future__ import annotations

import pytest
import surprise_oracles as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables.refresh import protected_rows, refresh
from kvlens.observables.surprise import Scores, State


def state_of(n: int, n_rows: int = 1, n_pad: list[int] | None = None, *, in_units: bool = False) -> State:
    positions = torch.arange(n).expand(n_rows, n)
    units = positions if in_units else None
    return State(positions, positions, units=units, n_pad=None if n_pad is None else torch.tensor(n_pad))


def scored(values: list[list[float]], unknown: list[set[int]] | None = None) -> Scores:
    known = torch.ones(len(values), len(values[0]), dtype=torch.bool)
    for row, gone in enumerate(unknown or []):
        known[row, list(gone)] = False
    return Scores(torch.where(known, torch.tensor(values, dtype=torch.float32), 0.0), known)


@st.composite
def caches(draw: st.DrawFn) -> tuple[State, Scores, list[int]]:
    """Batches with few different scores, so that ties are common; some unknown, padding in front of some."""
    n, n_rows = draw(st.integers(1, 15)), draw(st.integers(1, 3))
    number = st.sampled_from([-2.5, -1.0, 0.0, 0.0, 1.0, 3.0]) | st.floats(-9, 9, width=32)
    values = [draw(st.lists(number, min_size=n, max_size=n)) for _ in range(n_rows)]
    n_pad = [draw(st.integers(0, n - 1)) for _ in range(n_rows)]
    blind, alone = draw(st.integers(0, n)), draw(st.sets(st.integers(0, n - 1), max_size=3))
    unknown = [{*range(n_pad[row]), *range(n - blind, n), *alone} for row in range(n_rows)]
    given_pad = n_pad if any(n_pad) or draw(st.booleans()) else None
    return state_of(n, n_rows, given_pad, in_units=draw(st.booleans())), scored(values, unknown), n_pad


@given(caches(), st.integers(0, 16), st.sampled_from([0, 1, 2, 30]), st.sampled_from([0, 1, 3, 30]))
@settings(max_examples=400, deadline=None)
def test_what_stays_is_the_top_of_a_plain_sort(
    cache: tuple[State, Scores, list[int]], budget: int, frozen: int, recent: int
) -> None:
    state, scores, n_pad = cache
    n, n_held = state.ids.shape[1], budget + frozen
    real = [range(pad, n) for pad in n_pad]
    trailing = state.units is None
    protected = [
        {i for i in rows if i < pad + frozen or i >= n - recent or (trailing and not bool(scores.known[row, i:].any()))}
        for row, (rows, pad) in enumerate(zip(real, n_pad, strict=True))
    ]
    if n > n_held and max(map(len, protected)) > n_held:
        with pytest.raises(InputError, match=f"budget of {budget} and {frozen} frozen") as caught:
            refresh(state, scores, budget, frozen, recent)
        assert "raise the budget" in str(caught.value.hint)
        return
    found = refresh(state, scores, budget, frozen, recent)
    assert found.shape == (len(n_pad), min(n, n_held))
    for row, (rows, pad) in enumerate(zip(real, n_pad, strict=True)):
        kept = found[row].tolist()
        assert kept == sorted({*kept})
        values, known = scores.values[row, pad:].tolist(), scores.known[row, pad:].tolist()
        stays = [i + pad for i in oracle.kept(values, known, n_held, frozen, recent, trailing=trailing)]
        assert [i for i in kept if i in rows] == stays
        assert set(stays) >= protected[row]


@given(st.integers(1, 12), st.integers(0, 14), st.integers(0, 14))
@settings(max_examples=60, deadline=None)
def test_a_cache_that_fits_is_kept_whole(n: int, budget: int, frozen: int) -> None:
    state, scores = state_of(n, 2, [0, n - 1]), scored([[0.0] * n] * 2)
    if n <= budget + frozen:  # whatever is protected
        for recent in (0, 1, n, n + 3):
            assert refresh(state, scores, budget, frozen, recent).tolist() == [[*range(n)]] * 2
    else:
        assert refresh(state, scores, budget, frozen).shape == (2, budget + frozen)


def test_equal_scores_keep_the_first_rows_beside_the_protected_ones() -> None:
    state, scores = state_of(9), scored([[1.5] * 9], [{8}])
    assert refresh(state, scores, 4).tolist() == [[0, 1, 2, 8]]
    assert refresh(state, scores, 4, frozen=1).tolist() == [[0, 1, 2, 3, 8]]
    assert refresh(state, scores, 4, recent=3).tolist() == [[0, 6, 7, 8]]
    assert refresh(state, scores, 3, frozen=2, recent=1).tolist() == [[0, 1, 2, 3, 8]]  # recent counts in the budget


def test_the_most_surprising_rows_stay() -> None:
    scores = scored([[3.0, -1.0, 2.0, -5.0, 9.0, 0.0, 0.0]], [{5, 6}])
    assert refresh(state_of(7), scores, 4).tolist() == [[0, 4, 5, 6]]
    assert refresh(state_of(7), scores, 4, frozen=2).tolist() == [[0, 1, 2, 4, 5, 6]]
    assert refresh(state_of(7), scores, 2).tolist() == [[5, 6]]
    with pytest.raises(InputError, match="2 protected"):
        refresh(state_of(7), scores, 1)
    with pytest.raises(InputError, match="7 protected"):
        refresh(state_of(7), scores, 6, recent=7)
    with pytest.raises(InputError):
        refresh(state_of(7), scores, 0)


def test_rows_that_see_nothing_in_between_stay_before_scored_ones_and_give_way_to_protected_ones() -> None:
    scores = scored([[3.0, 0.0, 2.0, 0.0, 9.0, 1.0, 0.0]], [{1, 3, 6}])
    assert refresh(state_of(7), scores, 4).tolist() == [[1, 3, 4, 6]]
    assert refresh(state_of(7), scores, 2).tolist() == [[3, 6]]
    assert refresh(state_of(7), scores, 2, recent=2).tolist() == [[5, 6]]


def test_of_a_last_unit_longer_than_what_is_held_the_last_rows_stay() -> None:
    scores = scored([[3.0, 2.0, 0.0, 0.0, 0.0, 0.0]], [{2, 3, 4, 5}])
    assert refresh(state_of(6, in_units=True), scores, 2, frozen=1).tolist() == [[0, 4, 5]]
    with pytest.raises(InputError, match="5 protected"):
        refresh(state_of(6), scores, 2, frozen=1)


def test_padding_goes_first_and_fills_up_where_a_sequence_is_short() -> None:
    """Even padding that scores above every row, and nothing of it counts as frozen."""
    values = [[9.0] * 4 + [1.0, 3.0, 2.0, 0.0], [4.0, 3.0, 2.0, 1.0, 5.0, 6.0, 0.0, 0.0]]
    scores = Scores(torch.tensor(values), torch.ones(2, 8, dtype=torch.bool))
    state = state_of(8, 2, [4, 0])
    assert refresh(state, scores, 3).tolist() == [[4, 5, 6], [0, 4, 5]]
    assert refresh(state, scores, 3, frozen=1).tolist() == [[4, 5, 6, 7], [0, 1, 4, 5]]
    assert refresh(state, scores, 6).tolist() == [[0, 1, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]]


@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), st.lists(st.integers(0, 8), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_protected_rows_are_the_ends_of_each_sequence(n: int, frozen: int, recent: int, pads: list[int]) -> None:
    pads = [min(pad, n) for pad in pads]
    found: Tensor = protected_rows(state_of(n, len(pads), pads), frozen, recent)
    for row, pad in enumerate(pads):
        real = [*range(pad, n)]
        ends = {*real[:frozen], *(real[-recent:] if recent else [])}
        assert {*found[row].nonzero().flatten().tolist()} == ends
    bare = protected_rows(state_of(n), frozen, recent)
    assert torch.equal(bare, protected_rows(state_of(n, 1, [0]), frozen, recent))
