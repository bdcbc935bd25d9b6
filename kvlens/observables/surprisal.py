"""How unexpected was a token, given everything before it? `surprisal` = -log p(token | past), in nats.

Logits at a position predict the next token, so a token's value comes from the row before it, which the state keeps. The
first token of a trace has no past: NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.observables.arithmetic import wide


@dataclass(frozen=True)
class Prediction:
    """The log-probabilities that the last token seen gives for the next; None before the first."""

    log_probs: Float[Tensor, " d_vocab"] | None = None


def init() -> Prediction:
    """The state before the first token."""
    return Prediction()


def step(
    state: Prediction, logits: Float[Tensor, "pos d_vocab"], ids: Int[Tensor, " pos"]
) -> tuple[Prediction, Float[Tensor, " pos"]]:
    """The surprisal of every new token `ids`, in nats; `logits` are those at the same tokens."""
    log_probs = wide(logits).log_softmax(-1)
    nats = -log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
    first = nats.new_full((1,), torch.nan) if state.log_probs is None else -state.log_probs[ids[:1]]
    return Prediction(log_probs[-1].clone()), torch.cat([first, nats])
