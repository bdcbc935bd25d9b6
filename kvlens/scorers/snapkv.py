"""`snapkv`: what the last queries look at.

1. The queries of the last 64 tokens of a row are carried, for every managed layer, as attention asks with them.
2. Their weights over the slots now held, under the layer's own rule (scaling, soft cap, sinks), mean over the queries.
3. Average over 5 neighbouring slots (beyond the ends counts as 0, as in the authors' code), mean over the group.
4. The window's own tokens are not judged yet, so they stay. A budget below the window keeps the oldest of these: give
   a window that fits.

Source: SnapKV, arXiv 2404.14469.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import unseen, weights_without
from kvlens.scorers.frozen import EMPTY
from kvlens.scorers.interface import QUERIES, Facts, Plain, Seen, Views


def _odd(width: int) -> int:
    if width % 2 == 0:
        raise ValueError("a pool has a middle, so its width is odd")
    return width


QueryWindow = Annotated[int, Field(ge=1, le=4096)]
Pool = Annotated[int, Field(ge=1, le=4095), AfterValidator(_odd)]


@dataclass(frozen=True)
class Asking:
    """The last queries in the model's dtype, and their positions (-1: none); None before the first."""

    layers: tuple[int, ...]
    group: int  # query heads that share a KV head
    queries: Float[Tensor, "batch layer head last d_head"] | None = None
    positions: Int[Tensor, "batch last"] | None = None


@dataclass(frozen=True)
class SnapKV(Plain):
    """The pooled weights of the last queries."""

    window: QueryWindow = 64
    pool: Pool = 5

    needs = frozenset({QUERIES})
    per_layer = True

    @property
    def n_queries(self) -> int:  # type: ignore[override]
        """As many as the window holds."""
        return self.window

    def init(self, facts: Facts) -> Asking:
        """No query."""
        return Asking(facts.layers, facts.n_heads // facts.n_kv_heads)

    def observe(self, state: Asking, seen: Seen) -> Asking:
        """1. for the new tokens."""
        positions = seen.positions[:, -self.window :].to(torch.int32)
        queries = torch.stack([seen.queries[layer].to(positions.device) for layer in state.layers], 1)
        if state.queries is not None and state.positions is not None:
            positions = torch.cat([state.positions, positions], -1)
            queries = torch.cat([state.queries, queries], -2)
        if positions.numel() > 1 and bool((positions == EMPTY).any()):  # padding asks nothing: real queries move right
            order = (positions != EMPTY).to(torch.int8).sort(dim=-1, stable=True).indices
            positions = positions.gather(-1, order)
            queries = queries.gather(-2, order[:, None, None, :, None].expand(queries.shape))
        # views would keep the longer storage alive
        queries, positions = queries[..., -self.window :, :].clone(), positions[:, -self.window :].clone()
        return replace(state, queries=queries, positions=positions)

    def score(self, state: Asking, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """2. to 4."""
        if state.queries is None or state.positions is None or views.rule is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        device, n_kv_heads, group = views.keys.device, views.keys.shape[1], state.group
        queries = state.queries[views.rows, state.layers.index(views.layer)].to(device)
        asking, positions = state.positions[views.rows].to(device), views.positions.to(device)
        if views.kv_heads.start is not None:  # one KV head is shown: the queries of its group
            queries = queries[:, views.kv_heads.start * group :][:, : n_kv_heads * group]
        hidden = unseen(positions, asking)
        if hidden.shape[1] > 1:
            hidden = hidden.repeat_interleave(group, 1)
        weights = weights_without(wide(queries), wide(views.keys), views.rule, hidden)[0].masked_fill_(hidden, 0.0)
        n_asking = (asking != EMPTY).sum(-1).clamp(min=1)[:, None, None]
        mean = weights.sum(2).reshape(len(asking), n_kv_heads, group, -1).mean(2) / n_asking
        since = asking.masked_fill(asking == EMPTY, torch.iinfo(asking.dtype).max).amin(-1)[:, None, None]
        judged = ((positions != EMPTY) & (positions < since)).expand(mean.shape)
        return _pooled(mean, judged, self.pool).masked_fill(~judged, torch.nan)


def _pooled(values: Float[Tensor, "batch kv_head kept"], real: Tensor, width: int) -> Tensor:
    """3. over the slots that count, as if they stood next to one another."""
    place = (real.cumsum(-1) - 1).clamp(min=0)
    packed = torch.zeros_like(values).scatter_add_(-1, place, values.masked_fill(~real, 0.0))
    return avg_pool1d(packed, width, stride=1, padding=width // 2).gather(-1, place)
