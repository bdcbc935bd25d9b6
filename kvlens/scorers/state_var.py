"""`key_var`, `value_var`: how unevenly a token's keys (or values) spread over the head dimension.

1. the population variance over the dimensions of one head, mean over all managed layers and heads;
2. the rolling mean over the trailing 64 tokens, padding not counted;
3. frozen when the token is made.

Source: EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.observables import rolling
from kvlens.observables.arithmetic import deviation
from kvlens.scorers.frozen import Frozen
from kvlens.scorers.interface import EMPTY, KEYS, VALUES, Facts, Kept, Plain, Seen, Views, Window


@dataclass(frozen=True)
class Rolled:
    """The trailing window of the variance, and every held token's number."""

    trailing: rolling.Trailing
    frozen: Frozen = field(default_factory=Frozen)

    def select(self, kept: Kept) -> Rolled:
        """After an eviction."""
        return replace(self, frozen=self.frozen.select(kept))


@dataclass(frozen=True)
class _StateVar(Plain):
    """The rolling variance of what the class names."""

    window: Window = rolling.WINDOW

    what = KEYS

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The new rows of every managed layer."""
        return frozenset({self.what})

    def init(self, facts: Facts) -> Rolled:
        """Nothing seen."""
        return Rolled(rolling.init(self.window))

    def observe(self, state: Rolled, seen: Seen) -> Rolled:
        """1. to 3. for the new tokens."""
        states, device = seen.keys if self.what == KEYS else seen.values, seen.positions.device
        variance = torch.stack([deviation(rows).square().mean(1).to(device) for rows in states.values()]).mean(0)
        trailing, means = rolling.mean(state.trailing, variance.masked_fill(seen.positions == EMPTY, torch.nan))
        return Rolled(trailing, state.frozen.append(seen.positions, means))

    def score(self, state: Rolled, views: Views) -> Float[Tensor, "batch heads kept"]:
        """The frozen number of every slot."""
        return state.frozen.look_up(views)


@dataclass(frozen=True)
class KeyVar(_StateVar):
    """Keys that spread unevenly are kept."""


@dataclass(frozen=True)
class ValueVar(_StateVar):
    """Values that spread unevenly are kept."""

    what = VALUES
