"""A model whose layers lie on other devices, or whose weights come only when asked for."""

from __future__ import annotations

import weakref
from typing import Any

import accelerate
import pytest
import torch
from eviction import PARAMETERS, policy, same_logits, uneven, written
from tiny import llama, token_ids
from two_devices import FAR, Far, Split, TwoDevices, near

from kvlens import model as models
from kvlens.errors import ModelRefused
from kvlens.observables.attention_weights import Rule
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import HeldLayer, Ledger
from kvlens.runtime.ragged import RaggedLayer, attend
from kvlens.runtime.received import received
from kvlens.scorers import table
from kvlens.scorers.interface import EMPTY, Facts, Kept, Seen, Views, select

BATCH, HEADS, KV_HEADS, D_HEAD = 2, 4, 2, 8
FACTS = Facts(3, HEADS, KV_HEADS, D_HEAD, (0, 1, 2))


def test_two_devices_do_not_mix_by_themselves() -> None:
    here, there = torch.arange(4.0), Far(torch.arange(4.0))
    with Split():
        for mixed in (lambda: here + there, lambda: here[there > 1], lambda: there.gather(0, here.long())):
            with pytest.raises(TwoDevices):
                mixed()
        assert (there + torch.arange(4, device=FAR)).device == FAR
        assert torch.equal(there.to("cpu") + here, 2 * here)


# Scorers


def made_up(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(seed))


def scored(name: str, away: Any) -> list[torch.Tensor]:
    """Scores of three layers after 24 tokens, an eviction and 6 more; `away` puts what is of layers 1 and 2 there."""
    scorer = table.make(name, PARAMETERS.get(name, {}))
    state, positions, slots = scorer.init(FACTS), torch.zeros(BATCH, 0, dtype=torch.long), 0
    keys = values = torch.zeros(0)

    def by_layer(seed: int, *shape: int) -> dict[int, torch.Tensor]:
        return {layer: (away if layer else near)(made_up(seed + layer, *shape)) for layer in FACTS.layers}

    for first, new in ((0, 24), (24, 6)):
        fresh = torch.arange(first, first + new).expand(BATCH, -1).clone()
        fresh[1, : 2 if not first else 0] = EMPTY
        positions, slots = torch.cat([positions, fresh], 1), slots + new
        keys, values = by_layer(10, KV_HEADS, slots, D_HEAD), by_layer(20, KV_HEADS, slots, D_HEAD)
        parts = [{layer: part[layer][:, :, -new:] for layer in FACTS.layers} for part in (keys, values)]
        hidden = by_layer(30 + first, new, 32)
        queries, got = by_layer(40 + first, HEADS, new, D_HEAD), by_layer(50, KV_HEADS, slots)
        ids = torch.randint(9, (BATCH, new), generator=torch.Generator().manual_seed(1))
        spread = {layer: part.abs() for layer, part in by_layer(60, 2, new).items()}
        state = scorer.observe(state, Seen(fresh, not first, *parts, hidden, queries, got, spread, ids))
        if not first:
            index = torch.tensor([0, 1, 5, *range(12, 24)]).expand(BATCH, 1, -1)
            positions, slots = positions.gather(1, index[:, 0]), index.shape[-1]
            worth = torch.zeros((BATCH, 1, 24))
            state = select(state, Kept([positions[:, None].int()], [index], [worth]))
    held, rule = positions[:, None].int(), Rule(0.3)
    views = [Views(i, held, keys[i], values[i], rule=rule, keys_of=keys.__getitem__) for i in FACTS.layers]
    return [near(scorer.score(state, view)) for view in views]


# Left out: those that run the model again or read what it attends with, which no made-up states stand for.
OF_A_MODEL = ("surprise", "surprise_fast", "kvzip", "expected_attention", "compactor")


@pytest.mark.parametrize("name", [name for name in table.TABLE if name not in OF_A_MODEL])
def test_pitfall_40_scorers_of_layers_on_another_device(name: str) -> None:
    expected = scored(name, near)
    with Split():
        found = scored(name, Far)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)


# Layers


def laid_out(away: Any, *, padded: bool) -> list[torch.Tensor]:
    """What layers give whose states lie there, while the ledger lies here: evicted dense, then ragged, attended to."""
    none = torch.zeros(BATCH, dtype=torch.long)
    ledger = Ledger(table.make("random", {}), None, (0,), weakref.ref(none), none, none, driven=True)
    states = [away(made_up(seed, KV_HEADS, 12, D_HEAD)) for seed in (1, 2)]
    dense = HeldLayer(ledger, 0)
    dense.update(*states)
    dense.evict(torch.tensor([0, 2, *range(4, 12)]).expand(BATCH, KV_HEADS, -1))
    index = torch.tensor([[[0, 1, 5, 8], [0, 4, 6, 9]], [[1, 2, 3, 4], [0, 7, 8, 9]]])
    held = index.clone().int()
    held[0, 1, :2] = EMPTY
    layer = RaggedLayer.of(dense, index, held)
    ledger.own = torch.tensor([[True] * 3, [False, True, True]]) if padded else None
    query, fresh = away(made_up(3, HEADS, 3, D_HEAD)), [away(made_up(seed, KV_HEADS, 3, D_HEAD)) for seed in (4, 5)]
    layer.update(*fresh)
    new = torch.tensor([[10, 11, 12], [EMPTY if padded else 10, 11, 12]])
    out = attend(layer, query, {"scaling": 0.3}, ledger.own)
    got, _ = received(layer, query, Rule(0.3), held, new)
    before = torch.cat([held, new[:, None].expand(-1, KV_HEADS, -1).int()], -1)
    kept = torch.tensor([3, 4, 5, 6]).expand(BATCH, KV_HEADS, -1)
    layer.evict_ragged(kept, before, before.gather(-1, kept))
    for moved in (layer, dense):
        moved.select_rows(torch.tensor([1, 0]))
    return [near(part) for part in (out, got, layer.keys, layer.values, dense.keys, dense.values)]


@pytest.mark.parametrize("padded", [False, True])
def test_pitfall_40_layers_on_another_device_than_their_positions(padded: bool) -> None:
    expected = laid_out(near, padded=padded)
    with Split():
        found = laid_out(Far, padded=padded)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-5, atol=1e-6)


# Weights that come when asked for


# transformers 5.9 takes the device of weights that are away for that of the model, and warns
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
@pytest.mark.parametrize("scorer", ["epikv", "keynorm", "snapkv", "h2o"])
@pytest.mark.parametrize("shape", ["uniform", "padded", "ragged"])
def test_pitfall_40_offloaded_weights(scorer: str, shape: str) -> None:
    plain, ids = models.wrap(llama()), token_ids(30)
    more = {"uniform": {}, "padded": uneven(plain), "ragged": {"storage": "ragged", **uneven(plain)}}[shape]
    chosen = policy(scorer, **more)
    with apply(chosen, plain) as run:
        expected = written(plain, ids, 6)
    offloaded = llama()
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).device == torch.device("meta")
    with apply(chosen, offloaded) as other:
        found = written(other.model, ids, 6)
    assert same_logits(found, expected)
    assert other.report().kept == run.report().kept


def test_pitfall_40_a_second_pass_over_offloaded_weights_is_refused() -> None:
    offloaded = llama()
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    with pytest.raises(ModelRefused, match="offloaded"), apply(policy("surprise_fast"), offloaded):
        pass
