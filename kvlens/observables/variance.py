"""How unevenly does a token's key (or value) spread over the head dimension? `key_var` and `value_var`.

1. the population variance over the dimensions of one head;
2. its mean over the key-value heads of the layer;
3. the rolling mean over the trailing 64 tokens (`rolling.py`).

Source: EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

from jaxtyping import Float, Float64
from torch import Tensor

from kvlens.observables import rolling
from kvlens.observables.arithmetic import deviation
from kvlens.observables.rolling import Trailing, init

__all__ = ["init", "step"]


def step(
    state: Trailing, states: Float[Tensor, "*layer kv_head pos d_head"]
) -> tuple[Trailing, Float64[Tensor, "*layer pos"]]:
    """The rolling mean of the variance, for every new token."""
    return rolling.mean(state, deviation(states).square().mean(-2))
