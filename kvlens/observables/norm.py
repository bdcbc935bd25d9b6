"""How long is a token's key (or value)? `key_norm`, `value_norm`: the L2 norm, mean over the key-value heads."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.observables.arithmetic import wide


def init() -> None:
    """No state: a token's norm asks for no other token."""


def step(_: None, states: Float[Tensor, "*layer kv_head pos d_head"]) -> tuple[None, Float[Tensor, "*layer pos"]]:
    """The mean norm of every new token, in the units of the keys or values."""
    return None, torch.linalg.vector_norm(wide(states), dim=-1).mean(-2)
