"""`keydiff`: keys that point elsewhere than most are kept.

1. The anchor of a KV head: the mean of the keys of its held slots, each divided by its norm.
2. Minus the cosine of a slot's key with the anchor.

Defaults: none. Query-agnostic. Prefill and decode (the anchor is that of what is held when an eviction is due); needs
no attention weights and carries nothing. Cost: two products of keys with one vector.

Source: KeyDiff, arXiv 2504.15364.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from kvlens.observables.arithmetic import wide
from kvlens.scorers.interface import EMPTY, Plain, Views

TINY = 1e-12  # a key of norm 0 points nowhere


@dataclass(frozen=True)
class KeyDiff(Plain):
    """Minus the cosine with the mean direction."""

    per_layer = True

    def score(self, state: None, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """1. and 2."""
        keys = wide(views.keys)
        empty = (views.positions == EMPTY).to(keys.device)
        share = torch.linalg.vector_norm(keys, dim=-1).clamp(min=TINY).reciprocal_()
        anchor = normalize(share.masked_fill(empty, 0.0)[:, :, None] @ keys, dim=-1)  # its length does not count
        score: Tensor = -(keys @ anchor.mT)[..., 0] * share
        return score
