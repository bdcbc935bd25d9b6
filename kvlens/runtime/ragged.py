"""How does a layer hold heads of different lengths without padding, and attend to them?

1. `RaggedLayer` keeps the keys of all (row, KV head) pairs in one flat storage, [slots, d_head], each pair's slots next
   to one another with a few free ones behind; the values likewise. Padding is never stored.
2. New tokens go behind each pair's last slot. Where a pair has no room left the storage is laid out anew.
3. Eviction copies each pair's kept slots into fresh storage of exactly their number.
4. Attention takes the pairs one by one: the queries of the head's group against its own slots. No head is widened to
   another's length, and no KV head is repeated. FlashAttention takes all pairs at once (varlen.py).

The positions of a pair's slots are those of its row in the ledger's set that are not -1, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlens.errors import ModelRefused
from kvlens.runtime.cache import BLOCK_TOKENS, HeldLayer, Ledger, is_frozen
from kvlens.runtime.varlen import Kernel, attend_at_once
from kvlens.scorers.interface import EMPTY


class RaggedLayer(HeldLayer):
    """The kept tokens of one layer; every (row, KV head) pair holds its own number of slots."""

    is_ragged = True

    def __init__(self, ledger: Ledger, index: int, batch: int, n_kv_heads: int) -> None:
        super().__init__(ledger, index)
        self.is_initialized = True
        self.shape = batch, n_kv_heads
        self.lengths = [0] * (batch * n_kv_heads)
        self.starts = [0] * (batch * n_kv_heads)
        self.n_slots = 0  # as wide as the ledger's set
        self.last: tuple[Tensor, ...] = ()  # keys and values of the pass under way, for the scorer to observe

    @classmethod
    def of(cls, layer: HeldLayer, index: Int[Tensor, "batch kv_head kept"], positions: Tensor) -> RaggedLayer:
        """A layer with these slots of a dense one; positions say which of them are filling."""
        batch, n_kv_heads = layer.keys.shape[:2]
        made = cls(layer.ledger, layer.index, batch, n_kv_heads)
        made.n_seen = layer.n_seen
        index, positions = index.to(layer.keys.device), positions.to(layer.keys.device)
        pairs = [(b, h, index[b, h][positions[b, h] != EMPTY]) for b in range(batch) for h in range(n_kv_heads)]
        made._lay_out(
            [layer.keys[b, h].index_select(0, kept) for b, h, kept in pairs],
            [layer.values[b, h].index_select(0, kept) for b, h, kept in pairs],
        )
        made.n_slots = index.shape[-1]
        return made

    @property
    def n_kv_heads(self) -> int:
        return self.shape[1]

    @property
    def n_held(self) -> int:
        """Slots of the widest pair, padding that came since the last eviction counted."""
        return self.n_slots

    def update(
        self,
        key_states: Float[Tensor, "batch kv_head new d_head"],
        value_states: Float[Tensor, "batch kv_head new d_head"],
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """2. What comes back are the new tokens alone: attention reads the storage itself."""
        self.check()
        own = self.ledger.own
        new = key_states.shape[2]
        counts = [new] * self.shape[0] if own is None else own.sum(-1).tolist()
        counts = [n for n in counts for _ in range(self.shape[1])]
        room = [*self.starts[1:], self.keys.shape[0]]
        full = any(s + n + c > r for s, n, c, r in zip(self.starts, self.lengths, counts, room, strict=True))
        if full or is_frozen(self.keys):
            self._make_room([c + (BLOCK_TOKENS - 1 if new < BLOCK_TOKENS else 0) for c in counts])
        slots = torch.cat(
            [torch.arange(s + n, s + n + c) for s, n, c in zip(self.starts, self.lengths, counts, strict=True)]
        ).to(self.keys.device)
        for flat, states in ((self.keys, key_states), (self.values, value_states)):
            rows = states.flatten(0, 2)
            if own is not None:
                rows = rows[own.to(rows.device)[:, None].expand(-1, self.shape[1], -1).flatten()]
            flat.index_copy_(0, slots, rows)
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        self.n_seen += new
        self.n_slots += new
        self.last = key_states, value_states
        return key_states, value_states

    @property
    def new_keys(self) -> Float[Tensor, "batch kv_head new d_head"]:
        """Keys of the tokens that just came, padding included."""
        return self.last[0]

    @property
    def new_values(self) -> Float[Tensor, "batch kv_head new d_head"]:
        """Values of the tokens that just came."""
        return self.last[1]

    def forget_new(self) -> None:
        self.last = ()

    def pair(self, row: int, head: int) -> tuple[Float[Tensor, "kept d_head"], Float[Tensor, "kept d_head"]]:
        """Keys and values of one KV head of one row, not copies."""
        number = row * self.shape[1] + head
        slots = slice(self.starts[number], self.starts[number] + self.lengths[number])
        return self.keys[slots], self.values[slots]

    def evict_ragged(self, index: Int[Tensor, "batch kv_head kept"], held: Tensor, positions: Tensor) -> None:
        """3. `held` are the positions before: a slot's place in a pair is the number of real ones before it."""
        place = (held != EMPTY).cumsum(-1) - 1
        pairs = [(b, h) for b in range(self.shape[0]) for h in range(self.shape[1])]
        kept = [place[b, h][index[b, h][positions[b, h] != EMPTY]] for b, h in pairs]
        slots = torch.cat([start + k for start, k in zip(self.starts, kept, strict=True)]).to(self.keys.device)
        for part in range(2):
            self._set_room(part, (self.keys, self.values)[part].index_select(0, slots))
        self.lengths = [len(k) for k in kept]
        self.starts = [0, *accumulate(self.lengths)][:-1]
        self.n_slots = index.shape[-1]

    def _lay_out(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Fresh storage of exactly these rows."""
        self._set_room(0, torch.cat(keys))
        self._set_room(1, torch.cat(values))
        self.lengths = [len(rows) for rows in keys]
        self.starts = [0, *accumulate(self.lengths)][:-1]

    def _make_room(self, free: list[int]) -> None:
        """The same slots with so many free ones behind each pair's."""
        starts = [0, *accumulate(n + f for n, f in zip(self.lengths, free, strict=True))]
        for part in range(2):
            old = (self.keys, self.values)[part]
            room = old.new_empty((starts[-1], old.shape[1]))
            for start, before, n in zip(starts, self.starts, self.lengths, strict=False):
                room[start : start + n] = old[before : before + n]
            self._set_room(part, room)
        self.starts = starts[:-1]

    def select_rows(self, index: Int[Tensor, " rows"]) -> None:
        chosen = [(row, head) for row in index.tolist() for head in range(self.shape[1])]
        self._lay_out([self.pair(*pair)[0] for pair in chosen], [self.pair(*pair)[1] for pair in chosen])
        self.shape = len(index), self.shape[1]
        if self.index == self.ledger.layers[0]:
            self.ledger.select_rows(index)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("keys", self.keys), ("values", self.values))


def attend(
    layer: RaggedLayer,
    query: Float[Tensor, "batch head new d_head"],
    keywords: Mapping[str, Any],
    own: Bool[Tensor, "batch new"] | None,
    kernel: Kernel | None = None,
) -> Float[Tensor, "batch new head d_head"]:
    """4. What the layer puts out, at once where there is a kernel for it; what padding puts out is read by nobody.

    Raises: ModelRefused for attention with a soft cap or learned sinks.
    """
    for name in ("softcap", "s_aux"):
        if keywords.get(name) is not None:
            raise ModelRefused(f"attention with `{name}` over heads of different lengths", "use storage 'padded'")
    if kernel is not None:
        return attend_at_once(layer, query, keywords, own, kernel)
    batch, n_heads, new, d_head = query.shape
    group = n_heads // layer.shape[1]
    own = None if own is None else own.to(query.device)
    output = query.new_zeros((batch, new, n_heads, layer.values.shape[1]))
    for row in range(batch):
        mask = None if new == 1 and own is None else _tail(new, None if own is None else own[row], query.device)
        for head in range(layer.shape[1]):
            keys, values = layer.pair(row, head)
            if not len(keys):
                continue
            queries = query[row, head * group : (head + 1) * group]
            if mask is None:  # the group's queries are so many rows of one attention
                out = scaled_dot_product_attention(
                    queries.reshape(1, 1, group, d_head),
                    keys[None, None],
                    values[None, None],
                    scale=keywords["scaling"],
                )
                output[row, 0, head * group : (head + 1) * group] = out[0, 0]
                continue
            before = mask.new_ones((new, len(keys) - mask.shape[1]))
            seen = torch.cat([before, mask], 1)
            out = scaled_dot_product_attention(
                queries[None],
                keys.expand(1, group, -1, -1),
                values.expand(1, group, -1, -1),
                attn_mask=seen,
                scale=keywords["scaling"],
            )
            blind = ~seen.any(-1)
            out = out.masked_fill(blind[None, None, :, None], 0.0)
            output[row, :, head * group : (head + 1) * group] = out[0].transpose(0, 1)
    return output


def _tail(new: int, own: Bool[Tensor, " new"] | None, device: torch.device) -> Bool[Tensor, "new stored"]:
    """Which of the new tokens that were stored each new token sees."""
    mask = torch.ones(new, new, dtype=torch.bool, device=device).tril()
    return mask if own is None else mask[:, own]
