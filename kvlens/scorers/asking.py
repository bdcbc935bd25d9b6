"""What did the last tokens ask? Their queries, carried beside the cache, for scorers that recompute a few rows.

1. `extended` keeps the queries of the last tokens of a row, for every managed layer, as attention asks with them.
2. `shown` lays them over the slots of a layer: which slot each query does not see, and which slots are older than all
   of the queries, so that they can be judged by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import AfterValidator, Field
from torch import Tensor

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import unseen
from kvlens.scorers.interface import EMPTY, Facts, Seen, Views


def _odd(width: int) -> int:
    if width % 2 == 0:
        raise ValueError("a pool has a middle, so its width is odd")
    return width


QueryWindow = Annotated[int, Field(ge=1, le=4096)]
Pool = Annotated[int, Field(ge=1, le=4095), AfterValidator(_odd)]


@dataclass(frozen=True)
class Shown:
    """The carried queries beside the slots of one layer."""

    queries: Float[Tensor, "batch head last d_head"]
    hidden: Bool[Tensor, "#batch #head last unseen"]  # of the last slots; those before are seen by all
    judged: Bool[Tensor, "batch kv_head kept"]
    asks: Bool[Tensor, "batch last"]  # whether there is such a query

    @property
    def n_asking(self) -> Int[Tensor, "batch 1 1"]:
        """How many queries there are, 1 at least."""
        return self.asks.sum(-1).clamp(min=1)[:, None, None]


@dataclass(frozen=True)
class Asking:
    """The last queries in the model's dtype, and their positions (-1: none); None before the first."""

    layers: tuple[int, ...]
    group: int  # query heads that share a KV head
    queries: Float[Tensor, "batch layer head last d_head"] | None = None
    positions: Int[Tensor, "batch last"] | None = None

    @classmethod
    def of(cls, facts: Facts) -> Asking:
        """No query."""
        return cls(facts.layers, facts.n_heads // facts.n_kv_heads)

    def extended(self, seen: Seen, window: int) -> Asking:
        """1. for the new tokens."""
        positions = seen.positions[:, -window:].to(torch.int32)
        queries = torch.stack([seen.queries[layer].to(positions.device) for layer in self.layers], 1)
        if self.queries is not None and self.positions is not None:
            positions = torch.cat([self.positions, positions], -1)
            queries = torch.cat([self.queries, queries], -2)
        if positions.numel() > 1 and bool((positions == EMPTY).any()):  # padding asks nothing: real queries move right
            order = (positions != EMPTY).to(torch.int8).sort(dim=-1, stable=True).indices
            positions = positions.gather(-1, order)
            queries = queries.gather(-2, order[:, None, None, :, None].expand(queries.shape))
        # views would keep the longer storage alive
        queries, positions = queries[..., -window:, :].clone(), positions[:, -window:].clone()
        return replace(self, queries=queries, positions=positions)

    def shown(self, views: Views) -> Shown | None:
        """2., or None before the first token."""
        if self.queries is None or self.positions is None:
            return None
        device, n_kv_heads = views.keys.device, views.keys.shape[1]
        queries = self.queries[views.rows, self.layers.index(views.layer)].to(device)
        asking, positions = self.positions[views.rows].to(device), views.positions.to(device)
        if views.kv_heads.start is not None:  # one KV head is shown: the queries of its group
            queries = queries[:, views.kv_heads.start * self.group :][:, : n_kv_heads * self.group]
        hidden = unseen(positions, asking[:, None])
        if hidden.shape[1] > 1:
            hidden = hidden.repeat_interleave(self.group, 1)
        since = asking.masked_fill(asking == EMPTY, torch.iinfo(asking.dtype).max).amin(-1)[:, None, None]
        judged = ((positions != EMPTY) & (positions < since)).expand(-1, n_kv_heads, -1)
        return Shown(wide(queries), hidden, judged, asking != EMPTY)


def unjudged(views: Views) -> Float[Tensor, "batch heads kept"]:
    """What a scorer says that has seen nothing yet: every slot stays."""
    return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)


def packed(
    values: Float[Tensor, "batch kv_head kept"], real: Bool[Tensor, "batch kv_head kept"]
) -> tuple[Float[Tensor, "batch kv_head kept"], Int[Tensor, "batch kv_head kept"]]:
    """The values of the slots that count, as if they stood next to one another, then 0; and where each one went."""
    place = (real.cumsum(-1) - 1).clamp(min=0)
    return torch.zeros_like(values).scatter_add_(-1, place, values.masked_fill(~real, 0.0)), place
