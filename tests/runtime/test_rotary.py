"""Rotations: undone exactly, averaged exactly, found layer by layer, and refused where they are not found."""

from __future__ import annotations

import copy

import pytest
import torch
from asking_oracles import DYNAMIC, MADE, Asking
from tiny import COMMON, build, llama, token_ids
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from kvlens import model as models
from kvlens.errors import ModelRefused
from kvlens.runtime import rotary
from kvlens.runtime.rotary import rotations

N = 30


@pytest.mark.parametrize("name", MADE)
def test_pitfall_05_undoing_gives_what_there_was_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.wrap(MADE[name]())
    asking = Asking(model, token_ids(N)[0], None, monkeypatch)
    found = rotations(model, tuple(range(model.n_layers)))
    positions = torch.arange(N)[None, None]
    turned = 0.0
    for layer, way in found.items():
        for plain, asked in zip(asking.plain[layer], asking.asked[layer], strict=True):
            undone = way.undo(asked[None].float(), positions)[0]
            torch.testing.assert_close(undone.double(), plain, atol=1e-4, rtol=1e-4)
            each = positions.expand(1, len(asked), -1)  # heads that have their own positions
            torch.testing.assert_close(way.undo(asked[None].float(), each)[0], undone)
            turned += float((asked - plain).abs().max())
    assert (turned > 1) == (name != "gpt2")


@pytest.mark.parametrize("name", MADE)
def test_the_mean_of_rotations_is_the_mean_of_what_each_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.wrap(MADE[name]())
    asking = Asking(model, token_ids(4)[0], None, monkeypatch)
    ahead = torch.tensor([[3, 4, 5, 90], [7, 8, 9, 10]])
    states = torch.randn(5, model.d_head, generator=torch.Generator().manual_seed(0))
    for layer, way in rotations(model, tuple(range(model.n_layers))).items():
        found = states @ way.mean_over(ahead, model.d_head)
        for row in range(2):
            each = [asking.turn(layer, states.double()[None], p.repeat(5))[0] for p in ahead[row]]
            torch.testing.assert_close(found[row].double(), sum(each) / 4, atol=1e-5, rtol=1e-4)


def test_a_layer_without_rotation_is_found_among_others() -> None:
    model = models.wrap(build(SmolLM3ForCausalLM, SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1])))
    found = rotations(model, (0, 1, 2))
    assert [way.angles is None for way in found.values()] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "yarn", "gpt_neox"])
def test_half_precision_is_no_reason_to_refuse(name: str, dtype: torch.dtype) -> None:
    model = models.wrap(MADE[name]().to(dtype))
    assert all(way.angles is not None for way in rotations(model, (1,)).values())


def test_a_rotation_that_is_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "APPLY", "turned")
    with pytest.raises(ModelRefused, match="layer 0 turns its queries"):
        rotations(models.wrap(llama()), (0,))


def test_angles_that_are_not_the_layers_own_are_refused() -> None:
    model = models.wrap(llama())
    other = {"rope_type": "default", "rope_theta": 1e6}
    model.decoder.embed_tokens.rotary_emb = llama(rope_parameters=other).model.rotary_emb  # found first
    with pytest.raises(ModelRefused, match="layer 2 turns its queries"):
        rotations(model, (2,))


def test_asking_for_far_positions_changes_no_model() -> None:
    """Some angles change with the longest position that their module was asked for, and stay changed."""
    model, ids = models.wrap(llama(rope_parameters=DYNAMIC, max_position_embeddings=64)), token_ids(40)
    before, buffers = models.logits(model, ids), copy.deepcopy(dict(model.decoder.rotary_emb.named_buffers()))
    way = rotations(model, (0,))[0]
    near = way.mean_over(torch.arange(40)[None], 8)
    far = way.mean_over(torch.arange(2000, 2040)[None], 8)
    assert not torch.equal(near, far)
    assert all(torch.equal(buffers[name], now) for name, now in model.decoder.rotary_emb.named_buffers())
    assert torch.equal(models.logits(model, ids), before)
