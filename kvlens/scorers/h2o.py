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

from kvlens.scorers.interface import RECEIVED, Facts, Kept, Plain, Seen, Views


@dataclass(frozen=True)
class Hitters:
    """By layer, what each slot has received, [batch, kv_head, slots] in float32; NaN for an empty slot."""

    layers: tuple[int, ...]
    mass: tuple[Tensor | None, ...]

    def select(self, kept: Kept) -> Hitters:
        """The slots that stayed."""
        found: list[Tensor | None] = []
        for number, mass in enumerate(self.mass):
            which = 0 if len(kept.index) == 1 else number
            if mass is not None:
                shape = (-1, mass.shape[1], -1)
                empty = (kept.positions[which] < 0).expand(*shape)
                mass = mass.gather(-1, kept.index[which].expand(*shape)).masked_fill(empty, torch.nan)
            found.append(mass)
        return replace(self, mass=tuple(found))


@dataclass(frozen=True)
class H2O(Plain):
    """The attention received so far."""

    needs = frozenset({RECEIVED})
    per_layer = True

    def init(self, facts: Facts) -> Hitters:
        """Nothing received."""
        return Hitters(facts.layers, (None,) * len(facts.layers))

    def observe(self, state: Hitters, seen: Seen) -> Hitters:
        """1. for the new queries."""
        sums = []
        for layer, mass in zip(state.layers, state.mass, strict=True):
            total = seen.received[layer].to(seen.positions.device)
            if mass is not None:
                total = torch.cat([total[..., : mass.shape[-1]] + mass, total[..., mass.shape[-1] :]], -1)
            sums.append(total)
        return replace(state, mass=tuple(sums))

    def score(self, state: Hitters, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """The sum of every slot."""
        mass = state.mass[state.layers.index(views.layer)]
        if mass is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        mass = mass[views.rows, views.kv_heads]
        if mass.shape[-1] != views.positions.shape[-1]:  # one ragged head, shown without its empty slots
            mass = mass[~mass.isnan()][None, None]
        return mass
