"""Slow, obvious references for every signal: numpy in float64, one token at a time, nothing shared with the package."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def hidden_change(hidden: Array) -> Array:
    """[pos] from [pos, d_model]."""
    hidden = hidden.astype(np.float64)
    found = [math.nan]
    for t in range(1, len(hidden)):
        found.append(math.sqrt(((hidden[t] - hidden[t - 1]) ** 2).sum()))
    return np.array(found)


def trailing(values: Array, t: int, window: int) -> Array:
    """The values of the window that ends in t, without those that are none."""
    seen = values[max(0, t - window + 1) : t + 1].astype(np.float64)
    return seen[~np.isnan(seen)]


def rolling_mean(values: Array, window: int = 64) -> Array:
    found = []
    for t in range(len(values)):
        seen = trailing(values, t, window)
        found.append(sum(seen) / len(seen) if len(seen) else math.nan)
    return np.array(found)


def zscore(values: Array, window: int = 64, *, exclude_current: bool = False) -> Array:
    found = []
    for t in range(len(values)):
        seen = trailing(values, t, window)
        if exclude_current:
            seen = seen[:-1]
        if len(seen) < 2:
            found.append(0.0)
        else:
            found.append((values[t] - np.mean(seen)) / (np.std(seen) + 1e-6))
    return np.array(found)


def variance(states: Array, window: int = 64) -> Array:
    """[pos] from keys or values [kv_head, pos, d_head]."""
    n_heads, n_pos, _ = states.shape
    raw = [np.mean([np.var(states[head, t].astype(np.float64)) for head in range(n_heads)]) for t in range(n_pos)]
    return rolling_mean(np.array(raw), window)


def norm(states: Array) -> Array:
    n_heads, n_pos, _ = states.shape
    states = states.astype(np.float64)
    return np.array(
        [np.mean([math.sqrt((states[head, t] ** 2).sum()) for head in range(n_heads)]) for t in range(n_pos)]
    )


def scaled_deviation(token: Array, reference: Array) -> float:
    """The standard deviation (n - 1) of a token's channels, each scaled by its range over `reference` [pos, d_head]."""
    scaled = []
    for channel, value in enumerate(token.astype(np.float64)):
        low, high = reference[:, channel].min(), reference[:, channel].max()
        scaled.append((value - low) / (high - low if high > low else 1.0))
    return float(np.std(scaled, ddof=1))


def lag(keys: Array, values: Array, chunk: int = 128) -> Array:
    """[pos] from keys and values [kv_head, pos, d_head]."""
    n_heads, n_pos, _ = keys.shape
    found = np.full(n_pos, math.nan)
    for first in range(0, n_pos - 2 * chunk + 1, chunk):
        here, after = slice(first, first + chunk), slice(first + chunk, first + 2 * chunk)
        total = np.zeros(chunk)
        for states in (keys, values):
            for head in range(n_heads):
                scores = np.array([scaled_deviation(token, states[head, after]) for token in states[head, here]])
                total += np.exp(scores) / np.exp(scores).sum()
        found[here] = total / n_heads
    return found


def lag_causal(keys: Array, values: Array, chunk: int = 128) -> Array:
    """[pos] from keys and values [layer, kv_head, pos, d_head]."""
    n_layers, n_heads, n_pos, _ = keys.shape
    found = []
    for t in range(n_pos):
        first = t // chunk * chunk
        scores = []
        for layer in range(n_layers):
            for head in range(n_heads):
                score = 0.0
                for states in (keys[layer, head], values[layer, head]):
                    if first == 0:
                        score += float(np.std(states[t].astype(np.float64), ddof=1))
                    else:
                        score += scaled_deviation(states[t], states[first - chunk : first])
                scores.append(score)
        found.append(np.mean(scores))
    return np.array(found)


def surprisal(logits: Array, ids: Array) -> Array:
    """[pos] from logits [pos, d_vocab]."""
    found = [math.nan]
    for t in range(1, len(ids)):
        row = logits[t - 1].astype(np.float64)
        top = row.max()
        found.append(top + math.log(np.exp(row - top).sum()) - row[ids[t]])
    return np.array(found)


def attention_mass(weights: Array) -> Array:
    """[pos] from weights [head, query, key]."""
    n = weights.shape[-1]
    return np.array([sum(weights[:, i, j].astype(np.float64).mean() for i in range(j, n)) for j in range(n)])


def attention_entropy(weights: Array) -> Array:
    found = []
    for i in range(weights.shape[1]):
        heads = []
        for row in weights[:, i].astype(np.float64):
            heads.append(-sum(w * math.log(w) for w in row if w > 0))
        found.append(np.mean(heads))
    return np.array(found)


def age(ids: Array) -> Array:
    return np.array([len(ids) - 1 - pos for pos in range(len(ids))], dtype=np.float64)


def log_frequency(counts: Array) -> Array:
    return np.array([math.log(count) for count in counts])


def weights(
    query: Array,
    keys: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention weights [head, query, key] of the last queries over the keys, one pair at a time."""
    n_heads, n_query, _ = query.shape
    n_key = keys.shape[1]
    found = np.zeros((n_heads, n_query, n_key))
    for head in range(n_heads):
        kv_head = head // (n_heads // keys.shape[0])
        for row in range(n_query):
            pos = n_key - n_query + row
            seen = [key for key in range(n_key) if key <= pos and (window is None or key > pos - window)]
            scores = []
            for key in seen:
                score = float(query[head, row].astype(np.float64) @ keys[kv_head, key].astype(np.float64)) * scale
                scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
            top = max(scores)
            total = sum(math.exp(score - top) for score in scores)
            if sinks is not None:
                total += math.exp(float(sinks[head]) - top)
            for key, score in zip(seen, scores, strict=True):
                found[head, row, key] = math.exp(score - top) / total
    return found
