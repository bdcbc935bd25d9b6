"""In which order would slots stay, and how many of each cell are among the first of many cells?

1. A slot is empty (padding or filling), judged, not judged yet (its score is NaN), or protected.
2. Slots are ranked by class, protected ones first; then by score, highest first; then by position, lowest first; slots
   of several cells at last by layer and head. Sorts are stable, so ties never depend on anything else.
3. Of many cells together the first `total` stay; where the last of them stands is the threshold. Each cell's count is
   its budget, and since a cell's own ranks agree with the joint ones, its best slots are the very ones counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NONE, JUDGED, UNJUDGED, SAFE = range(4)


def kinds(
    scores: Float[Tensor, "batch heads slots"],
    real: Bool[Tensor, "batch heads slots"],
    safe: Bool[Tensor, "batch heads slots"],
) -> Int[Tensor, "batch heads slots"]:
    """1. The class of every slot."""
    kind = torch.where(real, JUDGED, NONE).to(torch.int8)
    return kind.masked_fill_(scores.isnan() & real, UNJUDGED).masked_fill_(safe, SAFE)


def best_first(scores: Float[Tensor, "*batch slots"], kind: Int[Tensor, "*batch slots"]) -> Int[Tensor, "*batch slots"]:
    """2. Slots by rank; of equal ones the first comes first. Scores of unjudged slots do not count."""
    flat = scores.masked_fill(scores.isnan(), torch.inf)  # NaN has no place in an order
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    return order.gather(-1, kind.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)


def joint_counts(
    scores: Sequence[Float[Tensor, "batch heads _"]],
    kind: Sequence[Int[Tensor, "batch heads _"]],
    positions: Sequence[Int[Tensor, "batch heads _"]],
    total: Int[Tensor, " batch"],
) -> Int[Tensor, "batch cell"]:
    """3. How many of each cell's slots are among the first `total` of all.

    Cost: three stable sorts of all slots of a row.
    """
    widths = [part.shape[-1] for part in positions for _ in range(part.shape[1])]
    cell = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths)).to(total.device)
    flat_scores, flat_kind, flat_positions = (
        torch.cat([part.flatten(1) for part in parts], 1) for parts in (scores, kind, positions)
    )
    order = flat_positions.sort(dim=-1, stable=True).indices
    order = order.gather(-1, best_first(flat_scores.gather(-1, order), flat_kind.gather(-1, order)))
    stays = torch.arange(order.shape[1], device=order.device) < total[:, None]
    counts = torch.zeros((len(total), len(widths)), dtype=torch.long, device=order.device)
    return counts.scatter_add_(1, cell[order], stays.long())
