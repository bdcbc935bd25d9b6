"""`snapkv`: what the last queries look at.

1. The queries of the last 64 tokens of a row are carried, for every managed layer, as attention asks with them.
2. Their weights over the slots now held, under the layer's own rule (scaling, soft cap, sinks), mean over the queries.
3. Average over 5 neighbouring slots (beyond the ends counts as 0, as in the authors' code), mean over the group.
4. The window's own tokens are not judged yet, so they stay. A budget below the window keeps the oldest of these: give
   a window that fits.

Source: SnapKV, arXiv 2404.14469.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import weights_without
from kvlens.scorers.asking import Asking, Pool, QueryWindow, packed, unjudged
from kvlens.scorers.interface import QUERIES, Facts, Plain, Seen, Views


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
        return Asking.of(facts)

    def observe(self, state: Asking, seen: Seen) -> Asking:
        """1. for the new tokens."""
        return state.extended(seen, self.window)

    def score(self, state: Asking, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """2. to 4."""
        shown = state.shown(views)
        if shown is None or views.rule is None:
            return unjudged(views)
        weights = weights_without(shown.queries, wide(views.keys), views.rule, shown.hidden)[0]
        if shown.hidden.shape[-1] == weights.shape[-1]:  # else every query sees a slot
            weights.masked_fill_(shown.hidden, 0.0)
        batch, n_kv_heads, n_slots = shown.judged.shape
        mean = weights.sum(2).reshape(batch, n_kv_heads, -1, n_slots).mean(2) / shown.n_asking
        near, place = packed(mean, shown.judged)
        pooled = avg_pool1d(near, self.pool, stride=1, padding=self.pool // 2).gather(-1, place)
        return pooled.masked_fill(~shown.judged, torch.nan)
