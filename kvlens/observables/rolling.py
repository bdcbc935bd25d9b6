"""What is a value beside the ones just before it? Rolling mean and causal z-score over a trailing window.

1. the window of a value is itself and the `window - 1` values before it, fewer at the start; NaN counts as no value;
2. mean: their mean;
3. z-score: (value - mean) / (population standard deviation + 1e-6) over the same window, 0 where it holds fewer than
   two values, so |z| <= sqrt(window - 1). With `exclude_current` mean and deviation are those of the values before
   alone, and that bound does not hold.

Every window is computed by itself, deviations taken from the current value first: a running sum of squares would drift,
and equal values would not give exactly 0.

Source: EpiKV, arXiv 2606.26472 (window 64).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

WINDOW = 64
EPSILON = 1e-6


@dataclass(frozen=True)
class Trailing:
    """The last `window - 1` values of every row, NaN where there were fewer; None before the first."""

    window: int
    values: Float64[Tensor, "*row kept"] | None = None


def init(window: int = WINDOW) -> Trailing:
    """The state before the first value."""
    if window < 1:
        raise ValueError(f"a window of {window} values: it holds the current one, so 1 is the least")
    return Trailing(window)


def mean(state: Trailing, values: Float[Tensor, "*row pos"]) -> tuple[Trailing, Float64[Tensor, "*row pos"]]:
    """The mean of the window that ends in each new value; NaN where it holds none."""
    state, windows = _windows(state, values.double())
    return state, windows.nanmean(-1)


def zscore(
    state: Trailing, values: Float[Tensor, "*row pos"], *, exclude_current: bool = False
) -> tuple[Trailing, Float64[Tensor, "*row pos"]]:
    """How many standard deviations each new value lies from the mean of its window."""
    values = values.double()
    state, windows = _windows(state, values)
    if exclude_current:
        windows = windows[..., :-1]
    deviations = windows - values[..., None]  # exactly 0 where all are equal
    centre = deviations.nanmean(-1)
    spread = (deviations - centre[..., None]).square().nanmean(-1).sqrt()
    few = windows.isnan().logical_not().sum(-1) < 2
    return state, torch.where(few, 0.0, -centre / (spread + EPSILON))


def _windows(
    state: Trailing, values: Float64[Tensor, "*row pos"]
) -> tuple[Trailing, Float64[Tensor, "*row pos window"]]:
    """The window of each new value, oldest first, and the state after them."""
    before = state.values
    if before is None:
        before = values.new_full((*values.shape[:-1], state.window - 1), torch.nan)
    joined = torch.cat([before, values], -1)
    kept = joined[..., values.shape[-1] :].clone()  # a view would keep the whole chunk alive
    return Trailing(state.window, kept), joined.unfold(-1, state.window, 1)
