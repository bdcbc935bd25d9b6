"""`random`: a number drawn for each token, from its seed, layer, head and position alone.

1. an integer hash of (seed, layer, kv_head, position), the same on every device and for every batch;
2. its upper 24 bits as a fraction in [0, 1). With `reduce: all` the mean over layers and heads is as random.

Source: ours; the baseline that every other score must beat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.scorers.interface import Plain, Seed, Views

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Random(Plain):
    """Seeded uniform numbers."""

    seed: Seed = 0

    per_layer = True

    def score(self, state: None, views: Views) -> Float[Tensor, "batch heads kept"]:
        """A number in [0, 1) for every slot."""
        n_heads = views.keys.shape[1]
        first = views.kv_heads.start or 0
        heads = torch.arange(first, first + n_heads, device=views.positions.device)[None, :, None]
        return uniform(self.seed, views.layer, heads, views.positions.long())


def uniform(seed: int, *parts: int | Int[Tensor, "*_"]) -> Float[Tensor, "*_"]:
    """A float32 in [0, 1) for every combination of these parts, of which at least one is a tensor; 24 bits."""
    device = next(part.device for part in parts if isinstance(part, Tensor))
    mixed = _mix(torch.as_tensor(seed & _MASK, device=device) ^ 0x9E3779B9)
    for part in parts:
        mixed = _mix(mixed ^ _mix((part + torch.tensor(1, device=device)) & _MASK))
    return (mixed >> 8).float() / 2**24


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (multiply and shift, twice) carried in int64."""
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)
