"""How is a number that belongs to a token remembered until the token is gone?

1. `append` adds the new tokens' numbers, once: a number is frozen when its token is made.
2. `look_up` finds the number of every slot by its position.
3. `select` drops the numbers of tokens that no layer holds any more. Rows that lose more are filled up on the left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.scorers.interface import EMPTY, Kept, Views


@dataclass(frozen=True)
class Frozen:
    """One float32 number a token (and layer, and KV head), by position; -1 is an empty place. None before the first."""

    positions: Int[Tensor, "batch tokens"] | None = None
    numbers: Float[Tensor, "batch *parts tokens"] | None = None

    def append(self, positions: Int[Tensor, "batch new"], numbers: Float[Tensor, "batch *parts new"]) -> Frozen:
        """With the numbers of new tokens, whose positions are higher than all before."""
        positions, numbers = positions.to(torch.int32), numbers.to(torch.float32)
        if self.positions is None or self.numbers is None:
            return Frozen(positions.clone(), numbers.clone())
        return Frozen(torch.cat([self.positions, positions], -1), torch.cat([self.numbers, numbers], -1))

    def look_up(self, views: Views, layer: int | None = None) -> Float[Tensor, "batch heads kept"]:
        """The number of every slot; NaN for an empty slot and for a position that was never given.

        `layer` is the place of the view's layer where numbers are by layer and KV head.
        """
        if self.positions is None or self.numbers is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        known, numbers = self.positions[views.rows], self.numbers[views.rows]
        numbers = numbers[:, None] if layer is None else numbers[:, layer, views.kv_heads]
        if views.positions.shape[1] == 1 and torch.equal(known, views.positions[:, 0]):
            return numbers.masked_fill(views.positions == EMPTY, torch.nan)  # nothing to look for
        place = _places(known, views.positions)
        found = known.gather(1, place.flatten(1)).view_as(place) == views.positions
        heads = max(numbers.shape[1], place.shape[1])
        values = numbers.expand(-1, heads, -1).gather(-1, place.expand(-1, heads, -1))
        return values.masked_fill(~found | (views.positions == EMPTY), torch.nan)

    def select(self, kept: Kept) -> Frozen:
        """Without the numbers of tokens that are in none of the kept sets."""
        if self.positions is None or self.numbers is None:
            return self
        alive = torch.zeros_like(self.positions, dtype=torch.bool)
        for positions in kept.positions:
            held = positions.flatten(1)
            place = _places(self.positions, held)
            found = (self.positions.gather(1, place) == held) & (held != EMPTY)
            alive.scatter_reduce_(1, place, found, "amax")
        width = int(alive.sum(-1).max())
        order = alive.to(torch.uint8).sort(dim=-1, stable=True).indices[:, alive.shape[1] - width :]
        positions = self.positions.gather(1, order).masked_fill(~alive.gather(1, order), EMPTY)
        parts = self.numbers.shape[1:-1]
        order = order.view(len(order), *[1] * len(parts), width).expand(-1, *parts, -1)
        return Frozen(positions, self.numbers.gather(-1, order))


def _places(known: Int[Tensor, "batch tokens"], wanted: Int[Tensor, "batch *slots"]) -> Int[Tensor, "batch *slots"]:  # noqa: F821 (axes, not names)
    """Where each wanted position stands among the known, or somewhere else in the row if it does not."""
    # an empty place lies on the left or inside; with what is known so far in its place the row still rises
    rising = known.cummax(-1).values
    place = torch.searchsorted(rising, wanted.flatten(1).contiguous())
    return place.clamp_(max=known.shape[1] - 1).view(wanted.shape)
