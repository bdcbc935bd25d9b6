"""How much attention has a key received? `attention_mass`: the weights all later queries, and its own, gave it.

Mean over the heads of the layer, sum over queries. A token's mass grows as long as queries come, so its value is that
at the end of the trace; `state.mass` is what has come in so far, which is what an H2O-style policy ranks by.

Source: H2O, arXiv 2306.14048.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvlens.observables.arithmetic import wide


@dataclass(frozen=True)
class Received:
    """What each key has received so far, in every layer; None before the first query."""

    mass: Float64[Tensor, "*layer key"] | None = None


def init() -> Received:
    """The state before the first query."""
    return Received()


def step(
    state: Received, weights: Float[Tensor, "*layer head query key"]
) -> tuple[Received, Float64[Tensor, "*layer none"]]:
    """No value yet; the state takes in the weights of the new queries over all keys up to the last of them."""
    mass = wide(weights).sum(-2).double().mean(-2)
    if state.mass is not None:
        mass[..., : state.mass.shape[-1]] += state.mass
    return Received(mass), mass[..., :0]


def finish(state: Received) -> Float64[Tensor, "*layer key"]:
    """The mass every key has received, in units of one query's attention."""
    return torch.empty(0, dtype=torch.float64) if state.mass is None else state.mass
