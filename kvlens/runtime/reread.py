"""How does a scorer run the model over its own cache? A second pass, made once for a run, given a cache when used.

1. It is made before any hook is set, and is a wiring of its own over the same weights: nothing is left on the model.
2. It reads keys and values where the cache holds them. Empty slots must come first for it: where some stand between
   tokens (padding between two turns), each layer's rows are put in order when it is their turn.
3. A sliding layer drops rows by itself, so a pass that would read one is refused; so are weights that are offloaded.

There are two kinds: counter-causal surprise (here), and the repetition of the whole text (repeat.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from kvlens.causal_lm import Model
from kvlens.errors import ModelRefused
from kvlens.observables.surprise import State, Surprise
from kvlens.observables.surprise_variant import Variant
from kvlens.runtime.cache import Ledger
from kvlens.runtime.repeat import RepeatPass
from kvlens.scorers.interface import EMPTY, Repeat

# (cache, its ledger, what the scorer carries) -> by managed layer what the pass says of its slots
SecondPass = Callable[
    [Cache, Ledger, Int[Tensor, "batch tokens"], Float[Tensor, "batch tokens d_model"] | None],
    Mapping[int, Float[Tensor, "batch heads slots"]],
]


def second_pass(model: Model, asked: Variant | Repeat | None) -> SecondPass | None:
    """The pass that a scorer asks for. Raises: ModelRefused where this model cannot be asked so."""
    if asked is None:
        return None
    return SurprisePass(model, asked) if isinstance(asked, Variant) else RepeatPass(model, asked)


class SurprisePass:
    """Counter-causal surprise of every slot, in one variant.

    Raises: ModelRefused for a model of which no such part can be run, or whose layers there slide.
    Cost: three passes of three tokens.
    """

    def __init__(self, model: Model, variant: Variant) -> None:
        n_run = model.n_layers if variant.layers is None else min(variant.layers, model.n_layers)
        slides = [layer for layer in range(model.n_layers - n_run, model.n_layers) if model.sliding[layer] is not None]
        if slides:
            raise ModelRefused(
                f"{model.name}: surprise '{variant.name}' reads layer {slides[0]}, which slides and drops rows",
                "use surprise_fast where the last layer is full attention, or another scorer",
            )
        if any(weight.device.type == "meta" for weight in model.hf.parameters()):
            raise ModelRefused(
                f"{model.name}: surprise '{variant.name}' reads the model's weights, and some are offloaded",
                "load the whole model, or choose another scorer",
            )
        self.surprise = Surprise(model, variant)

    def __call__(
        self,
        cache: Cache,
        ledger: Ledger,
        ids: Int[Tensor, "batch slots"],
        states: Float[Tensor, "batch slots d_model"] | None,
    ) -> dict[int, Float[Tensor, "batch one slots"]]:
        """The surprise of every slot, the same in every layer; NaN for one that has none and for an empty one."""
        # 2.
        positions = ledger.sets[0][:, 0]
        real, order, n_pad = positions != EMPTY, None, None
        if not bool(real.all()):
            n_pad = (~real).sum(-1)
            if bool((real[:, :-1] & ~real[:, 1:]).any()):
                order = real.to(torch.int8).sort(dim=-1, stable=True).indices
                positions, ids = positions.gather(-1, order), ids.gather(-1, order)
                states = None if states is None else _in_order(states, order)
        state = State(ids.long(), positions.long().clamp(min=0), states, None, n_pad)
        found = self.surprise.scores(state, _Rows(cache, order))
        values = found.values.masked_fill(~found.known, torch.nan)
        values = values if order is None else torch.empty_like(values).scatter_(-1, order, values)
        return dict.fromkeys(ledger.layers, values[:, None])


@dataclass(frozen=True)
class _Rows(Sequence[tuple[Tensor, Tensor]]):
    """Keys and values of each layer, in order when asked for."""

    cache: Cache
    order: Int[Tensor, "batch slots"] | None

    def __len__(self) -> int:
        return len(self.cache.layers)

    def __getitem__(self, layer: Any) -> Any:
        held = self.cache.layers[layer].keys, self.cache.layers[layer].values
        return held if self.order is None else tuple(_in_order(part, self.order[:, None]) for part in held)


def _in_order(rows: Float[Tensor, "*shape slots d"], order: Int[Tensor, "*#shape slots"]) -> Tensor:
    return rows.gather(-2, order.to(rows.device)[..., None].expand(rows.shape))
