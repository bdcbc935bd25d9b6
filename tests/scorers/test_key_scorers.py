"""`keydiff`, `importance_sampling`, `h2o_keys`: scores made of keys alone, against loops over the held keys."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attended import held_and_scores
from eviction import padded, policy, streamed_logits, uneven
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, llama, token_ids

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.ragged import RaggedLayer
from kvlens.scorers import table
from kvlens.scorers.interface import EMPTY, Facts, Kept, Views

SHAPES = ["whole", "uniform", "padded", "ragged"]


def settings_of(shape: str, model: models.Model) -> dict[str, Any]:
    """Settings of the policy under which slots are held in this shape."""
    ragged = {"storage": "ragged", **uneven(model)}
    return {"whole": {"tokens": 100}, "uniform": {}, "padded": uneven(model), "ragged": ragged}[shape]


def same(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=1e-5)


def held_keys(run: Run, layer: int, row: int, head: int, real: torch.Tensor) -> list[np.ndarray]:
    """The keys of a head's real slots, in float64."""
    held = run.cache.layers[layer]
    keys = held.pair(row, head)[0] if isinstance(held, RaggedLayer) else held.keys[row, head, real]
    return list(keys.double().numpy())


def keydiff_by_hand(keys: list[np.ndarray]) -> list[float]:
    anchor = sum(key / math.sqrt(sum(key**2)) for key in keys) / len(keys)
    return [-float(key @ anchor) / math.sqrt(sum(key**2)) / math.sqrt(sum(anchor**2)) for key in keys]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "llama_6_over_3", "gpt2"])
def test_pitfalls_19_27_keydiff_is_the_cosine_with_the_mean_direction(name: str, shape: str) -> None:
    model = models.wrap(FAMILIES[name]())
    ids, own, _ = padded([22, 9, 17], 8)
    with apply(policy("keydiff", **settings_of(shape, model)), model) as run:
        streamed_logits(model, ids, [12, 10, *[1] * 8], own=own)
    for layer, (held, scores) in held_and_scores(run).items():
        for row, head in np.ndindex(3, model.n_kv_heads):
            real = held[row, head] != EMPTY
            expected = keydiff_by_hand(held_keys(run, layer, row, head, real))
            same(scores[row, head, real], expected)


def pair(seed: int, batch: int = 2, n: int = 9) -> Views:
    """Two layers' worth of made-up keys: what is shown, and by `keys_of` another layer."""
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, batch, 3, n, 4, generator=rng)
    positions = torch.arange(n).expand(batch, 1, n) * 2
    positions = positions.masked_fill((torch.arange(n) < 2) & (torch.arange(batch) == 1)[:, None, None], EMPTY)
    return Views(0, positions.int(), keys[0], keys[0], keys_of=list(keys).__getitem__)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999))
def test_importance_is_the_product_with_the_newest_key_of_the_last_layer(seed: int) -> None:
    views = pair(seed)
    scorer = table.make("importance_sampling", {})
    found = scorer.score(scorer.init(Facts(2, 6, 3, 4, (0, 1))), views)
    keys = views.keys_of(1).double()
    for row in range(2):
        for slot in range(2 * row, 9):
            expected = sum(float(keys[row, head, slot] @ keys[row, head, 8]) for head in range(3)) / 3
            assert abs(float(found[row, 0, slot]) - expected) < 1e-5


def test_importance_of_a_run_is_that_of_its_last_managed_layer_in_every_layer() -> None:
    for name in ("llama", "gemma3"):
        model = models.wrap(FAMILIES[name]())
        with apply(policy("importance_sampling"), model) as run:
            streamed_logits(model, token_ids(30), [20, *[1] * 10])
        keys = run.cache.layers[run.layers[-1]].keys[0].double()
        expected = (keys * keys[:, -1:]).sum(-1).mean(0)
        for _, scores in held_and_scores(run).values():
            torch.testing.assert_close(scores[0, 0].double(), expected, atol=1e-4, rtol=1e-4)
        assert run.report().n_evicted > 0


@pytest.mark.parametrize("more", [{"reduce": "head"}, {"reduce": "layer"}, {"storage": "ragged"}])
def test_tokens_that_are_kept_together_refuse_to_part(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="needs reduce 'all'"):
        policy("importance_sampling", **more)


def test_sampling_draws_without_replacement_by_the_chances_of_a_softmax() -> None:
    numbers = torch.tensor([0.0, 1.0, 2.0])  # of slots 0 to 2, over the root of d_head, 4; the newest is slot 3
    keys = torch.zeros(1, 1, 4, 4)
    keys[0, 0, :3, 0] = 2 * numbers
    keys[0, 0, 3, 0] = 1.0
    first = {0: 0, 1: 0, 2: 0}
    second: dict[tuple[int, int], int] = {}
    chances = (numbers.double()).softmax(0).tolist()
    for seed in range(4000):
        scorer = table.make("importance_sampling", {"choice": "sample", "seed": seed})
        found = scorer.score(
            scorer.init(Facts(1, 1, 1, 4, (0,))), Views(0, torch.arange(4).view(1, 1, 4).int(), keys, keys)
        )
        one, two, _ = found[0, 0, :3].sort(descending=True).indices.tolist()
        first[one] += 1
        second[one, two] = second.get((one, two), 0) + 1
    for slot in range(3):
        assert abs(first[slot] / 4000 - chances[slot]) < 4 * math.sqrt(chances[slot] * (1 - chances[slot]) / 4000)
        for other in {0, 1, 2} - {slot}:
            expected = chances[slot] * chances[other] / (1 - chances[slot])
            assert abs(second[slot, other] / 4000 - expected) < 4 * math.sqrt(expected * (1 - expected) / 4000)


def test_a_sample_is_drawn_anew_at_every_refresh_and_hangs_on_no_other_row() -> None:
    scorer = table.make("importance_sampling", {"choice": "sample"})
    state, views = scorer.init(Facts(2, 6, 3, 4, (0, 1))), pair(1)
    found = scorer.score(state, views)
    assert found.dtype == torch.float64
    assert torch.equal(found, scorer.score(state, views))
    alone = Views(0, views.positions[1:], views.keys[1:], views.values[1:], keys_of=lambda i: views.keys_of(i)[1:])
    torch.testing.assert_close(scorer.score(state, alone)[0], found[1])
    later = Views(0, views.positions + 2 * (views.positions >= 0), views.keys, views.values, keys_of=views.keys_of)
    assert (scorer.score(state, later)[0] - found[0]).unique().numel() > 3  # not the same noise moved along


def h2o_keys_by_hand(keys: list[np.ndarray], window: int, scale: float) -> list[float]:
    """What each of a head's held keys gets from the last `window` of them, in order."""
    total = [0.0] * len(keys)
    for asking in range(max(0, len(keys) - window), len(keys)):
        raised = [math.exp(float(keys[asking] @ keys[slot]) * scale) for slot in range(asking + 1)]
        for slot, part in enumerate(raised):
            total[slot] += part / sum(raised)
    return total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_h2o_keys_before_a_refresh_is_what_the_last_keys_give(name: str, shape: str) -> None:
    model = models.wrap(FAMILIES[name]())
    ids, own, _ = padded([22, 9], 8)
    chosen = policy("h2o_keys", parameters={"window": 5}, trigger="every:30", **settings_of(shape, model))
    with apply(chosen, model) as run:
        streamed_logits(model, ids[:, :22], [12, 10], own=own[:, :22])
        for layer, (held, scores) in held_and_scores(run).items():
            for row, head in np.ndindex(2, model.n_kv_heads):
                real = held[row, head] != EMPTY
                expected = h2o_keys_by_hand(held_keys(run, layer, row, head, real), 5, 8**-0.5)
                same(scores[row, head, real], expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), apart=st.booleans(), news=st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_h2o_keys_adds_up_over_refreshes(seed: int, apart: bool, news: list[int]) -> None:
    """Two layers of two heads, made-up keys, 5 tokens kept: of all together, or in each head for itself."""
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 1, 2, sum(news), 4, generator=rng)
    scorer = table.make("h2o_keys", {"window": 3})
    state = scorer.init(Facts(2, 4, 2, 4, (0, 1)))
    held = [[[] for _ in range(2)] for _ in range(2)]  # [layer][head]
    sums = [[{} for _ in range(2)] for _ in range(2)]
    for first, last in pairwise([0, *np.cumsum(news).tolist()]):
        scores = []
        for layer, head in np.ndindex(2, 2):
            held[layer][head] += range(first, last)
        for layer in range(2):
            positions = torch.tensor(held[layer] if apart else held[layer][:1]).int()[None]
            shown = torch.stack([keys[layer, 0, head, held[layer][head]] for head in range(2)])[None]
            scores.append(scorer.score(state, Views(layer, positions, shown, shown)))
            for head in range(2):
                own = [keys[layer, 0, head, p].double().numpy() for p in held[layer][head]]
                expected = h2o_keys_by_hand(own, 3, 0.5)
                expected = [e + sums[layer][head].get(p, 0.0) for e, p in zip(expected, held[layer][head], strict=True)]
                same(scores[layer][0, head], expected)
        decided = scores if apart else [torch.stack(scores).mean((0, 2))[None]]
        index = [part.topk(min(5, part.shape[-1])).indices.sort().values for part in decided]
        for layer, head in np.ndindex(2, 2):
            part, chosen = (which[layer if apart else 0][0, head if apart else 0] for which in (decided, index))
            sums[layer][head] = {held[layer][head][i]: float(part[i]) for i in chosen.tolist()}
            held[layer][head] = [held[layer][head][i] for i in chosen.tolist()]
        positions = [torch.tensor(held[layer] if apart else held[layer][:1]).int()[None] for layer in range(2)]
        state = state.select(Kept(positions[: len(index)], index, decided))


def test_what_a_slot_had_at_a_refresh_is_what_it_was_chosen_by() -> None:
    model, ids = models.wrap(llama()), token_ids(30)
    with apply(policy("h2o_keys"), model) as run:
        streamed_logits(model, ids, [30])
    with apply(policy("h2o_keys", tokens=100), model) as whole:
        streamed_logits(model, ids, [30])
    decided = torch.stack([scores[0] for _, scores in held_and_scores(whole).values()]).mean((0, 1))
    kept = ledger_of(run.cache).sets[0][0, 0].long()
    torch.testing.assert_close(ledger_of(run.cache).state.sums[0][0, 0], decided[kept])
