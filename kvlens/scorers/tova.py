"""`tova`: what the last query looks at.

1. The query of the last token of a row is carried, for every managed layer, as attention asks with it.
2. Its weights over the slots now held, under the layer's own rule, mean over all heads: the heads of a layer keep the
   same tokens. Where they already hold different ones (budgets of their own), mean over the heads of a group.
3. The token that asks is not judged yet, so it stays.

Defaults: none. Query-aware: the score is that of whoever asked last. Decode and prefill; needs queries (own rows).
Cost: one row of weights a layer and refresh; carried, one query a layer.

Source: Oren et al., "Transformers are Multi-State RNNs" (TOVA), arXiv 2401.06104.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import weights_without
from kvlens.scorers.asking import Asking, unjudged
from kvlens.scorers.interface import QUERIES, Facts, Plain, Seen, Views


@dataclass(frozen=True)
class TOVA(Plain):
    """The weights of the last query."""

    needs = frozenset({QUERIES})
    n_queries = 1
    per_layer = True

    def init(self, facts: Facts) -> Asking:
        """No query."""
        return Asking.of(facts)

    def observe(self, state: Asking, seen: Seen) -> Asking:
        """1. for the new tokens."""
        return state.extended(seen, 1)

    def score(self, state: Asking, views: Views) -> Float[Tensor, "batch heads kept"]:
        """2. and 3."""
        shown = state.shown(views)
        if shown is None or views.rule is None:
            return unjudged(views)
        weights = weights_without(shown.queries, wide(views.keys), views.rule, shown.hidden)[0][:, :, 0]
        alike = bool((views.positions == views.positions[:, :1]).all())
        together = alike and views.kv_heads.start is None
        n_sets = 1 if together else views.keys.shape[1]
        mean: Tensor = weights.reshape(len(weights), n_sets, -1, weights.shape[-1]).mean(2)
        judged = shown.judged[:, : views.positions.shape[1]]
        return mean.expand(-1, judged.shape[1], -1).masked_fill(~judged, torch.nan)
