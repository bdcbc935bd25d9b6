"""`ada`: in every layer, the best scores of all its heads together.

1. Every layer gets J times its heads; a layer that holds fewer keeps all, and the others share what it leaves.
2. A head's own best floor(alpha J) slots stay (its protected ones come first and count in).
3. The rest of the layer's tokens are the best of its other slots, heads compared by score as it is.

Source: AdaKV, arXiv 2407.11550, floor alpha .2. The floor is one of ranks, as in kvpress; the authors' code instead
counts the joint best (1 - alpha) J slots of a head and adds alpha J, so that a head with many of the joint best gets
more there. Reads the scores of all heads, so it decides at eviction, not before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from kvlens.allocate.interface import Cells, Plain
from kvlens.allocate.order import SAFE, best_first, joint_counts, kinds
from kvlens.allocate.spread import spread
from kvlens.scorers.interface import EMPTY

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Ada(Plain):
    """Heads of a layer compete; `alpha` of the mean budget is each head's own."""

    alpha: Share = 0.2

    reads_scores = True

    def budgets(self, cells: Cells) -> list[Int[Tensor, "batch heads"]]:
        """How many of the layer's best are each head's."""
        # 1.
        held, least = (
            torch.stack([part.sum(-1) for part in cells.by_set(counts)], 1) for counts in (cells.held, cells.least)
        )
        heads = torch.tensor([positions.shape[1] for positions in cells.positions], device=held.device)
        totals = spread((cells.mean[:, None] * heads).double(), least, held, cells.total)
        # 2. the share read as the decimal that was written
        floors = [math.floor(Fraction(repr(float(self.alpha))) * mean) for mean in cells.mean.tolist()]
        floor = torch.tensor(floors, device=held.device)[:, None, None]
        found = []
        for number, (scores, positions, safe) in enumerate(zip(cells.scores, cells.positions, cells.safe, strict=True)):
            kind = kinds(scores, positions != EMPTY, safe)
            order = best_first(scores, kind)
            first = torch.arange(order.shape[-1], device=order.device) < floor
            own = torch.zeros_like(safe).scatter_(-1, order, first.expand(order.shape)) & (positions != EMPTY)
            # 3.
            kind = kind.masked_fill(own, SAFE)
            found.append(joint_counts([scores], [kind], [positions], totals[:, number]))
        return found
