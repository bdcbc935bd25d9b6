"""How common is this token? `log_frequency`: the natural log of how often its id stands in the run's own traces.

Counts cover prompt and reasoning of every trace of the run, the tokens still to come among them: it reads the future.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def init() -> None:
    """No state: the counts were taken before."""


def step(_: None, counts: Int[Tensor, " pos"]) -> tuple[None, Float[Tensor, " pos"]]:
    """The log count of every new token, from how often each one's id was counted."""
    return None, counts.double().log()
