"""`raas`: the tokens that were looked at last; the one that nobody has looked at for longest leaves.

1. A slot's timestamp is the position of its own token at first.
2. The last query of every forward pass, one a decoded token, renews the timestamps of the top half of the slots that it
   sees, by its weights, mean over the heads that share a KV head: they become its own position.
3. The score is the timestamp. Many slots share the newest one; ties go by position, as everywhere.

Defaults: `share` .5 (the top half). The paper keeps the prompt (`protect.prompt`); while a prompt comes, only the last
query of each of its passes renews, so its timestamps hang on how it was cut. Query-aware: they are renewed by those who
ask. For decoding; needs attention received (own rows). Cost: one row of weights a layer and pass, and a sort of it;
carried, 4 bytes a slot and KV head.

Source: RaaS, arXiv 2502.11147.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from kvlens.scorers.asking import unjudged
from kvlens.scorers.interface import EMPTY, RECEIVED, Facts, Plain, Seen, Views
from kvlens.scorers.per_slot import PerSlot

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class RaaS(Plain):
    """When a token was last in the top half."""

    share: Share = 0.5

    needs = frozenset({RECEIVED})
    n_received = 1
    per_layer = True

    def init(self, facts: Facts) -> PerSlot:
        """No timestamp."""
        return PerSlot.of(facts)

    def observe(self, state: PerSlot, seen: Seen) -> PerSlot:
        """1. and 2. for the new tokens."""
        found = []
        for layer, stamps in zip(state.layers, state.numbers, strict=True):
            weights = seen.received[layer].to(seen.positions.device)
            new = seen.positions.float().masked_fill(seen.positions == EMPTY, torch.nan)[:, None]
            new = new.expand(-1, weights.shape[1], -1)
            stamps = new.clone() if stamps is None else torch.cat([stamps, new], -1)
            found.append(self._renewed(stamps, weights, seen.positions[:, -1]))
        return replace(state, numbers=tuple(found))

    def _renewed(
        self,
        stamps: Float[Tensor, "batch kv_head slots"],
        weights: Float[Tensor, "batch kv_head slots"],
        asking: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch kv_head slots"]:
        """2. for the queries at these positions, of which padding renews nothing."""
        real = ~stamps.isnan()
        order = weights.nan_to_num(-1.0).sort(dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).to(order).expand_as(order))
        top = (rank < self.share * real.sum(-1, keepdim=True)) & real & (asking != EMPTY)[:, None, None]
        return torch.where(top, asking[:, None, None].float(), stamps)

    def score(self, state: PerSlot, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """3."""
        stamps = state.look_up(views)
        return unjudged(views) if stamps is None else stamps
