"""`keydiff`: keys that point elsewhere than most are kept.

1. The anchor of a KV head: the mean of the keys of its held slots, each divided by its norm.
2. Minus the cosine of a slot's key with the anchor.

Defaults: none. Query-agnostic. Prefill and decode (the anchor is that of what is held when an eviction is due); needs
no attention weights and carries nothing. Cost: two products of keys with one vector.

Source: KeyDiff, arXiv 2504.15364.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from kvlens.observables.arithmetic import wide
from kvlens.scorers.frozen import EMPTY
from kvlens.scorers.interface import Plain, Views


@dataclass(frozen=True)
class KeyDiff(Plain):
    """Minus the cosine with the mean direction."""

    per_layer = True

    def score(self, state: None, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """1. and 2."""
        empty = (views.positions == EMPTY)[..., None].to(views.keys.device)
        directions = normalize(wide(views.keys), dim=-1).masked_fill(empty, 0.0)
        anchor = normalize(directions.sum(2, keepdim=True), dim=-1)  # the cosine does not see its length
        return -(directions * anchor).sum(-1)
