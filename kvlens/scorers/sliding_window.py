"""`sliding_window`: the most recent tokens. With `protect.sinks` 4 this is StreamingLLM, with 0 the plain window.

Source: StreamingLLM, arXiv 2309.17453.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvlens.scorers.interface import Plain, Views


@dataclass(frozen=True)
class SlidingWindow(Plain):
    """A token's position."""

    def score(self, state: None, views: Views) -> Float[Tensor, "batch heads kept"]:
        """The position: float64, since float32 ties from 2^24 on."""
        return views.positions.double()
