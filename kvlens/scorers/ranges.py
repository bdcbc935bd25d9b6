"""What range did each channel have over a chunk of tokens? Kept chunk by chunk while tokens come, for `lagkv`.

1. A token belongs to chunk `position // size` of its row; padding to none.
2. For every chunk the lowest and highest number of each channel of keys and of values, per layer and KV head, in the
   cache's own dtype: as many bytes as two tokens take.
3. `dropped` lets go of chunks that nobody will ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables.arithmetic import wide
from kvlens.observables.lag import scaled_deviation
from kvlens.scorers.interface import EMPTY


@dataclass(frozen=True)
class Ranges:
    """By chunk the range of each channel of keys and values; None before the first token.

    `chunks` are their numbers, rising, the same in every row; `n_seen` counts a row's tokens.
    """

    size: int
    layers: tuple[int, ...]
    chunks: Int[Tensor, "batch chunk"] | None = None
    n_seen: Int[Tensor, " batch"] | None = None
    low: Float[Tensor, "batch layer 2 kv_head chunk d_head"] | None = None
    high: Float[Tensor, "batch layer 2 kv_head chunk d_head"] | None = None

    def extended(self, positions: Int[Tensor, "batch new"], states: Mapping[int, tuple[Tensor, Tensor]]) -> Ranges:
        """With new tokens, whose keys and values [batch, kv_head, new, d_head] are given by layer."""
        n_seen = positions.amax(-1) + 1
        if self.n_seen is not None:
            n_seen = n_seen.maximum(self.n_seen)
        grown = self._grown(int(n_seen.max()), positions, states[self.layers[0]][0])
        chunks, lowest, highest = grown.held()
        alike = bool(((positions == positions[:1]) & (positions != EMPTY)).all())
        place = torch.searchsorted(chunks, positions.long().div(self.size, rounding_mode="floor").contiguous())
        place = place.clamp(max=chunks.shape[1] - 1)
        padding = (positions == EMPTY)[:, None, :, None]
        for number, layer in enumerate(self.layers):
            for part, rows in enumerate(states[layer]):
                rows = rows.to(positions.device)
                if alike:
                    _widen(lowest[:, number, part], highest[:, number, part], rows, place[0])
                    continue
                index = place[:, None, :, None].expand(rows.shape)
                for ranges, how, nothing in ((lowest, "amin", torch.inf), (highest, "amax", -torch.inf)):
                    ranges[:, number, part].scatter_reduce_(2, index, rows.masked_fill(padding, nothing), how)
        return replace(grown, n_seen=n_seen)

    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """`chunks`, `low` and `high`. Raises: InputError before the first token, when there are none."""
        if self.chunks is None or self.low is None or self.high is None:
            raise InputError("ranges of keys and values were asked for before any token was seen")
        return self.chunks, self.low, self.high

    def _grown(self, n_seen: int, positions: Tensor, like: Tensor) -> Ranges:
        """Fresh storage with room for all chunks up to this many tokens."""
        batch, n_kv_heads, _, d_head = like.shape
        first = 0 if self.n_seen is None else -(-int(self.n_seen.max()) // self.size)
        more = torch.arange(first, max(first, -(-n_seen // self.size)), device=positions.device).expand(batch, -1)
        shape = (batch, len(self.layers), 2, n_kv_heads, more.shape[1], d_head)
        low = torch.full(shape, torch.inf, dtype=like.dtype, device=positions.device)
        if self.chunks is None or self.low is None or self.high is None:
            return replace(self, chunks=more.clone(), low=low, high=-low)
        chunks = torch.cat([self.chunks, more], 1)
        return replace(self, chunks=chunks, low=torch.cat([self.low, low], 4), high=torch.cat([self.high, -low], 4))

    def dropped(self, wanted: Tensor) -> Ranges:
        """With these chunks alone, a mask over `chunks` that is the same for every row."""
        if self.chunks is None or self.low is None or self.high is None or bool(wanted.all()):
            return self
        low, high = self.low[..., wanted, :], self.high[..., wanted, :]
        return replace(self, chunks=self.chunks[:, wanted], low=low, high=high)

    def deviations(
        self,
        layer: int,
        chunk: Int[Tensor, "batch kv_head slots"],
        pair: tuple[Tensor, Tensor],
        rows: slice = slice(None),
        kv_heads: slice = slice(None),
    ) -> Float[Tensor, "2 batch kv_head slots"]:
        """Of keys and values, each scaled by its range over the chunk named for it; anything where there is none."""
        chunks, lowest, highest = self.held()
        place = torch.searchsorted(chunks[0], chunk.long().contiguous()).clamp(max=chunks.shape[1] - 1)
        found, number = [], self.layers.index(layer)
        first = torch.arange(place.shape[0] * place.shape[1], device=place.device).view(*place.shape[:2], 1)
        index = (first * chunks.shape[1] + place).reshape(-1).to(lowest.device)
        for part, states in enumerate(pair):  # rows of one list: several times as fast as along an axis
            each = (r[rows, number, part, kv_heads].flatten(0, 2) for r in (lowest, highest))
            low, high = (r.index_select(0, index).view(states.shape) for r in each)
            found.append(scaled_deviation(wide(states.to(low.device)), wide(low), wide(high)))
        return torch.stack(found)


def _widen(
    low: Float[Tensor, "batch kv_head chunk d_head"],
    high: Float[Tensor, "batch kv_head chunk d_head"],
    rows: Float[Tensor, "batch kv_head new d_head"],
    place: Int[Tensor, " new"],
) -> None:
    """Nothing; low and high cover these rows too, of which each stands in the chunk at its place, the same in all rows.

    Rows of a chunk follow one another, so no scatter is needed, which takes many times as long.
    """
    which, counts = torch.unique_consecutive(place, return_counts=True)
    stops = counts.cumsum(0).tolist()
    for chunk, start, stop in zip(which.tolist(), [0, *stops], stops, strict=False):
        piece = rows[:, :, start:stop]
        low[:, :, chunk] = torch.minimum(low[:, :, chunk], piece.amin(2))
        high[:, :, chunk] = torch.maximum(high[:, :, chunk], piece.amax(2))
