"""`h2o`: heavy hitters, the slots that have received most attention so far.

1. Every query's weights, prompt and decoded tokens alike, summed for each slot of each KV head, mean over its group.
2. The sum goes on as long as the slot is held, and is gone with it. Nothing is taken off or averaged: old tokens have
   had more queries. So the newest need `protect.recent` (the paper: half the budget).

In a prompt fed by chunks the queries of later chunks see what is left of the earlier ones: as soon as something was
evicted the sums are those of the smaller cache (the same as one pass over the prompt until then). While decoding each
new token adds one query.

Source: H2O, arXiv 2306.14048.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.scorers.asking import unjudged
from kvlens.scorers.interface import RECEIVED, Facts, Plain, Seen, Views
from kvlens.scorers.per_slot import PerSlot


def added(state: PerSlot, seen: Seen) -> PerSlot:
    """1. for the new queries: what each slot has received so far."""
    sums = []
    for layer, mass in zip(state.layers, state.numbers, strict=True):
        total = seen.received[layer].to(seen.positions.device)
        if mass is not None:
            total = torch.cat([total[..., : mass.shape[-1]] + mass, total[..., mass.shape[-1] :]], -1)
        sums.append(total)
    return replace(state, numbers=tuple(sums))


@dataclass(frozen=True)
class H2O(Plain):
    """The attention received so far."""

    needs = frozenset({RECEIVED})
    per_layer = True

    def init(self, facts: Facts) -> PerSlot:
        """Nothing received."""
        return PerSlot.of(facts)

    def observe(self, state: PerSlot, seen: Seen) -> PerSlot:
        """1. for the new queries."""
        return added(state, seen)

    def score(self, state: PerSlot, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """The sum of every slot."""
        mass = state.look_up(views)
        return unjudged(views) if mass is None else mass
