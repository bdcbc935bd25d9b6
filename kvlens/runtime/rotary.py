"""How does each layer of this model turn queries and keys by their position?

1. Angles come from the rotary module of the decoder, turning from the function beside the layer's attention: both are
   the model's own, asked for float32. A copy of the module is asked: some change with the longest position they saw.
2. Which layers turn is measured, not read off a config: one token at position 0 and, as another row, at position 7.
   It sees nothing but itself, so that before rotation its queries are equal in every layer. A layer whose queries are
   equal as they are turns nothing (NoPE); where they become equal when 1. is undone it turns so; others are refused.
3. A model that learns a vector for each position turns nothing; its queries differ, and are not compared.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvlens.attention import around_attention
from kvlens.causal_lm import Model
from kvlens.errors import ModelRefused
from kvlens.forward import hidden, learned_positions
from kvlens.observables.rotation import Angles, Rotation, Turn

APPLY = "apply_rotary_pos_emb"  # what every family that kvlens knows calls it
AT = (0, 7)  # two positions that any context holds
TOLERANCE = 1e-3  # of the largest number, in float32
ROUNDINGS = 16  # in half precision: of the states, and of the angles, which the model rounds too


def rotations(model: Model, layers: tuple[int, ...]) -> dict[int, Rotation]:
    """The rotation of each of these layers.

    Raises: ModelRefused for a layer that turns in a way kvlens does not find.
    Cost: one forward pass of two tokens.
    """
    still = Rotation(lambda states, *_: states)
    if learned_positions(model) is not None:
        return dict.fromkeys(layers, still)  # 3.
    asked = _queries(model)
    found = {}
    for layer in layers:
        turning = _turning(model, layer)
        fits = [way for way in (still, turning) if way is not None and _same(asked[layer], way)]
        if not fits:
            raise ModelRefused(
                f"{model.name}: layer {layer} turns its queries by their position in a way kvlens does not know",
                "use a scorer that reads no queries before rotation",
            )
        found[layer] = fits[0]
    return found


def _queries(model: Model) -> dict[int, Tensor]:
    """By layer the queries of one token at two positions, [2, head, 1, d_head]."""
    asked: dict[int, Tensor] = {}

    def note(layer: int, own: Callable[[], Tensor], query: Tensor, *_: Any) -> Tensor:
        asked[layer] = query
        return own()

    ids = torch.full((2, 1), min(3, model.d_vocab - 1), device=model.device)
    with torch.no_grad(), around_attention(model, note):
        hidden(model, ids, positions=torch.tensor(AT, device=model.device)[:, None])
    return asked


def _same(queries: Tensor, way: Rotation) -> bool:
    """2.: whether undoing this makes the queries of the two positions equal."""
    positions = torch.tensor(AT, device=queries.device)[:, None, None]
    first, second = way.undo(queries, positions)
    eps = max(TOLERANCE, ROUNDINGS * torch.finfo(queries.dtype).eps)
    return bool((first - second).abs().max() <= eps * first.abs().max())


def _turning(model: Model, layer: int) -> Rotation | None:
    """1. for one layer; None where one of the two is not there."""
    module = model.layers[layer]
    apply = getattr(sys.modules[type(module).__module__], APPLY, None)
    rotary = next((part for name, part in model.decoder.named_modules() if name.endswith("rotary_emb")), None)
    if apply is None or rotary is None:
        return None
    return Rotation(_turn(apply), _angles(rotary, module, layer))


def _turn(apply: Callable[..., tuple[Tensor, Tensor]]) -> Turn:
    def turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply(states, states[:, :1], cos, sin)[0]

    return turn


def _angles(rotary: nn.Module, module: Any, layer: int) -> Angles:
    kinds = getattr(module.config, "layer_types", None)
    by_kind = "layer_type" in signature(rotary.forward).parameters
    more = {"layer_type": kinds[layer]} if by_kind and kinds else {}

    def angles(positions: Int[Tensor, "batch pos"]) -> tuple[Tensor, Tensor]:
        like = torch.zeros(1, device=positions.device)
        with torch.no_grad():
            cos, sin = copy.deepcopy(rotary).to(positions.device)(like, positions, **more)
        return cos, sin

    return angles
