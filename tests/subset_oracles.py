"""Slow, obvious references for kept sets: one set at a time, in float64, by the definition."""

from __future__ import annotations

from itertools import combinations

import numpy as np


def error(weights: np.ndarray, values: np.ndarray, kept: tuple[int, ...], sink: float = 0.0) -> float:
    """||mu - m_A|| of one row, mu and m_A each written out; the sink has the value 0 and is always kept."""
    mu = sum(p * v for p, v in zip(weights, values, strict=True))
    mass = sink + sum(weights[j] for j in kept)
    if mass == 0:
        return float("inf")
    m = sum((weights[j] / mass * values[j] for j in kept), np.zeros(values.shape[1]))
    return float(np.linalg.norm(mu - m))


def best(weights: np.ndarray, values: np.ndarray, pool: np.ndarray, budget: int, sink: float = 0.0) -> float:
    """The least error over all `budget`-subsets of the pool."""
    return min(error(weights, values, kept, sink) for kept in combinations(pool.tolist(), budget))


def softmax_rows(random: np.random.Generator, n_rows: int, n_keys: int, spread: float = 2.0) -> np.ndarray:
    """Rows of attention weights; the larger the spread, the more mass on a few keys."""
    logits = np.exp(random.normal(size=(n_rows, n_keys)) * spread)
    return logits / logits.sum(1, keepdims=True)
