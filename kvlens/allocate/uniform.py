"""`uniform`: the budget everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kvlens.allocate.interface import Cells, Plain


@dataclass(frozen=True)
class Uniform(Plain):
    """J tokens in every cell; the only one for sets that span several layers."""

    per_layer = False

    def budgets(self, cells: Cells) -> list[Int[Tensor, "batch 1"]]:
        """J for each set."""
        return [cells.mean[:, None]] * len(cells.positions)
