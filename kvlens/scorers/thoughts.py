"""What kind of thought is a stretch of text? Segments of 128 tokens, typed by how their queries attend.

1. A token belongs to segment `position // size` of its row. What its weights look like (one number, the mean over the
   managed layers) is added up for its segment; a segment is whole once all its tokens were counted.
2. A whole segment is sparse (T, a transition), middling (R, reasoning) or not sparse (E, execution), by two thresholds,
   or by the tertiles of the whole segments up to itself: it is typed once, by what came before it.
3. `ranks` orders the slots of each segment by a number.

The sums of a segment (12 bytes) stay when its tokens leave: the tertiles need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Float64, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from kvlens.scorers.interface import AS_TUPLE, EMPTY

SIZE = 128
UNTYPED, TRANSITION, EXECUTION, REASONING = -1, 0, 1, 2  # in the order in which they are worth keeping
SPARSITY, ENTROPY = 0, 1  # of `Seen.spread`

Size = Annotated[int, Field(ge=1, le=65_536)]
Kept = Annotated[int, Field(ge=1, le=65_536)]
Budgets = Annotated[tuple[Kept, Kept, Kept], AS_TUPLE]  # of R, E and T
Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Thresholds = Annotated[tuple[Unit, Unit], AS_TUPLE]


@dataclass(frozen=True)
class Segments:
    """By segment of each row, the sum of its tokens' numbers and how many were counted; None before the first token."""

    size: int
    sums: Float64[Tensor, "batch segment"] | None = None
    counts: Int[Tensor, "batch segment"] | None = None

    def extended(self, positions: Int[Tensor, "batch new"], numbers: Float[Tensor, "batch new"]) -> Segments:
        """1. for new tokens."""
        counted = positions != EMPTY
        index = positions.clamp(min=0).long() // self.size
        before = 0 if self.sums is None else self.sums.shape[1]
        wide = (0, max(0, int(index.max()) + 1 - before))
        empty = numbers.new_zeros((len(positions), 0), dtype=torch.float64)
        sums = pad(empty if self.sums is None else self.sums, wide)
        counts = pad(empty.to(torch.int32) if self.counts is None else self.counts, wide)
        sums.scatter_add_(1, index, numbers.double().masked_fill(~counted, 0.0))
        counts.scatter_add_(1, index, counted.to(torch.int32))
        return replace(self, sums=sums, counts=counts)

    def types(self, thresholds: tuple[float, float] | None = None) -> Int[Tensor, "batch segment"]:
        """2. for every segment whose numbers say how sparse it is; UNTYPED where it is not whole."""
        if self.sums is None or self.counts is None:
            return torch.empty((0, 0), dtype=torch.long)
        whole = self.counts == self.size
        means = self.sums / self.size
        if thresholds is None:
            before = torch.ones(means.shape[1], means.shape[1], dtype=torch.bool, device=means.device).tril()
            others = before & whole[:, None, :]
            less = (others & (means[:, None, :] < means[..., None])).sum(-1)
            same = (others & (means[:, None, :] == means[..., None])).sum(-1)
            means, thresholds = (less + same / 2) / others.sum(-1).clamp(min=1), (1 / 3, 2 / 3)
        kinds = torch.where(means >= thresholds[1], TRANSITION, REASONING)
        kinds = torch.where(means < thresholds[0], EXECUTION, kinds)
        return kinds.masked_fill(~whole, UNTYPED)


def of_spread(
    spread: Mapping[int, Float[Tensor, "batch 2 new"]], which: int, like: Tensor
) -> Float[Tensor, "batch new"]:
    """One of the two numbers of `Seen.spread`, mean over the layers, on the device of `like`."""
    return torch.stack([found[:, which].to(like.device) for found in spread.values()]).mean(0)


def of_slots(
    types: Int[Tensor, "batch segment"], positions: Int[Tensor, "batch heads kept"], size: int
) -> tuple[Int[Tensor, "batch heads kept"], Int[Tensor, "batch heads kept"]]:
    """By slot the number of its segment and its type; UNTYPED for an empty slot."""
    segment = positions.clamp(min=0).long() // size
    kind = types.gather(1, segment.flatten(1)).view_as(segment)
    return segment, kind.masked_fill(positions == EMPTY, UNTYPED)


def ranks(
    numbers: Float[Tensor, "batch heads kept"],
    segment: Int[Tensor, "batch heads kept"],
    real: Bool[Tensor, "batch heads kept"],
) -> Int[Tensor, "batch heads kept"]:
    """3.: 1 for the highest of a segment, equal ones in the order of their slots; NaN, not known, comes first."""
    numbers = numbers.masked_fill(numbers.isnan(), torch.inf)
    behind = segment.masked_fill(~real, int(segment.max()) + 1)
    order = numbers.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, behind.gather(-1, order).sort(dim=-1, stable=True).indices)
    sorted_segments = behind.gather(-1, order).contiguous()
    first = torch.searchsorted(sorted_segments, sorted_segments)
    place = torch.arange(1, order.shape[-1] + 1, device=order.device) - first
    return torch.empty_like(order).scatter_(-1, order, place)


def by_budget(
    numbers: Float[Tensor, "batch heads kept"],
    segment: Int[Tensor, "batch heads kept"],
    kind: Int[Tensor, "batch heads kept"],
    budgets: tuple[int, int, int],
) -> Float[Tensor, "batch heads kept"]:
    """Minus a slot's rank in its segment over the budget of its segment's type; NaN where it is untyped.

    Cut at -1 every segment keeps its budget; cut elsewhere, all keep the same multiple of theirs.
    """
    reasoning, execution, transition = budgets
    allowed = torch.tensor([transition, execution, reasoning], device=numbers.device)[kind.clamp(min=0)]
    untyped = kind == UNTYPED
    return (-ranks(numbers, segment, ~untyped) / allowed).masked_fill(untyped, torch.nan)
