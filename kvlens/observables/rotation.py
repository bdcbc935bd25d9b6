"""How does a layer turn queries and keys by their position, and how is that undone or averaged?

A rotary embedding turns pairs of a vector's dimensions by angles that grow with the position, and may scale them too
(YaRN). What it does is linear in (cos, sin), so that

1. `undo`: turning by (cos, -sin) / (cos^2 + sin^2) gives what there was before, scale included;
2. `mean_over`: turning by the means of cos and sin over some positions is the mean of turning by each;
3. a layer without one (learned positions, NoPE) turns nothing: `angles` is None.

How a family lays out its pairs is its own function's business: `turn` is that function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.observables.arithmetic import wide

# positions [batch, pos] -> (cos, sin), each [batch, pos, turned dimensions] in float32
Angles = Callable[[Int[Tensor, "batch pos"]], tuple[Tensor, Tensor]]
# states [batch, head, pos, d_head], cos, sin -> the states turned
Turn = Callable[[Float[Tensor, "batch head pos d_head"], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer; padding (position -1) is turned like position 0."""

    turn: Turn
    angles: Angles | None = None

    def undo(
        self, states: Float[Tensor, "batch head pos d_head"], positions: Int[Tensor, "batch heads pos"]
    ) -> Float[Tensor, "batch head pos d_head"]:
        """1. in float32 at least: the states before they were turned; heads is 1, or each has its own positions."""
        states = wide(states)
        if self.angles is None:
            return states
        if positions.shape[1] > 1:
            each = positions.flatten(0, 1)[:, None]
            return self.undo(states.flatten(0, 1)[:, None], each).view_as(states)
        cos, sin = self.angles(positions[:, 0].clamp(min=0).to(states.device))
        size = cos.square() + sin.square()
        return self.turn(states, cos / size, -sin / size)

    def mean_over(self, positions: Int[Tensor, "batch pos"], d_head: int) -> Float[Tensor, "batch d_head d_head"]:
        """2. as a matrix M for row vectors: `states @ M` is the mean over the positions of the states turned."""
        one = torch.eye(d_head, device=positions.device).expand(len(positions), 1, -1, -1)
        if self.angles is None:
            return one[:, 0]
        cos, sin = (part.mean(1, keepdim=True).expand(-1, d_head, -1) for part in self.angles(positions))
        return self.turn(one, cos, sin)[:, 0]
