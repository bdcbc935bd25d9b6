"""How spread out does a query look? `attention_entropy`: the entropy of its weights, mean over the layer's heads, nats.

The entropy is - sum of w log w over the keys. What a learned sink takes is no key's weight and adds nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvlens.observables.arithmetic import wide


def init() -> None:
    """No state: a query's entropy asks for no other query."""


def step(_: None, weights: Float[Tensor, "*layer head query key"]) -> tuple[None, Float64[Tensor, "*layer query"]]:
    """The mean entropy of every new query, in nats."""
    return None, torch.special.entr(wide(weights)).sum(-1).double().mean(-2)
