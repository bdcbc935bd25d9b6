"""Refresh after refresh over a cache that shrinks: the same kept tokens as a full cache with explicit masks gives?"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlens.errors import InputError
from kvlens.model import Model, attention_override, blocks, cache_layers, hidden, new_cache, wrap
from kvlens.observables.surprise import Scores, State, Surprise
from kvlens.observables.surprise_variant import FAST, FULL, read_variant
from kvlens.probe.surprise import score_tokens
from kvlens.probe.surprise_cycles import Cycle, Refreshed, cycles

CYCLES = {"wide": Cycle(14, 6, 2, 3), "tight": Cycle(4, 5, 0, 0), "slow": Cycle(7, 16, 3, 6)}
LLAMA = wrap(tiny.llama())


# An oracle: nothing ever leaves the cache, masks hide it


@torch.no_grad()
def simulate(model: Model, ids: Tensor, cycle: Cycle, *, fast: bool) -> Iterator[Refreshed]:
    """The refreshes of `full` or `fast`: each piece sees what is held and what stands before it in the piece."""
    cache, entering, held = new_cache(model), torch.zeros(len(ids), model.d_model), []
    for stop in range(cycle.every, len(ids) + 1, cycle.every):
        piece = torch.arange(stop - cycle.every, stop)
        visible = torch.zeros(cycle.every, stop, dtype=torch.bool)
        for row, pos in enumerate(piece.tolist()):
            visible[row, held] = True
            visible[row, piece[0] : pos + 1] = True

        def keep(_: Any, args: tuple[Any, ...], at: Tensor = piece) -> None:
            entering[at] = args[0][0]

        hook = blocks(model)[-1].register_forward_pre_hook(keep)
        hidden(
            model, ids[None, piece], positions=piece[None], cache=cache, mask=visible[None, None],
            key_positions=torch.arange(stop)[None],
        )  # fmt: skip
        hook.remove()
        held += piece.tolist()
        if len(held) <= cycle.budget + cycle.frozen:
            continue
        scores = score(model, ids, held, cache, entering if fast else None)
        protected = {*held[: cycle.frozen], *held[len(held) - max(cycle.recent, 1) :]}
        others = [pos for pos in held if pos not in protected and pos in scores]
        others = sorted(others, key=lambda pos: (-scores[pos], pos))
        others = [pos for pos in held[::-1] if pos not in protected and pos not in scores] + others
        kept = protected | set(others[: cycle.budget + cycle.frozen - len(protected)])
        found = np.array([scores.get(pos, np.nan) for pos in held])
        yield Refreshed(stop, np.array(held), found, np.array([pos in kept for pos in held]))
        held = sorted(kept)


def score(model: Model, ids: Tensor, held: list[int], cache: Any, entering: Tensor | None) -> dict[int, float]:
    """By position, minus the logit of each held token that sees any: the held ones after it in the cache.

    The model's own forward pass; with `entering` its last block starts from these states, and its MLP puts out 0.
    """
    layers, own = cache_layers(cache), torch.tensor(held)
    sees = torch.zeros(len(held), dtype=torch.bool)

    def attention(module: Any, query: Tensor, *_: Any, **kw: Any) -> tuple[Tensor, None]:
        layer = [id(one) for one in model.layers].index(id(module))
        keys, values = (
            states[0].double().repeat_interleave(query.shape[1] // states.shape[1], 0) for states in layers[layer]
        )
        apart = torch.arange(keys.shape[1]) - own[:, None]
        visible = (apart > 0) & torch.isin(torch.arange(keys.shape[1]), own)
        if kw.get("sliding_window") is not None:
            visible &= apart < kw["sliding_window"]
        sees.logical_or_(visible.any(-1))
        products = query[0].double() @ keys.mT * kw["scaling"]
        weights = products.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
        return (weights @ values).to(query.dtype).transpose(0, 1)[None], None

    with ExitStack() as stack:
        stack.enter_context(attention_override(model, attention))
        if entering is not None:
            last = blocks(model)[-1]
            replaced = last.register_forward_pre_hook(lambda _, args: (entering[own][None], *args[1:]))
            stack.callback(replaced.remove)
            stack.callback(last.mlp.register_forward_hook(lambda *args: torch.zeros_like(args[-1])).remove)
        rows = model.hf(ids[None, own], position_ids=own[None], use_cache=False).logits[0]
    found = -rows[torch.arange(len(own)), ids[own]].double()
    return {pos: value for pos, value, seen in zip(held, found.tolist(), sees.tolist(), strict=True) if seen}


@pytest.mark.parametrize("cycle", CYCLES.values(), ids=list(CYCLES))
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral", "gemma3"])
def test_refreshes_are_those_of_a_full_cache_under_masks(family: str, cycle: Cycle) -> None:
    model, ids = wrap(tiny.FAMILIES[family]()), tiny.token_ids(53)[0]
    for variant in (FULL, FAST):
        found = list(cycles(Surprise(model, variant), ids, cycle))
        truth = list(simulate(model, ids, cycle, fast=variant == FAST))
        assert len(found) == len(truth) >= 2
        for one, other in zip(found, truth, strict=True):
            assert one.n_seen == other.n_seen
            assert one.positions.tolist() == other.positions.tolist()
            assert one.kept.tolist() == other.kept.tolist()
            assert np.array_equal(np.isnan(one.scores), np.isnan(other.scores))
            np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-4)
        alone = score_tokens(model, [Surprise(model, variant)], ids, {})[0]
        late = found[-1]
        assert np.nanmax(np.abs(late.scores - alone[late.positions])) > 0.1  # what left did change the rest


# What always holds


COUNTS = st.tuples(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5), st.integers(0, 19))


@given(COUNTS, st.integers(1, 60), st.sampled_from(["full", "fast", "layers=2", "fast,past"]))
@settings(max_examples=25, deadline=None)
def test_what_is_held_never_grows_beyond_its_bound(counts: tuple[int, ...], n: int, words: str) -> None:
    budget, every, frozen, recent = counts
    cycle = Cycle(budget, every, frozen, min(recent, budget - 1))
    steps = list(cycles(Surprise(LLAMA, read_variant(words)), tiny.token_ids(n)[0], cycle))
    before: set[int] = set()
    last = 0
    pieces = [stop for stop in range(every, n + 1, every) if stop > budget + frozen]
    assert [step.n_seen for step in steps] == pieces
    for step in steps:
        held, kept = step.positions.tolist(), step.positions[step.kept].tolist()
        assert held == sorted(before | set(range(last, step.n_seen)))  # absolute, each once, none comes back
        assert len(held) <= budget + frozen + every
        assert len(kept) == budget + frozen
        assert kept[:frozen] == list(range(frozen))
        assert set(kept) >= set(range(step.n_seen - cycle.recent, step.n_seen))
        assert np.isnan(step.scores).sum() == 1
        assert step.kept[np.isnan(step.scores)].all()
        free = [pos for pos in held if pos >= frozen and pos < step.n_seen - cycle.recent]
        scores = dict(zip(held, step.scores.tolist(), strict=True))
        gone = [scores[pos] for pos in held if pos not in kept]
        stays = [scores[pos] for pos in free if pos in kept and not np.isnan(scores[pos])]
        assert not gone or not stays or max(gone) <= min(stays)
        before, last = set(kept), step.n_seen


def test_the_first_refresh_has_the_scores_of_the_text_so_far() -> None:
    ids = tiny.token_ids(40)[0]
    for words in ("full", "fast", "logprob,no_self", "past"):
        one = Surprise(LLAMA, read_variant(words))
        first = next(cycles(one, ids, Cycle(10, 8, 2)))
        assert first.n_seen == 16
        np.testing.assert_allclose(first.scores, score_tokens(LLAMA, [one], ids[:16], {})[0], rtol=1e-4, atol=1e-4)


def test_what_comes_after_a_refresh_does_not_change_it() -> None:
    ids, other = tiny.token_ids(50)[0], tiny.token_ids(50, seed=1)[0]
    other[:30] = ids[:30]
    one, two = (list(cycles(Surprise(LLAMA, FULL), text, Cycle(8, 10, 1))) for text in (ids, other))
    for number in range(5):
        same = np.array_equal(one[number].scores, two[number].scores, equal_nan=True)
        assert same == (number < 3)


def test_a_unit_that_is_not_over_stays_and_its_rows_share_a_score() -> None:
    ids, units = tiny.token_ids(60)[0], torch.arange(60) // 6
    steps = list(cycles(Surprise(LLAMA, read_variant("sentence")), ids, Cycle(14, 8, 1), units))
    assert len(steps) > 4
    for step in steps:
        number = step.positions // 6
        assert np.array_equal(np.isnan(step.scores), number == number[-1])
        assert step.kept[number == number[-1]].all()
        for unit in set(number.tolist()) - {int(number[-1])}:
            assert len(set(step.scores[number == unit].tolist())) == 1


def test_equal_scores_stay_from_the_front() -> None:
    class Level(Surprise):
        def scores(self, state: State, layers: Any) -> Scores:
            found = super().scores(state, layers)
            return Scores(torch.where(found.known, 1.5, 0.0), found.known)

    kept = [
        step.positions[step.kept].tolist() for step in cycles(Level(LLAMA, FAST), tiny.token_ids(24)[0], Cycle(6, 8, 2))
    ]
    assert kept == [[*range(7), 15], [*range(7), 23]]


# Memory


@pytest.mark.parametrize("words", ["full", "fast"])
def test_what_left_is_freed(words: str) -> None:
    """Bytes of the storages behind keys, values and state at each refresh, and whether former ones are gone."""
    n_bytes: list[int] = []
    former: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Watched(Surprise):
        def scores(self, state: State, layers: Any) -> Scores:
            alive.append(sum(ref() is not None for ref in former))
            tensors = [tensor for pair in layers for tensor in pair]
            tensors += [tensor for tensor in (state.ids, state.positions, state.states) if tensor is not None]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            n_bytes.append(sum(storages.values()))
            former[:] = [weakref.ref(tensor) for tensor in tensors]
            return super().scores(state, layers)

    variant, cycle = read_variant(words), Cycle(12, 8, 4)
    found = list(cycles(Watched(LLAMA, variant), tiny.token_ids(200)[0], cycle))
    a_row = LLAMA.n_layers * 2 * 2 * 8 * 4 + 16 + (0 if words == "full" else LLAMA.d_model * 4)
    assert n_bytes == [len(step.positions) * a_row for step in found]
    assert n_bytes[-1] == (12 + 4 + 8) * a_row
    assert max(alive) == 0


# Refusals


def test_more_protected_rows_than_a_budget_holds_are_refused() -> None:
    with pytest.raises(InputError, match="cannot hold 9 protected ones"):
        list(cycles(Surprise(LLAMA, read_variant("gap=5")), tiny.token_ids(30)[0], Cycle(5, 10, 3)))
