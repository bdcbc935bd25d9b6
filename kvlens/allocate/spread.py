"""How do wished-for numbers become whole ones that fit between bounds and have an exact sum?

1. Every cell asks for `wanted` + t, rounded down and held between `least` and `most`. The sum grows with t, so the
   largest whole t whose sum does not exceed the total is found by halving.
2. The few tokens still missing go, one each, to cells that could grow by one: those with the largest fraction first,
   equal ones in their order.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def spread(
    wanted: Float[Tensor, "batch cell"],
    least: Int[Tensor, "batch cell"],
    most: Int[Tensor, "batch cell"],
    total: Int[Tensor, " batch"],
) -> Int[Tensor, "batch cell"]:
    """Whole numbers near the wanted ones, least <= each <= most, whose sum is `total` in every row.

    The total lies between the sums of `least` and of `most`.
    """
    # 1.
    base = wanted.floor().long()
    reach = int(torch.maximum(base.abs().max(), most.max())) + 1
    low = torch.full_like(total, -reach)  # here every cell has its least, at `high` its most
    high = torch.full_like(total, 2 * reach)
    while bool((high - low > 1).any()):
        middle = (low + high).div(2, rounding_mode="floor")
        fits = (base + middle[:, None]).clamp(least, most).sum(-1) <= total
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    found = (base + low[:, None]).clamp(least, most)
    # 2.
    grows = (base + low[:, None] + 1).clamp(least, most) > found
    order = (wanted - base).masked_fill(~grows, -1.0).sort(dim=-1, descending=True, stable=True).indices
    more = torch.arange(found.shape[1], device=found.device) < (total - found.sum(-1))[:, None]
    return found + torch.zeros_like(found).scatter_(1, order, more.long())
