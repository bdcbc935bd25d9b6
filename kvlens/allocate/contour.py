"""`contour`: one threshold over all layers and heads.

1. The last `floor` tokens of a row, and what else is protected, stay in every cell and count inside the budget.
2. Of all other slots of a row's cells the best stay, compared by score as it is over all layers and heads, so many that
   the mean is J exactly. The score of the last one is the threshold; of equal scores the earlier position stays, then
   the earlier layer and head.

Source: ContourKV (forced weights, arXiv 2608.25230), floor 32, with the scores of `kvzip` or `snapkv`. A scorer that
says the same of a token in every layer makes it nearly `uniform`; scores that differ in scale from layer to layer make
it prefer the loud ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from kvlens.allocate.interface import Cells, Plain
from kvlens.allocate.order import joint_counts, kinds
from kvlens.scorers.interface import EMPTY

Floor = Annotated[int, Field(ge=0, le=1_000_000)]


@dataclass(frozen=True)
class Contour(Plain):
    """All cells compete; the last `floor` tokens stay in each."""

    floor: Floor = 32

    reads_scores = True

    @property
    def recent(self) -> int:  # type: ignore[override]
        """1."""
        return self.floor

    def budgets(self, cells: Cells) -> list[Int[Tensor, "batch heads"]]:
        """2. How many slots of each cell lie above the threshold."""
        kind = [
            kinds(scores, positions != EMPTY, safe)
            for scores, positions, safe in zip(cells.scores, cells.positions, cells.safe, strict=True)
        ]
        return cells.by_set(joint_counts(cells.scores, kind, cells.positions, cells.total))
