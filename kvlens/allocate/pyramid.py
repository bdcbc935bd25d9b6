"""`pyramid`: much in the first layers, little in the last ones, whatever the text is.

1. What is protected stays in every cell; the pyramid shares what is left of the budget, `free` = J - protected.
2. The last layer gets free / beta, the first 2 free - free / beta, those between them what lies on the line: the mean
   is free. beta = 1 is `uniform`. Layers are those that a policy manages, in their order.
3. A layer that holds fewer tokens than that keeps all; what it leaves moves the line up for the others, so the total is
   exact (spread.py). The heads of a layer get the same.

Source: PyramidKV, arXiv 2406.02069, whose window of last tokens is what `protect.recent` is here; beta 20 as in the
authors' code. There the step between layers is rounded down and the total is missed; here it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from kvlens.allocate.interface import Cells, Plain
from kvlens.allocate.spread import spread

Steepness = Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)]


@dataclass(frozen=True)
class Pyramid(Plain):
    """A line over the layers; `beta` is what the mean is to the last layer's share."""

    beta: Steepness = 20.0

    def budgets(self, cells: Cells) -> list[Int[Tensor, "batch heads"]]:
        """The line, in whole tokens."""
        # 1.
        least = cells.least
        free = (cells.mean[:, None] - least).double()
        # 2.
        n_layers = len(cells.positions)
        share = torch.linspace(2 - 1 / self.beta, 1 / self.beta, n_layers, dtype=torch.float64)
        share = share if n_layers > 1 else torch.ones(1, dtype=torch.float64)
        heads = torch.tensor([positions.shape[1] for positions in cells.positions])
        share = share.repeat_interleave(heads).to(free.device)
        # 3.
        return cells.by_set(spread(least + free * share, least, cells.held, cells.total))
