"""Which rows of a cache stay at a refresh? Of J + frozen held in all, every row that is protected and the best others.

1. Protected: the `frozen` first rows, the `recent` last ones (counted inside J), and the last rows as far as none of
   them has a score, such as the last min_gap + 1, of which the future says nothing yet. A last unit of text may be
   longer than what is held: it is not protected.
2. Other rows without a score (nothing within the window of any layer, or that unit) before all with one, the last
   first.
3. The rest by score, the highest stays; among equals the row that stands first.
4. Padding goes before all else. Where a sequence of the batch has fewer rows than are held, padding fills it up.
5. A cache of no more than J + frozen rows is kept whole.

Source: counter-causal surprise (the cycle); protection by index sets and the tie rule are kvlens' own.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables.surprise import Scores, State


def refresh(state: State, scores: Scores, budget: int, frozen: int = 0, recent: int = 0) -> Int[Tensor, "batch kept"]:
    """The rows that stay, ascending: `budget + frozen` of them, or all where there are no more.

    Raises: InputError where more rows are protected than may stay.
    """
    n, n_held = state.ids.shape[1], budget + frozen
    if n <= n_held:
        return torch.arange(n, device=state.ids.device).expand(state.ids.shape)
    padding = _padding(state)
    unknown = ~scores.known & ~padding
    protected = protected_rows(state, frozen, recent)
    if state.units is None:
        protected = protected | unknown.flip(1).cumprod(1).flip(1).bool()
    n_protected = int(protected.sum(1).max())
    if n_protected > n_held:
        raise InputError(
            f"a budget of {budget} and {frozen} frozen rows cannot hold {n_protected} protected ones",
            "raise the budget, or lower recent or min_gap",
        )
    row = torch.arange(n, device=state.ids.device).expand(state.ids.shape)
    values = torch.where(unknown, row.to(scores.values.dtype), scores.values)
    # 2. to 4. by two stable sorts, the weightier last: score, then protected, unknown, other rows, padding
    order = values.sort(stable=True, dim=1, descending=True).indices
    rank = 2 * protected.int() + (unknown & ~protected).int() - padding.int()
    order = order.gather(1, rank.gather(1, order).sort(stable=True, dim=1, descending=True).indices)
    kept: Tensor = order[:, :n_held].sort(1).values
    return kept


def protected_rows(state: State, frozen: int, recent: int) -> Bool[Tensor, "batch pos"]:
    """The first `frozen` and the last `recent` rows of each sequence, padding not counted."""
    n = state.ids.shape[1]
    row = torch.arange(n, device=state.ids.device).expand(state.ids.shape)
    first = row.new_zeros(row.shape[0], 1) if state.n_pad is None else state.n_pad[:, None]
    return (row >= first) & ((row < first + frozen) | (row >= n - recent))


def _padding(state: State) -> Bool[Tensor, "batch pos"]:
    row = torch.arange(state.ids.shape[1], device=state.ids.device).expand(state.ids.shape)
    return torch.zeros_like(row, dtype=torch.bool) if state.n_pad is None else row < state.n_pad[:, None]
