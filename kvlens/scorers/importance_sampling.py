"""`importance_sampling`: tokens whose last-layer key resembles that of the newest token.

1. In the last managed layer, the product of every held key with the newest token's key, mean over KV heads; one number
   a token, and all layers and heads keep the same tokens (`reduce: all`).
2. `top` (what the authors' code does): the number itself.
   `sample` (what the name says): without replacement, with chances that go as exp(number / sqrt(d_head)), by adding
   Gumbel noise to that and keeping the highest. The noise hangs on the seed, the token's position and the newest
   token's, so that every refresh draws anew and every batch and device draw the same.

Defaults: `top`, seed 0. Query-agnostic: a key asks, not a query. At refreshes, prefill included; no attention weights,
nothing is carried. Cost: one product of a layer's keys with one vector.

Source: the baseline of counter-causal surprise, arXiv 2607.27600.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvlens.observables.arithmetic import wide
from kvlens.scorers.interface import EMPTY, Facts, Plain, Seed, Views
from kvlens.scorers.random import uniform


@dataclass(frozen=True)
class LastLayer:
    """Which one it is."""

    layer: int


@dataclass(frozen=True)
class ImportanceSampling(Plain):
    """The product with the newest key."""

    choice: Literal["top", "sample"] = "top"
    seed: Seed = 0

    together = True

    def init(self, facts: Facts) -> LastLayer:
        """The last layer that is managed."""
        return LastLayer(facts.layers[-1])

    def score(self, state: LastLayer, views: Views) -> Float[Tensor, "batch one kept"]:
        """1. and 2.; without `keys_of`, the layer shown is taken for the last."""
        positions = views.positions
        keys = wide(views.keys if views.keys_of is None else views.keys_of(state.layer)).to(positions.device)
        newest = positions[:, 0].argmax(-1)
        last = keys.take_along_dim(newest[:, None, None, None], 2)
        number = (keys * last).sum(-1).mean(1, keepdim=True)
        if self.choice == "top":
            return number
        drawn = uniform(self.seed, positions.long(), positions.amax(-1, keepdim=True).long())
        noise = -(-drawn.double().clamp(min=2**-25).log()).log()
        scores = number.double() / math.sqrt(keys.shape[-1]) + noise
        return scores.masked_fill(positions == EMPTY, -math.inf)
