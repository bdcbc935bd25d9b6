"""`lagkv`: tokens whose key and value stand out from the range of a neighbouring chunk.

Paper's form (per layer and KV head):
1. chunks of 128 positions; every channel of a slot's key (and value) is scaled by its range over the *next* chunk, as
   it was when that chunk came;
2. the standard deviation over channels (n - 1), softmax over the slots of its chunk that are held, keys' and values'
   added. A chunk is judged once the next one is whole; until then it stays.

`causal` (EpiKV's): 3. the range of the *previous* chunk, in the first chunk the raw deviation; no softmax; keys' and
values' added, mean over all managed layers and KV heads: one number a token, frozen when it is made.

A budget below two chunks cannot hold what is not judged yet, and keeps the oldest of it: give chunks that fit.

Source: LagKV, arXiv 2504.04704 (sinks are `protect.sinks`); the causal form: EpiKV, arXiv 2606.26472.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.observables.arithmetic import deviation
from kvlens.observables.lag import CHUNK
from kvlens.scorers.frozen import Frozen
from kvlens.scorers.interface import EMPTY, KEYS, VALUES, Facts, Kept, Plain, Seen, Views, Window
from kvlens.scorers.ranges import Ranges


@dataclass(frozen=True)
class Lagging:
    """The ranges of chunks that are still asked for; for `causal` every held token's number."""

    ranges: Ranges
    causal: bool
    frozen: Frozen = field(default_factory=Frozen)

    def select(self, kept: Kept) -> Lagging:
        """Ranges are asked for by tokens held in the chunk before, and by those to come."""
        if self.causal:
            return replace(self, frozen=self.frozen.select(kept))
        if self.ranges.chunks is None or self.ranges.n_seen is None:
            return self
        chunks, size = self.ranges.chunks[0], self.ranges.size
        wanted = chunks >= int(self.ranges.n_seen.min()) // size
        for positions in kept.positions:
            held = positions[positions != EMPTY].long() // size + 1
            wanted = wanted | torch.isin(chunks, held)
        return replace(self, ranges=self.ranges.dropped(wanted))


@dataclass(frozen=True)
class LagKV(Plain):
    """The scaled deviation of key and value."""

    chunk: Window = CHUNK
    causal: bool = False

    needs = frozenset({KEYS, VALUES})

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """In the paper's form."""
        return not self.causal

    def init(self, facts: Facts) -> Lagging:
        """Nothing seen."""
        return Lagging(Ranges(self.chunk, facts.layers), self.causal)

    def observe(self, state: Lagging, seen: Seen) -> Lagging:
        """1., or 3. in whole."""
        states = {layer: (seen.keys[layer], seen.values[layer]) for layer in state.ranges.layers}
        ranges = state.ranges.extended(seen.positions, states)
        if not self.causal:
            return replace(state, ranges=ranges)
        numbers = causal_numbers(ranges, seen.positions, states)
        return Lagging(of_the_last(ranges), True, state.frozen.append(seen.positions, numbers))

    def score(self, state: Lagging, views: Views) -> Float[Tensor, "batch heads kept"]:
        """2., or the frozen number of every slot."""
        if self.causal:
            return state.frozen.look_up(views)
        ranges = state.ranges
        if ranges.chunks is None or ranges.n_seen is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        positions = views.positions.expand(-1, views.keys.shape[1], -1).long()
        own = positions.div(self.chunk, rounding_mode="floor")
        found = ranges.deviations(views.layer, own + 1, (views.keys, views.values), views.rows, views.kv_heads)
        found = found.to(positions.device)
        whole = (own + 2) * self.chunk <= ranges.n_seen[views.rows, None, None]
        judged = (positions != EMPTY) & whole
        return sum_of_softmaxes(found, own, judged).masked_fill(~judged, torch.nan)


def sum_of_softmaxes(
    values: Float[Tensor, "2 batch kv_head slots"], group: Int[Tensor, "batch kv_head slots"], counts: Tensor
) -> Float[Tensor, "batch kv_head slots"]:
    """2.: the softmax of both over the slots of one group that count, added."""
    group = (group.clamp(min=0)).expand(values.shape)
    shape = (*values.shape[:-1], int(group.max()) + 1)
    values = values.masked_fill(~counts, -torch.inf)
    highest = values.new_full(shape, -torch.inf).scatter_reduce_(-1, group, values, "amax")
    raised = (values - highest.gather(-1, group)).exp().masked_fill(~counts, 0.0)
    total = values.new_zeros(shape).scatter_add_(-1, group, raised)
    return (raised / total.gather(-1, group)).sum(0)


def causal_numbers(
    ranges: Ranges, positions: Int[Tensor, "batch new"], states: dict[int, tuple[Tensor, Tensor]]
) -> Float[Tensor, "batch new"]:
    """3. for the new tokens, NaN for padding; `ranges` hold theirs already."""
    before = positions.long().div(ranges.size, rounding_mode="floor") - 1
    total = torch.zeros(positions.shape, device=positions.device)
    for layer, pair in states.items():
        asked = before[:, None].expand(-1, pair[0].shape[1], -1)
        scaled = ranges.deviations(layer, asked, pair)
        raw = torch.stack([deviation(part, 1).to(positions.device) for part in pair])
        total += torch.where((before < 0)[:, None], raw, scaled).sum(0).mean(1)
    return (total / len(states)).masked_fill(positions == EMPTY, torch.nan)


def of_the_last(ranges: Ranges) -> Ranges:
    """The ranges that tokens to come ask for: of the current chunk and the one before, in the row that saw least."""
    if ranges.chunks is None or ranges.n_seen is None:
        return ranges
    return ranges.dropped(ranges.chunks[0] >= int(ranges.n_seen.min()) // ranges.size - 1)
