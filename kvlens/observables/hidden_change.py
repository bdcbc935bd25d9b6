"""How far does the residual stream move from one token to the next?

1. h_l(t) is the residual stream after block l, before any norm;
2. the change is || h_l(t) - h_l(t - 1) ||, the difference taken in float32, its squares added in float64;
3. the first token of a trace has no token before it and so no change: NaN. A state that was carried on from earlier
   tokens has one: the first decoded token's change is taken against the last prompt token.

Source: EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvlens.observables.arithmetic import wide


@dataclass(frozen=True)
class Last:
    """The hidden state of the last token seen, in every layer; None before the first."""

    hidden: Float[Tensor, "*layer d_model"] | None = None


def init() -> Last:
    """The state before the first token."""
    return Last()


def step(state: Last, hidden: Float[Tensor, "*layer pos d_model"]) -> tuple[Last, Float64[Tensor, "*layer pos"]]:
    """The change of every new token, in the units of the residual stream."""
    hidden = wide(hidden)
    changes = _norm(hidden[..., 1:, :] - hidden[..., :-1, :])
    if state.hidden is None:
        first = changes.new_full((*hidden.shape[:-2], 1), torch.nan)
    else:
        first = _norm(hidden[..., :1, :] - state.hidden[..., None, :])
    return Last(hidden[..., -1, :].clone()), torch.cat([first, changes], -1)


def _norm(difference: Float[Tensor, "*shape d_model"]) -> Float64[Tensor, "*shape"]:
    norm: Tensor = torch.linalg.vector_norm(difference, dim=-1, dtype=torch.float64)
    return norm
