"""How do a token's key and value stand within the range of the *next* chunk? `lag`, which reads the future.

1. the trace is cut into chunks of 128 tokens from its start;
2. each channel of a chunk's keys is scaled by the minimum and maximum it has over the next chunk; the same for values;
   a channel that is constant there is shifted, not scaled;
3. the standard deviation over channels, softmax over the chunk's tokens, keys' and values' added, mean over the layer's
   key-value heads;
4. a chunk has values once the next one is whole. The last whole chunk and what follows it have none: NaN. So has all of
   a trace shorter than two chunks.

Source: LagKV, arXiv 2504.04704 (its code's standard deviation, with n - 1); sinks are not set apart here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.observables.arithmetic import deviation, wide

CHUNK = 128


@dataclass(frozen=True)
class Waiting:
    """Keys and values of the tokens that have no value yet: fewer than two chunks; None before the first token."""

    chunk: int
    keys: Float[Tensor, "*layer kv_head waiting d_head"] | None = None
    values: Float[Tensor, "*layer kv_head waiting d_head"] | None = None


def init(chunk: int = CHUNK) -> Waiting:
    """The state before the first token."""
    if chunk < 1:
        raise ValueError(f"chunks of {chunk} tokens: 1 is the least")
    return Waiting(chunk)


def step(
    state: Waiting,
    keys: Float[Tensor, "*layer kv_head pos d_head"],
    values: Float[Tensor, "*layer kv_head pos d_head"],
) -> tuple[Waiting, Float[Tensor, "*layer emitted"]]:
    """The values of every chunk whose next one is now whole, in order."""
    if state.keys is not None and state.values is not None:
        keys, values = torch.cat([state.keys, keys], -2), torch.cat([state.values, values], -2)
    n_chunks = keys.shape[-2] // state.chunk
    if n_chunks < 2:
        return Waiting(state.chunk, keys.clone(), values.clone()), wide(keys[..., 0, :0, 0])
    scores = _scores(keys, state.chunk, n_chunks) + _scores(values, state.chunk, n_chunks)
    n_done = scores.shape[-1]
    rest = Waiting(state.chunk, keys[..., n_done:, :].clone(), values[..., n_done:, :].clone())
    return rest, scores.mean(-2)


def finish(state: Waiting) -> Float[Tensor, "*layer waiting"]:
    """NaN for every token that has no value and now gets none."""
    if state.keys is None:
        return torch.empty(0)
    return wide(state.keys).new_full((*state.keys.shape[:-3], state.keys.shape[-2]), torch.nan)


def _scores(
    states: Float[Tensor, "*layer kv_head pos d_head"], chunk: int, n_chunks: int
) -> Float[Tensor, "*layer kv_head done"]:
    """The softmax of the scaled deviation, for the tokens of every whole chunk that has a next one."""
    chunks = wide(states[..., : n_chunks * chunk, :])
    chunks = chunks.reshape(*chunks.shape[:-2], n_chunks, chunk, chunks.shape[-1])
    own, following = chunks[..., :-1, :, :], chunks[..., 1:, :, :]
    scaled = scaled_deviation(own, following.amin(-2, keepdim=True), following.amax(-2, keepdim=True))
    return scaled.softmax(-1).flatten(-2)


def scaled_deviation(
    states: Float[Tensor, "*shape d_head"], low: Float[Tensor, "*#shape d_head"], high: Float[Tensor, "*#shape d_head"]
) -> Float[Tensor, "*shape"]:
    """The standard deviation over channels, each channel scaled by its range [low, high] elsewhere."""
    span = high - low
    return deviation((states - low).div_(span.where(span > 0, 1.0)), 1)
