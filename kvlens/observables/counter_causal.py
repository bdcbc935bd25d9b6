"""Attention to the future alone: row i of a cache sees the rows after it, and never a mask of all rows by all rows.

1. Row i sees row j > edge(i) + min_gap, where edge(i) is i itself, or the last row of the unit of text that holds it.
   Turned to the past it sees j < edge(i) - min_gap, edge(i) being i or the first row of the unit.
2. FlashAttention and SDPA know one triangle, the causal one. With the order of queries, keys and values reversed, the
   first 1 + min_gap reversed queries and the last 1 + min_gap reversed keys dropped, causal attention is exactly
   j > i + min_gap; to the past the same rows are dropped and nothing is reversed.
3. What no triangle says (units, sliding windows, soft-capped scores, sinks, padding before the past) is computed a
   block of queries at a time, in float32 or wider. A layer with a window of w sees rows fewer than w positions away:
   the mirror of the rule it was trained with.
4. A row that sees nothing gets 0 from attention, never NaN.

Rows are counted in the cache, not in the text: after an eviction `min_gap` skips rows that are still there.

Source: counter-causal surprise; the reversal, units and the turn to the past are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import BLOCK, ROWS, Rule, weighted_values, weights_without

# (query, keys, values, scale): causal attention of as many queries as keys
Causal = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Sight:
    """Which rows of the cache each row sees; `edge` [batch, pos] is the row where its unit ends (to the past: starts).

    `n_pad` [batch] rows in front of a sequence are padding, which no row sees; `positions` [batch, pos] are absolute.
    """

    positions: Int[Tensor, "batch pos"]
    min_gap: int = 0
    past: bool = False
    edge: Int[Tensor, "batch pos"] | None = None
    n_pad: Int[Tensor, " batch"] | None = None

    def own(self) -> Int[Tensor, "#batch pos"]:
        """The row from which each row's sight is counted."""
        if self.edge is not None:
            return self.edge
        return torch.arange(self.positions.shape[1], device=self.positions.device)[None]

    def known(self, window: int | None = None) -> Bool[Tensor, "batch pos"]:
        """Whether a row sees any row at all, and is no padding; `window` is the widest of the layers that are run."""
        n = self.positions.shape[1]
        first = self.positions.new_zeros(self.positions.shape[0], 1) if self.n_pad is None else self.n_pad[:, None]
        nearest = self.own().expand_as(self.positions) + (-1 - self.min_gap if self.past else 1 + self.min_gap)
        sees = (nearest >= first) & (nearest < n)
        if window is not None:
            apart = self.positions.gather(1, nearest.clamp(0, n - 1)) - self.positions
            sees = sees & (apart.abs() < window)
        return sees & (torch.arange(n, device=nearest.device) >= first)

    def hidden(
        self, start: int, stop: int, low: int, high: int, window: int | None
    ) -> Bool[Tensor, "batch 1 query key"]:
        """Which of the rows [low, high) the rows [start, stop) do not see."""
        keys = torch.arange(low, high, device=self.positions.device)
        own = self.own()[:, start:stop, None]
        hidden = keys >= own - self.min_gap if self.past else keys <= own + self.min_gap
        hidden = hidden.expand(self.positions.shape[0], -1, -1)
        if window is not None:
            apart = self.positions[:, start:stop, None] - self.positions[:, None, low:high]
            hidden = hidden | (apart.abs() >= window)
        if self.n_pad is not None:
            hidden = hidden | (keys < self.n_pad[:, None, None])
        return hidden[:, None]


def sdpa(
    query: Float[Tensor, "batch head pos d_head"],
    keys: Float[Tensor, "batch kv_head pos d_head"],
    values: Float[Tensor, "batch kv_head pos d_head"],
    scale: float,
) -> Float[Tensor, "batch head pos d_head"]:
    """Causal attention of torch; the key heads are shared by a view, so that no key is copied for its group."""
    batch, n_heads, n, d_head = query.shape
    n_kv_heads = keys.shape[1]
    shape = (batch * n_kv_heads, n_heads // n_kv_heads, n, d_head)
    key, value = (states.reshape(-1, 1, n, d_head).expand(shape) for states in (keys, values))
    mixed = functional.scaled_dot_product_attention(query.reshape(shape), key, value, is_causal=True, scale=scale)
    return mixed.reshape(query.shape)


def attend(
    query: Float[Tensor, "batch head pos d_head"],
    keys: Float[Tensor, "batch kv_head pos d_head"],
    values: Float[Tensor, "batch kv_head pos d_head"],
    rule: Rule,
    sight: Sight,
    causal: Causal = sdpa,
) -> Float[Tensor, "batch head pos d_head"]:
    """What attention puts out for every row, 0 for one that sees nothing.

    Cost: half of full attention's products; memory a few copies of one layer's queries and keys.
    """
    if not _is_triangle(rule, sight):
        return _blockwise(query, keys, values, rule, sight)
    n_seeing = query.shape[2] - 1 - sight.min_gap
    output = torch.zeros_like(query)
    if n_seeing > 0 and sight.past:
        rows = query[:, :, -n_seeing:], keys[:, :, :n_seeing], values[:, :, :n_seeing]
        output[:, :, -n_seeing:] = causal(*rows, rule.scale)
    elif n_seeing > 0:
        rows = query[:, :, :n_seeing].flip(2), keys[:, :, -n_seeing:].flip(2), values[:, :, -n_seeing:].flip(2)
        output[:, :, :n_seeing] = causal(*rows, rule.scale).flip(2)
    return output


def _is_triangle(rule: Rule, sight: Sight) -> bool:
    """Whether what is seen is a triangle and nothing bends the scores (2); padding comes before any future."""
    if rule.softcap is not None or rule.sinks is not None or sight.edge is not None:
        return False
    if sight.past and sight.n_pad is not None:
        return False
    far = sight.positions[:, -1] - sight.positions.min(1).values
    return rule.window is None or int(far.max()) < rule.window


def _blockwise(query: Tensor, keys: Tensor, values: Tensor, rule: Rule, sight: Sight) -> Tensor:
    """The same a block of queries at a time (3)."""
    n, output = query.shape[2], torch.zeros_like(query)
    own = sight.own()
    start = 0
    while start < n:
        # 1. the rows that any of the block's queries can see: a window makes them few, so that blocks may be longer,
        # but a block sees its own rows beside those in reach
        reach = min(n, rule.window or n)
        stop = min(n, start + max(ROWS, min(BLOCK // (2 * reach), isqrt(BLOCK // 2))))
        low, high = _span(sight, own[:, start:stop], start, stop, rule.window)
        if low < high:
            hidden = sight.hidden(start, stop, low, high, rule.window)
            rows, seen = wide(query[:, :, start:stop]), wide(keys[:, :, low:high])
            weights, _ = weights_without(rows, seen, rule, hidden)
            weights = weights.masked_fill_(hidden, 0)  # 4. also what softmax made of a row that sees nothing: NaN
            output[:, :, start:stop] = weighted_values(weights, values[:, :, low:high]).to(query.dtype)
        start = stop
    return output


def _span(sight: Sight, own: Tensor, start: int, stop: int, window: int | None) -> tuple[int, int]:
    """The rows [low, high) outside of which the rows [start, stop) see nothing."""
    n = sight.positions.shape[1]
    low, high = (0, int(own.max()) - sight.min_gap) if sight.past else (int(own.min()) + sight.min_gap + 1, n)
    if window is not None and sight.past:
        near = sight.positions > sight.positions[:, start, None] - window
        low = max(low, int(near.int().argmax(1).min()))
    elif window is not None:
        near = sight.positions < sight.positions[:, stop - 1, None] + window
        high = min(high, int(near.sum(1).max()))
    return low, max(high, low)
