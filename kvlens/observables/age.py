"""How many tokens came after this one? `age` = n_context - 1 - pos, in tokens, at the end of the context.

At any earlier moment it is less, and how much longer the trace goes on nobody knows then: it reads the future.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """How many tokens came so far."""

    n_tokens: int = 0


def init() -> Seen:
    """The state before the first token."""
    return Seen()


def step(state: Seen, ids: Int[Tensor, " pos"]) -> tuple[Seen, Float[Tensor, " none"]]:
    """No value yet; the state counts the new tokens."""
    return Seen(state.n_tokens + ids.shape[0]), torch.empty(0)


def finish(state: Seen) -> Float[Tensor, " pos"]:
    """The age of every token, in tokens."""
    return torch.arange(state.n_tokens - 1, -1, -1, dtype=torch.float32)
