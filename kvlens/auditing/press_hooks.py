"""What do presses read, and how is it put there and taken away again? Arguments, attributes and hooks.

1. `arguments_of`: the keywords of an attention call under every name that presses have read.
2. `hooks`: something is told of every full-attention layer after it has run.
3. `lent`: attributes that presses read from attention modules; `eager`: attention that puts out its weights.

All of them end with their block, after exceptions too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens.errors import ModelRefused
from kvlens.model import Model

MARKS = "masked_key_indices"
LENT = (MARKS, "rotary_emb")  # what presses read from an attention module
# (layer, its attention module, (what entered it, its keywords, its attention weights or None))
See = Callable[[int, nn.Module, tuple[Any, ...]], None]


def full_layers(model: Model) -> list[int]:
    """The layers that presses work on: those that do not slide."""
    return [index for index, window in enumerate(model.sliding) if window is None]


def arguments_of(cache: Any, hidden: Float[Tensor, "batch query d_model"], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of an attention call, under every name that presses have read."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    given = {"hidden_states": hidden, "cache_position": positions, "position_ids": positions[None]}
    caches = dict.fromkeys(("past_key_values", "past_key_value", "cache"), cache)
    return kwargs | given | caches


@contextmanager
def hooks(model: Model, see: See) -> Iterator[None]:
    """Within it `see(layer, module, (hidden, keywords, attention))` is called after every full-attention layer."""

    def after(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        see(index, module, (hidden, kwargs, output[1]))

    with ExitStack() as stack:
        for index in full_layers(model):
            handle = model.layers[index].register_forward_hook(partial(after, index), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def lent(model: Model) -> Iterator[None]:
    """Within it attention modules have what presses read from them; afterwards they are as they were.

    Raises: ModelRefused for a model without rotary embeddings, which presses are written for.
    """
    rotary = getattr(model.decoder, "rotary_emb", None)
    if rotary is None:
        raise ModelRefused(
            f"{model.name}: presses read rotary embeddings, and this model has none", "audit its policies alone"
        )
    before = [{name: getattr(module, name) for name in LENT if hasattr(module, name)} for module in model.layers]
    try:
        for module, had in zip(model.layers, before, strict=True):
            setattr(module, MARKS, None)
            if "rotary_emb" not in had:
                module.rotary_emb = rotary
        yield
    finally:
        for module, had in zip(model.layers, before, strict=True):
            for name in LENT:
                if hasattr(module, name):
                    delattr(module, name)
                if name in had:
                    setattr(module, name, had[name])


@contextmanager
def eager(model: Model) -> Iterator[None]:
    """Within it attention puts out its weights, n x n of every head, whatever backend the model has."""
    former = str(model.decoder.config._attn_implementation)
    model.hf.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.hf.set_attn_implementation(former)
