"""What does a compressed cache cost in what the model says next?

1. Every method is asked for the same tokens: the logits that predict the target, teacher-forced over what it holds.
2. `Fidelity`: the mean KL divergence of the full cache's prediction from the method's, in nats per target token, and
   the share of target tokens at which both say the same most likely token (equal ones: the lowest id).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Fidelity:
    """Means over the target's tokens."""

    kl_nats: float
    next_token_agreement: float


def fidelity(full: Float[Tensor, "target d_vocab"], got: Float[Tensor, "target d_vocab"]) -> Fidelity:
    """How far the logits `got` are from those of the full cache; computed in float64, row by row.

    Cost: one pass over both, a row of float64 at a time.
    """
    total, same = 0.0, 0
    for one, other in zip(full, got, strict=True):
        wanted, found = one.double().log_softmax(-1), other.double().log_softmax(-1)
        total += float((wanted.exp() * (wanted - found)).sum())
        same += int(one.argmax() == other.argmax())
    return Fidelity(total / len(full), same / len(full))
