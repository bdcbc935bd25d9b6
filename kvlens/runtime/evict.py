"""Which slots stay? Scores, positions and a budget in; slots out, and nothing else decides.

1. A slot is empty (padding or filling), ordinary, or protected: among the first `sinks` tokens of its row, the last
   `recent` ones, or the prompt. Protection is this class, never a score, so no tie and no infinity can undo it.
2. Slots are ranked by class, then score (NaN, "not judged yet", before every score), then position, lowest first
   (allocate/order.py).
3. The first `budget` of a row's (or head's) slots stay; empty ones never count.
4. They are put in the order of their positions. A row that keeps fewer than another is filled up on the left with
   empty slots.
5. With pages, a page (positions // page_size) is worth its best ordinary slot, protected if any of its slots is, and
   stays or leaves as a whole: as many pages as fit, in the order of 2, the first that does not fit ends it. Protected
   pages must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.allocate.interface import check_protected
from kvlens.allocate.order import JUDGED, SAFE, best_first, kinds
from kvlens.policy import Protect
from kvlens.scorers.interface import EMPTY


@dataclass(frozen=True)
class Choice:
    """The slots that stay, by index, with their positions (-1: filling); which left; how many scores tied."""

    index: Int[Tensor, "batch heads kept"]
    positions: Int[Tensor, "batch heads kept"]
    leaves: Bool[Tensor, "batch heads slots"]
    n_tied: Int[Tensor, ""]
    n_scored: Int[Tensor, ""]


def protected(
    protect: Protect,
    positions: Int[Tensor, "batch heads slots"],
    n_own: Int[Tensor, " batch"],
    n_prompt: Int[Tensor, " batch"],
) -> Bool[Tensor, "batch heads slots"]:
    """Which slots may not leave."""
    kept = (positions < protect.sinks) | (positions >= n_own[:, None, None] - protect.recent)
    if protect.prompt:
        kept |= positions < n_prompt[:, None, None]
    return kept & (positions != EMPTY)


def choose(
    scores: Float[Tensor, "batch heads slots"],
    positions: Int[Tensor, "batch heads slots"],
    budget: Int[Tensor, "#batch #heads"],
    safe: Bool[Tensor, "batch heads slots"],
    *,
    page_size: int | None = None,
) -> Choice:
    """The slots that stay under this budget.

    Raises: InputError where more tokens are protected than the budget holds, those on their pages counted.
    """
    # 1.
    check_protected(safe.sum(-1), budget)
    real = positions != EMPTY
    judged = scores.masked_fill(scores.isnan(), torch.inf)
    kind = kinds(scores, real, safe)
    if page_size is None:
        # 2.
        order = best_first(judged, kind)
        # 3.
        first = torch.arange(order.shape[-1], device=order.device) < budget[..., None]
        stays = torch.zeros_like(real).scatter_(-1, order, first.expand_as(real)) & real
    else:
        stays = _pages(judged, positions, kind, budget, page_size)
    # 4.
    width = int(stays.sum(-1).max())
    index = stays.to(torch.int8).sort(dim=-1, stable=True).indices[..., stays.shape[-1] - width :]
    kept = positions.gather(-1, index).masked_fill(~stays.gather(-1, index), EMPTY)
    return Choice(index, kept, real & ~stays, *_ties(judged, kind == JUDGED))


def _ties(judged: Tensor, ordinary: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the slots that a score decides on share it with another one of their row, and of how many."""
    ranked = judged.masked_fill(~ordinary, torch.nan).sort(-1).values  # NaN is unequal to itself
    same = ranked[..., 1:] == ranked[..., :-1]
    none = same.new_zeros((*same.shape[:-1], 1))
    return (torch.cat([same, none], -1) | torch.cat([none, same], -1)).sum(), ordinary.sum()


def _pages(
    judged: Float[Tensor, "batch heads slots"],
    positions: Int[Tensor, "batch heads slots"],
    kind: Int[Tensor, "batch heads slots"],
    budget: Int[Tensor, "#batch #heads"],
    page_size: int,
) -> Bool[Tensor, "batch heads slots"]:
    """5. Which slots stay when pages leave as a whole."""
    n_pages = int(positions.max()) // page_size + 1
    page = positions.clamp(min=0).long() // page_size
    real = positions != EMPTY
    shape = (*positions.shape[:2], n_pages)
    sizes = real.long().new_zeros(shape).scatter_add_(-1, page, real.long())
    best = judged.new_full(shape, -torch.inf)
    best.scatter_reduce_(-1, page, judged.masked_fill(~real, -torch.inf), "amax")
    kind = kind.new_zeros(shape).scatter_reduce_(-1, page, kind, "amax")
    order = best_first(best, kind)
    check_protected((sizes * (kind == SAFE)).sum(-1), budget)
    fits = sizes.gather(-1, order).cumsum(-1) <= budget[..., None]
    stays = torch.zeros(shape, dtype=torch.bool, device=positions.device).scatter_(-1, order, fits)
    return stays.gather(-1, page) & real
