"""`contour_mass`: tokens where the most mass would be dropped.

1. A cell's dropped mass is 1 - the share of its score mass in its J best slots; slots not judged yet have none.
2. Budgets are proportional to it, but never below what is protected (the last `floor` tokens of a row among it) nor
   above what is held: max(least, min(held, scale x dropped mass)), with the scale at which the total is right.
3. In whole tokens with the exact total (spread.py). Where no cell drops anything, all get the same.

Source: forced weights, arXiv 2608.25230: the claim that the map of dropped mass should drive allocation, which its own
appendix does not find to lower the error. Needs scores that are a mass: not negative, finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.allocate.contour import Floor
from kvlens.allocate.interface import Cells, Plain
from kvlens.allocate.spread import spread
from kvlens.errors import InputError
from kvlens.scorers.interface import EMPTY

HALVINGS = 100  # more than a float64 has bits


@dataclass(frozen=True)
class ContourMass(Plain):
    """Budgets follow the dropped mass; the last `floor` tokens stay in every cell."""

    floor: Floor = 32

    reads_scores = True

    @property
    def recent(self) -> int:  # type: ignore[override]
        """As in `contour`."""
        return self.floor

    def budgets(self, cells: Cells) -> list[Int[Tensor, "batch heads"]]:
        """1. to 3. Raises: InputError for scores that are no mass."""
        # 1.
        weights = torch.cat(
            [
                dropped_mass(scores, positions != EMPTY, cells.mean)
                for scores, positions in zip(cells.scores, cells.positions, strict=True)
            ],
            1,
        )
        # 2.
        least, most, total = cells.least, cells.held, cells.total
        top = weights.max(-1).values
        low = torch.zeros_like(top)
        smallest = weights.masked_fill(weights == 0, torch.inf).amin(-1)
        high = torch.where(top > 0, most.max() / smallest, low)  # there every cell with a weight has its most
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = _clamped(middle, weights, least, most).sum(-1) <= total
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
        # 3.
        return cells.by_set(spread(_clamped(low, weights, least, most), least, most, total))


def _clamped(scale: Tensor, weights: Tensor, least: Tensor, most: Tensor) -> Float[Tensor, "batch cell"]:
    return (scale[:, None] * weights).clamp(least.double(), most.double())


def dropped_mass(
    scores: Float[Tensor, "batch heads slots"], real: Tensor, mean: Int[Tensor, " batch"]
) -> Float[Tensor, "batch heads"]:
    """1. in float64, 0 where a cell has no mass at all.

    Raises: InputError for negative or infinite scores.
    """
    mass = scores.double().masked_fill(~real | scores.isnan(), 0.0)
    wrong = mass[(mass < 0) | mass.isinf()]
    if wrong.numel():
        raise InputError(
            f"contour_mass reads scores as a mass, but this scorer says {float(wrong[0]):g}",
            "use a scorer of attention weights, such as h2o or snapkv, or allocate contour",
        )
    total = mass.sum(-1)
    best = mass.sort(dim=-1, descending=True).values
    kept = torch.arange(mass.shape[-1], device=mass.device) < mean[:, None, None]
    rest = best.masked_fill(kept, 0.0).sum(-1)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
