"""`thinkv`: segments of thought, the older ones thinned out step by step whenever the thinking turns.

1. Segments of 128 tokens are typed by attention sparsity (`thoughts.py`; a slot is not attended to when it gets less
   than a hundredth of its query's largest weight): transitions (T), execution (E), reasoning (R).
2. Each transition that is complete brings all segments before it down by one step: from whole to 64 tokens, then 32,
   16, 8, 4. What stays of a segment are the medoids of its keys, per KV head; of 64 those of the next 32, and so on.
3. The score says how many further steps a token would survive, the present one included; within a step first the
   tokens of R, then of E, then of T, of one type those of newer segments. So a budget that is smaller than the steps
   allow takes all segments down another step, transitions first and oldest first.
4. The segment under way is not judged yet, so it stays.

`parity` (EpiKV's adaptation): types by tertiles of attention entropy, budgets of 64, 32 and 8 tokens for R, E and T at
once, no medoids: within a segment the tokens that have received most attention (per KV head). Cut at -1 the budgets are
met; another cut scales all of them.

Defaults: `size` 128, `steps` (64, 32, 16, 8, 4), `budgets` (64, 32, 8). `thresholds` are two values of sparsity, below
the first E, from the second on T: the paper calibrates them per model; where they are left out, the tertiles of the
segments so far (sparsity rises with the number of keys, so in a short text these call most segments transitions).
Query-aware. For decoding; needs own rows, of every token (its paper: of one in 128, and a few layers).
Cost: one more product of queries and keys; at a refresh the distances of keys within segments and k-medoids; carried,
12 bytes a segment, for `parity` also 4 a slot and KV head.

Source: ThinKV, arXiv 2510.01290 (its quantisation is no part of this); `parity`: EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables.arithmetic import wide
from kvlens.scorers import thoughts
from kvlens.scorers.asking import unjudged
from kvlens.scorers.h2o import added
from kvlens.scorers.interface import AS_TUPLE, RECEIVED, SPREAD, Facts, Plain, Seen, Views
from kvlens.scorers.interface import Kept as Left
from kvlens.scorers.medoids import medoids
from kvlens.scorers.per_slot import PerSlot
from kvlens.scorers.thoughts import TRANSITION, UNTYPED, Budgets, Kept, Segments, Size, Thresholds

Steps = Annotated[tuple[Kept, ...], AS_TUPLE]


@dataclass(frozen=True)
class Thinking:
    """What the segments look like and, for `parity`, what every slot has received."""

    segments: Segments
    received: PerSlot

    def select(self, kept: Left) -> Thinking:
        """After an eviction."""
        return Thinking(self.segments, self.received.select(kept))


@dataclass(frozen=True)
class ThinKV(Plain):
    """How many steps a token survives."""

    size: Size = thoughts.SIZE
    steps: Steps = (64, 32, 16, 8, 4)
    thresholds: Thresholds | None = None
    parity: bool = False
    budgets: Budgets = (64, 32, 8)

    per_layer = True

    def __post_init__(self) -> None:
        falls = (self.size, *self.steps)
        rise = len(falls) == 1 or any(later >= earlier for earlier, later in pairwise(falls))
        if rise and not self.parity:  # which takes no steps
            raise InputError(
                f"scorer thinkv: steps {list(self.steps)} do not fall from a segment's {self.size} tokens",
                "give fewer tokens at every step",
            )
        if self.thresholds is not None and self.thresholds[0] > self.thresholds[1]:
            raise InputError(
                f"scorer thinkv: thresholds {list(self.thresholds)} do not rise", "give the lower one first"
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What a token's weights look like, and for `parity` what slots received."""
        return frozenset({SPREAD, RECEIVED} if self.parity else {SPREAD})

    def init(self, facts: Facts) -> Thinking:
        """Nothing seen."""
        return Thinking(Segments(self.size), PerSlot.of(facts))

    def observe(self, state: Thinking, seen: Seen) -> Thinking:
        """1. for the new tokens; little entropy is much sparsity."""
        which, sign = (thoughts.ENTROPY, -1) if self.parity else (thoughts.SPARSITY, 1)
        numbers = sign * thoughts.of_spread(seen.spread, which, seen.positions)
        segments = state.segments.extended(seen.positions, numbers)
        return Thinking(segments, added(state.received, seen) if self.parity else state.received)

    def score(self, state: Thinking, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """2. to 4."""
        types = state.segments.types(None if self.parity else self.thresholds)[views.rows].to(views.positions.device)
        if not types.numel():
            return unjudged(views)
        positions = views.positions.expand(-1, views.keys.shape[1], -1)
        segment, kind = thoughts.of_slots(types, positions, self.size)
        if self.parity:
            mass = state.received.look_up(views)
            return unjudged(views) if mass is None else thoughts.by_budget(mass, segment, kind, self.budgets)
        turns = (types == TRANSITION).long()
        taken = turns.flip(-1).cumsum(-1).flip(-1) - turns  # transitions after each segment
        steps = taken.gather(1, segment.flatten(1)).view_as(segment)
        survived = self._survived(wide(views.keys).to(positions.device), segment, kind, steps)
        age = 1 / (segment.double() + 2)  # of newer segments it is less, whatever the longest row of the batch
        return (3 * survived + kind - age).masked_fill(kind == UNTYPED, torch.nan)

    def _survived(
        self,
        keys: Float[Tensor, "batch kv_head kept d_head"],
        segment: Int[Tensor, "batch kv_head kept"],
        kind: Int[Tensor, "batch kv_head kept"],
        steps: Int[Tensor, "batch kv_head kept"],
    ) -> Int[Tensor, "batch kv_head kept"]:
        """How many steps each slot survives: the present one of its segment, the next, and so on to the last."""
        typed = kind != UNTYPED
        if not bool(typed.any()):
            return torch.zeros_like(segment)
        names = torch.unique(segment[typed])
        number = torch.searchsorted(names, segment).clamp(max=len(names) - 1)
        place = thoughts.ranks(torch.zeros_like(keys[..., 0]), segment, typed) - 1
        shape = (*segment.shape[:2], len(names), int(place[typed].max()) + 1)
        # a table of segments by points; slots of no whole segment go to one more place, which is cut off
        index = (number * shape[3] + place).masked_fill(~typed, shape[2] * shape[3])

        def laid_out(values: Tensor) -> Tensor:
            more = values.shape[3:]
            table = values.new_zeros((*shape[:2], shape[2] * shape[3] + 1, *more))
            table.scatter_(2, index.reshape(*index.shape, *[1] * len(more)).expand(values.shape), values)
            return table[:, :, :-1].reshape(*shape, *more)

        points, there, level = laid_out(keys), laid_out(typed), laid_out(steps).amax(-1)
        distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
        falls = torch.tensor((self.size, *self.steps), device=keys.device)
        survived = torch.zeros_like(there, dtype=torch.long)
        at = torch.arange(shape[3], device=keys.device).expand(shape)
        for further in range(len(falls)):
            there = medoids(distances, there, falls[(level + further).clamp(max=len(falls) - 1)])
            survived.scatter_add_(-1, at, there.long())
            # those that are gone need no distances any more
            order = there.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
            order = order[..., : int(there.sum(-1).max())]
            at, there = at.gather(-1, order), there.gather(-1, order)
            distances = distances.take_along_dim(order[..., None], -2).take_along_dim(order[..., None, :], -1)
        none = survived.new_zeros((*shape[:2], 1))
        return torch.cat([survived.flatten(2), none], 2).gather(2, index)
