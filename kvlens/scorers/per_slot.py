"""How is a number that belongs to a slot of one layer and KV head remembered until the slot is gone?

By layer one tensor that stands slot by slot beside the cache, NaN for an empty slot. Unlike a number that is frozen
with its token (`frozen.py`) it differs from head to head and may change as long as the slot is held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.scorers.interface import Facts, Kept, Views


@dataclass(frozen=True)
class PerSlot:
    """By layer [batch, kv_head, slots] in float32; None before the first token."""

    layers: tuple[int, ...]
    numbers: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, facts: Facts) -> PerSlot:
        """Nothing yet."""
        return cls(facts.layers, (None,) * len(facts.layers))

    def select(self, kept: Kept) -> PerSlot:
        """The slots that stayed."""
        found: list[Tensor | None] = []
        for place, numbers in enumerate(self.numbers):
            which = 0 if len(kept.index) == 1 else place
            found.append(None if numbers is None else gathered(numbers, kept, which))
        return replace(self, numbers=tuple(found))

    def look_up(self, views: Views) -> Float[Tensor, "batch kv_head kept"] | None:
        """The numbers of the slots shown; None before the first token."""
        numbers = self.numbers[self.layers.index(views.layer)]
        if numbers is None:
            return None
        numbers = numbers[views.rows, views.kv_heads]
        if numbers.shape[-1] != views.positions.shape[-1]:  # one ragged head, shown without its empty slots
            numbers = numbers[~numbers.isnan()][None, None]
        return numbers


def gathered(numbers: Float[Tensor, "batch kv_head slots"], kept: Kept, which: int) -> Tensor:
    """What stayed of the numbers of one set of slots; NaN for filling."""
    shape = (-1, numbers.shape[1], -1)
    empty = (kept.positions[which] < 0).expand(*shape)
    return numbers.gather(-1, kept.index[which].expand(*shape)).masked_fill(empty, torch.nan)
