"""`hidden_change`, `epikv`: tokens where the residual stream moves much in one layer and little in a deeper one.

1. the change of the residual stream from one token to the next after block a and after block b;
2. `hidden_change`: its rolling mean over the trailing 64 tokens, that of a minus that of b;
   `epikv`: its causal z-score over the same window, that of a minus that of b;
3. frozen when the token is made. With `score_prompt` off, statistics start at the first decoded token, whose change is
   taken against the last prompt token; the prompt has no numbers then and must be protected.

Blocks are given as fractions of depth; the defaults are the paper's 10 and 21 of 32, and on another model the block
nearest the same depth (round half up). Padding has no change, nor has the token after it.

Source: EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from kvlens.observables import hidden_change, rolling
from kvlens.scorers.frozen import Frozen
from kvlens.scorers.interface import EMPTY, HIDDEN, Depth, Facts, Kept, Plain, Seen, Views, Window

DEPTH_A, DEPTH_B = 10 / 32, 21 / 32


@dataclass(frozen=True)
class Moved:
    """The last hidden state of the blocks, whether it was a token's, two windows, and every held token's number.

    The first `n_in_a` blocks are those whose change counts for a token.
    """

    blocks: tuple[int, ...]
    last: hidden_change.Last
    window: rolling.Trailing
    n_in_a: int = 1
    last_position: Int[Tensor, " batch"] | None = None
    frozen: Frozen = field(default_factory=Frozen)

    def select(self, kept: Kept) -> Moved:
        """After an eviction."""
        return replace(self, frozen=self.frozen.select(kept))


class MovedBlocks(Plain, ABC):
    """What methods on the change of the residual stream share: the change is taken, a number made of it and frozen."""

    score_prompt: bool

    needs = frozenset({HIDDEN})

    def observe(self, state: Moved, seen: Seen) -> Moved:
        """1. to 3. for the new tokens."""
        device = seen.positions.device
        hidden = torch.stack([seen.hidden[block].to(device) for block in state.blocks], 1)  # [batch, block, new, d]
        last, changes = hidden_change.step(state.last, hidden)
        before = seen.positions.roll(1, -1)
        before[:, 0] = EMPTY if state.last_position is None else state.last_position
        changes = changes.masked_fill(((seen.positions == EMPTY) | (before == EMPTY))[:, None], torch.nan)
        state = replace(state, last=last, last_position=seen.positions[:, -1].clone())
        if seen.in_prompt and not self.score_prompt:
            return state
        window, numbers = self.number(state, changes)
        return replace(state, window=window, frozen=state.frozen.append(seen.positions, numbers))

    @abstractmethod
    def number(
        self, state: Moved, changes: Float64[Tensor, "batch block new"]
    ) -> tuple[rolling.Trailing, Float64[Tensor, "batch new"]]:
        """2.: the windows after these changes, and what each new token is worth."""

    def score(self, state: Moved, views: Views) -> Float[Tensor, "batch heads kept"]:
        """The frozen number of every slot."""
        return state.frozen.look_up(views)


@dataclass(frozen=True)
class HiddenChange(MovedBlocks):
    """The rolling mean of the change in block a minus that in block b."""

    depth_a: Depth = DEPTH_A
    depth_b: Depth = DEPTH_B
    window: Window = rolling.WINDOW
    score_prompt: bool = True

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """Blocks a and b of this model."""
        a, b = (min(math.floor(d * facts.n_layers + 0.5), facts.n_layers - 1) for d in (self.depth_a, self.depth_b))
        return a, b

    def init(self, facts: Facts) -> Moved:
        """Nothing seen."""
        return Moved(self.hidden_layers(facts), hidden_change.init(), rolling.init(self.window))

    def number(
        self, state: Moved, changes: Float64[Tensor, "batch 2 new"]
    ) -> tuple[rolling.Trailing, Float64[Tensor, "batch new"]]:
        """2. as a mean."""
        window, means = rolling.mean(state.window, changes)
        return window, means[:, 0] - means[:, 1]


@dataclass(frozen=True)
class EpiKV(HiddenChange):
    """The causal z-score of the change in block a minus that in block b."""

    exclude_current: bool = False

    def number(
        self, state: Moved, changes: Float64[Tensor, "batch 2 new"]
    ) -> tuple[rolling.Trailing, Float64[Tensor, "batch new"]]:
        """2. as a z-score."""
        window, z = rolling.zscore(state.window, changes, exclude_current=self.exclude_current)
        return window, z[:, 0] - z[:, 1]
