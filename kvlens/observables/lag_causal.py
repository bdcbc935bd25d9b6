"""How do a token's key and value stand within the range of the *previous* chunk? `lag_causal`: one score a token.

1. chunks of 128 tokens from the start of the trace; each channel of keys (and of values) is scaled by the minimum and
   maximum it had over the previous chunk, and left as it is in the first chunk;
2. the standard deviation over channels, keys' and values' added, no softmax;
3. the mean over all layers and key-value heads: one number a token.

Source: EpiKV's causal variant of LagKV, arXiv 2606.26472.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.observables.arithmetic import deviation, wide
from kvlens.observables.lag import CHUNK, scaled_deviation

Range = tuple[Tensor, Tensor]  # lowest and highest of each channel, [*layer, kv_head, 1, d_head]


@dataclass(frozen=True)
class Ranges:
    """Ranges of keys and of values: over the previous chunk (None in the first), over the current one so far."""

    chunk: int
    n_in_chunk: int = 0
    previous: tuple[Range, Range] | None = None
    current: tuple[Range, Range] | None = None


def init(chunk: int = CHUNK) -> Ranges:
    """The state before the first token."""
    if chunk < 1:
        raise ValueError(f"chunks of {chunk} tokens: 1 is the least")
    return Ranges(chunk)


def step(
    state: Ranges,
    keys: Float[Tensor, "*layer kv_head pos d_head"],
    values: Float[Tensor, "*layer kv_head pos d_head"],
) -> tuple[Ranges, Float[Tensor, " pos"]]:
    """The score of every new token."""
    scores, start = [], 0
    while start < keys.shape[-2]:
        stop = min(keys.shape[-2], start + state.chunk - state.n_in_chunk)
        pieces = wide(keys[..., start:stop, :]), wide(values[..., start:stop, :])
        scores.append(_score(state, pieces).flatten(0, -2).mean(0))
        state, start = _seen(state, pieces), stop
    return state, torch.cat(scores)


def _score(state: Ranges, pieces: tuple[Tensor, Tensor]) -> Float[Tensor, "*layer kv_head pos"]:
    """The score of tokens of one chunk in every layer and head."""
    keys, values = pieces
    if state.previous is None:
        return deviation(keys, 1) + deviation(values, 1)
    key_range, value_range = state.previous
    return scaled_deviation(keys, *key_range) + scaled_deviation(values, *value_range)


def _seen(state: Ranges, pieces: tuple[Tensor, Tensor]) -> Ranges:
    """The state after these tokens of one chunk."""
    keys, values = (_range(piece) for piece in pieces)
    if state.current is not None:
        keys, values = _joined(state.current[0], keys), _joined(state.current[1], values)
    n_in_chunk = state.n_in_chunk + pieces[0].shape[-2]
    if n_in_chunk == state.chunk:
        return Ranges(state.chunk, 0, (keys, values), None)
    return Ranges(state.chunk, n_in_chunk, state.previous, (keys, values))


def _range(states: Float[Tensor, "*layer kv_head pos d_head"]) -> Range:
    return states.amin(-2, keepdim=True), states.amax(-2, keepdim=True)


def _joined(one: Range, other: Range) -> Range:
    return torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])
