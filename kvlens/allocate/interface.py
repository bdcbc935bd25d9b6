"""What is an allocator? A frozen value that says how many tokens each (layer, KV head) cell keeps.

1. It is asked at every eviction. `Cells` shows it what every cell holds, what of that is protected, and the mean budget
   J of each row; one that `reads_scores` also what every token is worth.
2. It answers with whole numbers, [batch, heads] for each set of tokens kept together. Each is at least the cell's
   protected tokens and at most what it holds; a row's sum is J times its cells, or all that the row holds if that is
   less: what a short cell cannot take goes on to the others.
3. `recent` last tokens of a row stay in every cell whatever the scores say; they count inside the budget.

`uniform` and `table` name their numbers without regard to what is held, so a cell may stay below its own.
Which tokens a cell keeps is not decided here but by their ranks (order.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.errors import InputError
from kvlens.scorers.interface import EMPTY


def check_protected(least: Int[Tensor, "*_"], budget: Int[Tensor, "*_"]) -> None:
    """Nothing; raises InputError where more tokens are protected than the budget holds."""
    if bool((least > budget).any()):
        raise InputError(
            f"{int(least.max())} tokens are protected, more than the budget of {int(budget.min())} tokens holds",
            "raise the budget, or protect less: sinks, prompt and recent tokens count inside it",
        )


@dataclass(frozen=True)
class Cells:
    """The slots of every cell, one tensor a set: heads are all of a layer's, or 1 where they keep the same tokens.

    `mean` is J. `scores` are empty for an allocator that does not read them; NaN there means "not judged yet".
    """

    layers: tuple[int, ...]
    mean: Int[Tensor, " batch"]
    positions: Sequence[Int[Tensor, "batch heads _"]]
    safe: Sequence[Bool[Tensor, "batch heads _"]]
    scores: Sequence[Float[Tensor, "batch heads _"]] = ()

    @cached_property
    def held(self) -> Int[Tensor, "batch cell"]:
        """How many tokens each cell holds, layer by layer."""
        return torch.cat([(positions != EMPTY).sum(-1) for positions in self.positions], 1)

    @cached_property
    def least(self) -> Int[Tensor, "batch cell"]:
        """How many of them are protected.

        Raises: InputError where that is more than J.
        """
        least = torch.cat([safe.sum(-1) for safe in self.safe], 1)
        check_protected(least, self.mean[:, None])
        return least

    @cached_property
    def total(self) -> Int[Tensor, " batch"]:
        """How many tokens each row keeps in all its cells."""
        return torch.minimum(self.mean * self.held.shape[1], self.held.sum(-1))

    def by_set(self, budgets: Int[Tensor, "batch cell"]) -> list[Int[Tensor, "batch heads"]]:
        """The same numbers, one tensor a set."""
        return list(torch.split(budgets, [positions.shape[1] for positions in self.positions], 1))


@runtime_checkable
class Allocator(Protocol):
    """A method; its dataclass fields are its parameters."""

    @property
    def reads_scores(self) -> bool:
        """Whether its budgets follow the scores; heads then choose apart (`reduce: head`)."""

    @property
    def per_layer(self) -> bool:
        """Whether budgets differ from layer to layer, so that no set spans several (`reduce: all`)."""

    @property
    def recent(self) -> int:
        """How many last tokens of a row stay in every cell."""

    def budgets(self, cells: Cells) -> list[Int[Tensor, "#batch #heads"]]:
        """How many tokens each cell of every set keeps."""


class Plain:
    """What most allocators say: no scores are read, layers differ, nothing stays by itself."""

    reads_scores = False
    per_layer = True
    recent = 0
