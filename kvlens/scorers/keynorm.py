"""`keynorm`: short keys are kept, -||k||_2. The norm is float32 whatever the cache holds: in bfloat16 most would tie.

Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.observables.arithmetic import wide
from kvlens.scorers.interface import Plain, Views


@dataclass(frozen=True)
class KeyNorm(Plain):
    """Minus the norm of the key."""

    per_layer = True

    def score(self, state: None, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """For every slot of every head."""
        norm: Tensor = torch.linalg.vector_norm(wide(views.keys), dim=-1)
        return norm.neg_()
