"""Which few of a set of points stand for it? k-medoids of many sets at once, as masks over a table of distances.

1. Start: k points evenly spaced among those that are there, in their order.
2. Every point goes to its nearest medoid (ties: the first; a medoid to itself), and the point of each group whose
   distances to the group sum to least (ties: the first) is its next medoid.
3. Until nothing moves, at most 8 times. So the same points always give the same medoids, exactly k of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROUNDS = 8


def medoids(
    distances: Float[Tensor, "*set point point"], there: Bool[Tensor, "*set point"], k: Int[Tensor, "*set"]
) -> Bool[Tensor, "*set point"]:
    """The medoids of the points that are there: k of them, or all where there are no more than k."""
    count = there.sum(-1, keepdim=True)
    few = count <= k[..., None]
    # 1.
    share = there.cumsum(-1) * k[..., None] // count.clamp(min=1)
    before = (there.cumsum(-1) - 1) * k[..., None] // count.clamp(min=1)
    chosen = there & (few | (share > before))
    own = torch.arange(there.shape[-1], device=there.device).expand(there.shape)
    together = there[..., None] & there[..., None, :]
    for _ in range(ROUNDS):
        # 2.
        nearest = distances.masked_fill(~chosen[..., None, :], torch.inf).argmin(-1)
        nearest = torch.where(chosen, own, nearest)
        same = (nearest[..., None] == nearest[..., None, :]) & together
        cost = torch.where(same, distances, 0.0).sum(-1).masked_fill(~there, torch.inf)
        least = torch.full_like(cost, torch.inf).scatter_reduce_(-1, nearest, cost, "amin")
        best = there & (cost == least.gather(-1, nearest))
        first = torch.full_like(own, there.shape[-1]).scatter_reduce_(
            -1, nearest, own.masked_fill(~best, there.shape[-1]), "amin"
        )
        moved = there & (own == first.gather(-1, nearest))
        # 3.
        if torch.equal(moved, chosen):
            break
        chosen = moved
    return chosen
