"""`oracle`: replays what is known from elsewhere, such as labels of the very trace that is decoded. Offline only.

1. `positions` and `scores` list what each token of the text is worth, the same in every row, layer and head.
2. A token that is not listed is not judged: it stays before every token that has a score.

No decoder can know its numbers, so it is no policy to export (`offline`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from kvlens.errors import InputError
from kvlens.scorers.interface import AS_TUPLE, Number, Plain, Views

Positions = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], AS_TUPLE]
Scores = Annotated[tuple[Number, ...], AS_TUPLE]


@dataclass(frozen=True)
class Oracle(Plain):
    """The score that its position was given."""

    positions: Positions = ()
    scores: Scores = ()

    offline = True

    def __post_init__(self) -> None:
        if len(self.positions) != len(self.scores):
            raise InputError(
                f"scorer oracle: {len(self.positions)} positions and {len(self.scores)} scores", "give one score each"
            )
        if not self.positions:
            raise InputError("scorer oracle: it was given no scores", "give positions and what each is worth")
        if any(later <= earlier for earlier, later in zip(self.positions, self.positions[1:], strict=False)):
            raise InputError("scorer oracle: its positions do not rise", "sort them, each once")

    def score(self, state: None, views: Views) -> Float[Tensor, "batch heads kept"]:
        """1. and 2."""
        device = views.positions.device
        listed = torch.tensor(self.positions, dtype=torch.int32, device=device)
        scores = torch.tensor(self.scores, dtype=torch.float64, device=device)
        place = torch.searchsorted(listed, views.positions.contiguous()).clamp(max=len(listed) - 1)
        return scores[place].masked_fill(listed[place] != views.positions, torch.nan)
