"""`attention_x_hidden`: the attention a slot has received times the step the residual stream took at its token.

1. What a slot has received so far, as `h2o` sums it, per KV head.
2. The change of the residual stream at its token after block a, || h(t) - h(t - 1) ||, frozen when the token is made.
3. Their product. The first token of a row has no change: not judged, so it stays.

Defaults: `depth_a` 10 of 32. The change itself and not its z-score, which is negative for half of the tokens: times a
negative number more attention would be worth less. Query-aware. Decode and prefill; needs attention received (own rows)
and hidden states. Cost: that of `h2o`; carried, 4 bytes a slot and KV head, 8 a token and the last hidden state.

Source: a hybrid of EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Float64
from torch import Tensor

from kvlens.observables import rolling
from kvlens.scorers.asking import unjudged
from kvlens.scorers.h2o import added
from kvlens.scorers.hidden_change import DEPTH_A, HiddenChange, Moved
from kvlens.scorers.interface import HIDDEN, RECEIVED, Depth, Facts, Kept, Plain, Seen, Views
from kvlens.scorers.per_slot import PerSlot


@dataclass(frozen=True)
class Product:
    """Both factors."""

    received: PerSlot
    moved: Moved

    def select(self, kept: Kept) -> Product:
        """After an eviction."""
        return Product(self.received.select(kept), self.moved.select(kept))


class _Change(HiddenChange):
    """2."""

    def number(
        self, state: Moved, changes: Float64[Tensor, "batch 2 new"]
    ) -> tuple[rolling.Trailing, Float64[Tensor, "batch new"]]:
        """The change after block a, as it is."""
        return state.window, changes[:, 0]


@dataclass(frozen=True)
class AttentionXHidden(Plain):
    """Attention received times change."""

    depth_a: Depth = DEPTH_A

    needs = frozenset({RECEIVED, HIDDEN})
    per_layer = True

    def _change(self) -> _Change:
        return _Change(depth_a=self.depth_a, depth_b=self.depth_a, window=1)

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """Block a of this model."""
        return self._change().hidden_layers(facts)

    def init(self, facts: Facts) -> Product:
        """Nothing seen."""
        return Product(PerSlot.of(facts), self._change().init(facts))

    def observe(self, state: Product, seen: Seen) -> Product:
        """1. and 2. for the new tokens."""
        return Product(added(state.received, seen), self._change().observe(state.moved, seen))

    def score(self, state: Product, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """3."""
        mass = state.received.look_up(views)
        if mass is None:
            return unjudged(views)
        return mass * self._change().score(state.moved, views)
