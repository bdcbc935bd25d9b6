"""`band_adaptive`: `epikv` over two bands of layers instead of two layers, weighted.

1. the change of the residual stream after every block of band A and of band B, its mean over each band;
2. the causal z-score of both means over the trailing 64 tokens;
3. 1.29 times that of A minus 1.0 times that of B, frozen when the token is made.

Bands are fractions of depth; on another model they are the layers from the floor of the start to the ceiling of the
stop. The defaults are the paper's layers [7, 14) and [18, 26) of 32.

Source: EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float64
from torch import Tensor

from kvlens.discover.clusters import layers_of
from kvlens.errors import InputError
from kvlens.observables import hidden_change, rolling
from kvlens.scorers.hidden_change import Moved, MovedBlocks
from kvlens.scorers.interface import AS_TUPLE, Depth, Facts, Number, Window

Band = Annotated[tuple[Depth, Depth], AS_TUPLE]
BAND_A, BAND_B = (7 / 32, 14 / 32), (18 / 32, 26 / 32)


@dataclass(frozen=True)
class BandAdaptive(MovedBlocks):
    """The weighted z-score of the mean change in band A minus that in band B."""

    band_a: Band = BAND_A
    band_b: Band = BAND_B
    weight_a: Number = 1.29
    weight_b: Number = 1.0
    window: Window = rolling.WINDOW
    score_prompt: bool = True
    exclude_current: bool = False

    def __post_init__(self) -> None:
        for name in ("band_a", "band_b"):
            start, stop = getattr(self, name)
            if start >= stop:
                raise InputError(f"scorer band_adaptive: {name} from {start} to {stop} of the depth holds no layer")

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """The blocks of both bands, those of A first; a block may be in both."""
        bands = (range(*layers_of(*band, facts.n_layers)) for band in (self.band_a, self.band_b))
        return tuple(layer for band in bands for layer in band)

    def init(self, facts: Facts) -> Moved:
        """Nothing seen."""
        start, stop = layers_of(*self.band_a, facts.n_layers)
        return Moved(self.hidden_layers(facts), hidden_change.init(), rolling.init(self.window), stop - start)

    def number(
        self, state: Moved, changes: Float64[Tensor, "batch block new"]
    ) -> tuple[rolling.Trailing, Float64[Tensor, "batch new"]]:
        """1. to 3."""
        means = torch.stack([changes[:, : state.n_in_a].mean(1), changes[:, state.n_in_a :].mean(1)], 1)
        window, z = rolling.zscore(state.window, means, exclude_current=self.exclude_current)
        return window, self.weight_a * z[:, 0] - self.weight_b * z[:, 1]
