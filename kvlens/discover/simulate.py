"""Signals and labels whose truth is known: does band discovery find planted bands, and nothing where there is nothing?

1. Every token has a hidden importance, white noise. The label is its rolling mean over 8 tokens, as windows smooth it.
2. The raw signal of a layer is white over tokens and correlated over neighbouring layers; inside the planted band it
   shares a part with the importance. The signal is its rolling mean over 64 tokens, as real signals are smoothed.
3. The shared part is set so that the rank correlation of the two smoothed series is `rho` in each trace.
4. `trend` adds the same curve over the position to the label and to every layer, in standard deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kvlens.errors import InputError
from kvlens.stats import POSITION_DEGREE, partial_spearman

SIGNAL_WINDOW, LABEL_WINDOW = 64, 8
BETWEEN_LAYERS = 0.9
TRENDS: dict[str, Callable[[Float[np.ndarray, " pos"]], Float[np.ndarray, " pos"]]] = {
    "line": lambda x: x,
    "saturating": lambda x: 1 - np.exp(-4 * x),
    "hump": lambda x: -((x - 0.5) ** 2),
}


class Simulated(NamedTuple):
    """One trace: its smoothed signals and its smoothed labels."""

    signal: Float[np.ndarray, "pos layer"]
    label: Float[np.ndarray, " pos"]


def simulate(
    seed: int | Sequence[int],
    *,
    n_traces: int = 40,
    n_layers: int = 30,
    band: tuple[int, int] = (10, 16),
    rho: float = 0.15,
    n_tokens: tuple[int, int] = (200, 600),
    trend: str | None = None,
    strength: float = 1.0,
) -> list[Simulated]:
    """Traces with `rho` planted in the layers [start, stop) of `band`, 0 in all others; `rho` 0 is pure noise.

    `n_tokens` is the range of a trace's length; `trend` names one of `TRENDS`.

    Raises: InputError for a `rho` that no signal this smooth can have with a label this rough.
    """
    random = np.random.default_rng(seed)
    # Pearson's r of two jointly normal series whose Spearman is rho, then what smoothing over unequal windows costs.
    shared = 2 * np.sin(np.pi * rho / 6) * np.sqrt(SIGNAL_WINDOW / LABEL_WINDOW)
    if abs(shared) > 1:
        raise InputError(f"cannot plant a rho of {rho}", "give one between -.33 and .33")
    found = []
    for _ in range(n_traces):
        n = int(random.integers(*n_tokens, endpoint=True))
        importance = random.standard_normal(n + SIGNAL_WINDOW)
        raw = random.standard_normal((len(importance), n_layers))
        for layer in range(1, n_layers):
            raw[:, layer] = BETWEEN_LAYERS * raw[:, layer - 1] + np.sqrt(1 - BETWEEN_LAYERS**2) * raw[:, layer]
        inside = slice(*band)
        raw[:, inside] = shared * importance[:, None] + np.sqrt(1 - shared**2) * raw[:, inside]
        signal = rolling_mean(raw, SIGNAL_WINDOW)[SIGNAL_WINDOW:] * np.sqrt(SIGNAL_WINDOW)
        label = rolling_mean(importance[:, None], LABEL_WINDOW)[SIGNAL_WINDOW:, 0] * np.sqrt(LABEL_WINDOW)
        if trend is not None:
            curve = TRENDS[trend](np.linspace(0, 1, n))
            curve = strength * (curve - curve.mean()) / curve.std()
            signal, label = signal + curve[:, None], label + curve
        found.append(Simulated(signal, label))
    return found


def rolling_mean(values: Float[np.ndarray, "pos column"], window: int) -> Float[np.ndarray, "pos column"]:
    """The mean over the trailing `window` values, partial at the start."""
    total = np.vstack([np.zeros(values.shape[1]), np.cumsum(values, axis=0)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return np.asarray((total[end] - total[start]) / (end - start)[:, None])


def rhos(traces: Sequence[Simulated], degree: int = POSITION_DEGREE) -> Float[np.ndarray, "trace layer"]:
    """The rank correlation of every layer with the label in each trace, position partialled out."""
    return np.array([partial_spearman(signal, label, np.arange(len(label)), degree) for signal, label in traces])
