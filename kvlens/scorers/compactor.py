"""`compactor`: keys that stand out from the others, and keys that their surroundings look at.

1. Leverage: the keys held, before rotation and centred, X, are drawn down to `sketch` dimensions by a fixed random
   matrix; a key's leverage is x'(X'X)^-1 x: near 1 for one that no mix of the others gives.
2. Mass: the text is cut into chunks of 256 tokens; within each every query sees every key, later ones too. What a key
   receives, summed over the queries, mean over the group, times the norm of its value, mean over 3 neighbouring slots.
   It is taken when the chunk is full, and before that, when asked for, from the part there is.
3. Both are standardised over the slots and heads of a layer; the score is `blend` times leverage, plus mass.
4. The first `sinks` tokens are in neither: NaN, not judged, so they stay.
5. An eviction closes the open chunk, and from then on a chunk ends with the pass it came in, so that a cache that was
   made small carries no queries. A decoded token then sees itself alone: a mass of 1, which is the mean of all.

As in the authors' engine and in kvpress the products of 2. are not scaled. Where heads hold different numbers of tokens
a head is shown alone, and 3. is over its own slots.

Query-agnostic as far as the question is no part of the prompt; meant for prefill. Cost: 256 keys for each query, and a
solve of sketch x sketch a head. Carried: queries and keys of the open chunk, a number a token, layer and KV head.

Source: Compactor, arXiv 2507.08143.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvlens.errors import InputError
from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import Rule, weights_without
from kvlens.scorers.asking import Pool
from kvlens.scorers.expected_attention import Left
from kvlens.scorers.frozen import Frozen
from kvlens.scorers.interface import EMPTY, NOTES, ROTATION, Asked, Facts, Kept, Number, Plain, Seed, Seen, Views

Chunk = Annotated[int, Field(ge=1, le=1024)]
Sketch = Annotated[int, Field(ge=1, le=1024)]
RIDGE = 1e-2  # on the diagonal of X'X, as in kvpress, so that fewer keys than dimensions can be solved too
ROUNDING = 1e-10  # of its trace, as well


@dataclass(frozen=True)
class Chunks:
    """The mass of tokens in closed chunks, by layer and KV head; queries and keys of the open one, on the right.

    `positions` are those of the open chunk, -1 where a row has fewer; `carries` says which rows still carry one.
    None before the first token.
    """

    layers: tuple[int, ...]
    n_kv_heads: int
    closed: Frozen = field(default_factory=Frozen)
    positions: Int[Tensor, "batch open"] | None = None
    queries: Float[Tensor, "batch layer head open d_head"] | None = None
    keys: Float[Tensor, "batch layer kv_head open d_head"] | None = None
    carries: Bool[Tensor, " batch"] | None = None

    def select(self, kept: Kept) -> Chunks:
        """After an eviction: 5."""
        if self.positions is None or self.queries is None or self.keys is None or self.carries is None:
            return self
        closed = self.closed
        if self.positions.shape[1]:
            each = [self.open_mass(layer) for layer in range(len(self.layers))]
            closed = closed.append(self.positions, torch.stack(each, 1))
        none = slice(0, 0)
        return replace(
            self,
            closed=closed.select(kept),
            positions=self.positions[:, none].clone(),
            queries=self.queries[:, :, :, none].clone(),
            keys=self.keys[:, :, :, none].clone(),
            carries=torch.zeros_like(self.carries),
        )

    def open_mass(self, layer: int) -> Float[Tensor, "batch kv_head open"]:
        """2. of the open chunk, of the layer at this place."""
        if self.positions is None or self.queries is None or self.keys is None:
            raise InputError("a state without tokens has no open chunk")
        return _mass(self.queries[:, layer], self.keys[:, layer], self.positions != EMPTY)


@dataclass(frozen=True)
class _Row:
    """How open and new tokens lie together, padding and sinks (-1) on the left; the last `n_open` stay open.

    `order` is how they have to be moved to lie so, None where they do.
    """

    order: Int[Tensor, "batch tokens"] | None
    positions: Int[Tensor, "batch tokens"]
    n_real: Int[Tensor, " batch"]
    n_open: Int[Tensor, " batch"]

    @property
    def width(self) -> int:
        """Columns that the open chunks take."""
        return int(self.n_open.max())


@dataclass(frozen=True)
class Compactor(Plain):
    """Leverage and mass, blended."""

    sketch: Sketch = 48
    blend: Number = 0.35
    chunk: Chunk = 256
    pool: Pool = 3
    sinks: Left = 4
    seed: Seed = 0

    needs = frozenset({NOTES, ROTATION})
    per_layer = True

    def init(self, facts: Facts) -> Chunks:
        """No token."""
        return Chunks(facts.layers, facts.n_kv_heads)

    def note(self, state: Chunks, asked: Asked) -> tuple[Tensor, ...]:
        """2. for one layer: the mass of every token in a chunk now full, and the open chunk's queries and keys."""
        row = self._row(state, asked.positions)
        queries, keys = asked.queries, asked.keys
        if state.queries is not None and state.keys is not None:
            layer = state.layers.index(asked.layer)
            queries = torch.cat([state.queries[:, layer].to(queries.device), queries], 2)
            keys = torch.cat([state.keys[:, layer].to(keys.device), keys], 2)
        if row.order is not None:
            queries, keys = _taken(queries, row.order), _taken(keys, row.order)
        mass = torch.full(keys.shape[:3], -torch.inf, device=keys.device)
        n_columns = keys.shape[2]
        start, stop = n_columns - row.n_real[:, None], n_columns - row.n_open[:, None]
        for number in range(math.ceil(int((stop - start).max()) / self.chunk)):
            place = start + number * self.chunk + torch.arange(self.chunk, device=start.device)
            real = (place < stop).to(keys.device)
            place = place.clamp(max=n_columns - 1)
            found = _mass(_taken(queries, place), _taken(keys, place), real)
            place = place[:, None].to(keys.device).expand(found.shape)
            mass.scatter_reduce_(2, place, found.masked_fill(~real[:, None], -torch.inf), "amax")
        mass.masked_fill_(mass.isinf(), torch.nan)
        cut = keys.shape[2] - row.width
        return mass, queries[:, :, cut:].clone(), keys[:, :, cut:].clone()

    def observe(self, state: Chunks, seen: Seen) -> Chunks:
        """2. for the new tokens."""
        row, device = self._row(state, seen.positions), seen.positions.device
        mass, queries, keys = (
            torch.stack([seen.notes[layer][part].to(device) for layer in state.layers], 1) for part in range(3)
        )
        column = torch.arange(row.positions.shape[1], device=device)
        is_open = column >= row.positions.shape[1] - row.n_open[:, None]
        closed = state.closed
        if bool((row.n_real > row.n_open).any()):
            since = row.positions.shape[1] - int(row.n_real.max())
            closed = closed.append(row.positions.masked_fill(is_open, EMPTY)[:, since:], mass[..., since:])
        open_ = row.positions.masked_fill(~is_open, EMPTY)[:, row.positions.shape[1] - row.width :].clone()
        carries = torch.ones(len(open_), dtype=torch.bool, device=device) if state.carries is None else state.carries
        return replace(state, closed=closed, positions=open_, queries=queries, keys=keys, carries=carries)

    def score(self, state: Chunks, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """1. to 4."""
        if state.positions is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        judged = (views.positions >= self.sinks).expand(-1, views.keys.shape[1], -1)
        norm = torch.linalg.vector_norm(wide(views.values), dim=-1)
        mass = _pooled(self._received(state, views).to(norm.device) * norm, judged, self.pool)
        leverage = self._leverage(state, views, judged)
        score = self.blend * _standardised(leverage, judged) + _standardised(mass, judged)
        return score.masked_fill(~judged, torch.nan)

    def _row(self, state: Chunks, positions: Int[Tensor, "batch new"]) -> _Row:
        """How the new tokens go on from the open chunk."""
        positions = positions.to(torch.int32).masked_fill(positions < self.sinks, EMPTY)
        if state.positions is not None:
            positions = torch.cat([state.positions, positions], -1)
        order = None
        if bool((positions == EMPTY).any()):
            order = (positions != EMPTY).to(torch.int8).sort(dim=-1, stable=True).indices
            positions = positions.gather(-1, order)
        n_real = (positions != EMPTY).sum(-1)
        n_open = n_real % self.chunk  # what was open starts a chunk
        if state.carries is not None:
            n_open = n_open.masked_fill(~state.carries, 0)
        return _Row(order, positions, n_real, n_open)

    def _received(self, state: Chunks, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """2.: the mass of every slot, from the full chunks or the open one."""
        layer = state.layers.index(views.layer)
        found = state.closed.look_up(views, layer)
        if state.positions is None or state.positions.shape[1] == 0:
            return found
        part = Frozen(state.positions, state.open_mass(layer)[:, None]).look_up(views, 0)
        return torch.where(found.isnan(), part, found)

    def _leverage(
        self, state: Chunks, views: Views, judged: Bool[Tensor, "batch kv_head kept"]
    ) -> Float[Tensor, "batch kv_head kept"]:
        """1."""
        if views.rotation is None:
            raise InputError("a scorer that reads keys before rotation was shown no rotation")
        keys = views.rotation.undo(views.keys, views.positions).masked_fill(~judged[..., None], 0.0)
        mean = keys.sum(2, keepdim=True) / judged.sum(-1).clamp(min=1)[..., None, None]
        rows = (keys - mean).masked_fill_(~judged[..., None], 0.0)
        if self.sketch < keys.shape[-1]:  # else every direction is kept, and which ones they are mixed to says nothing
            source = torch.Generator().manual_seed((self.seed + views.layer) % 2**63)
            sketch = torch.randn(state.n_kv_heads, keys.shape[-1], self.sketch, generator=source)
            rows = rows @ (sketch[views.kv_heads] / math.sqrt(self.sketch)).to(rows)
        rows = rows.double()
        gram = rows.mT @ rows
        ridge = RIDGE + ROUNDING * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge[..., None])
        solved: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram)[0], rows.mT, upper=False)
        return solved.square().sum(-2).float()


def _mass(
    queries: Float[Tensor, "batch head tokens d_head"],
    keys: Float[Tensor, "batch kv_head tokens d_head"],
    real: Bool[Tensor, "batch tokens"],
) -> Float[Tensor, "batch kv_head tokens"]:
    """2. for one chunk: what each key receives from all its queries."""
    weights = weights_without(wide(queries), wide(keys), Rule(1.0), ~real[:, None, None])[0]
    total = weights.masked_fill_(~real[:, None, :, None], 0.0).sum(2)
    return total.reshape(*keys.shape[:2], -1, keys.shape[2]).mean(2)


def _taken(states: Float[Tensor, "batch head tokens d_head"], place: Int[Tensor, "batch some"]) -> Tensor:
    """The states at these places of each row."""
    index = place[:, None, :, None].to(states.device)
    return states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3]))


def _pooled(
    values: Float[Tensor, "batch kv_head kept"], judged: Bool[Tensor, "batch kv_head kept"], width: int
) -> Tensor:
    """The mean over neighbouring slots, as if those that count stood next to one another; beyond the ends is 0."""
    place = (judged.cumsum(-1) - 1).clamp(min=0)
    packed = torch.zeros_like(values).scatter_add_(-1, place, values.masked_fill(~judged, 0.0))
    return avg_pool1d(packed, width, stride=1, padding=width // 2).gather(-1, place)


def _standardised(
    values: Float[Tensor, "batch kv_head kept"], judged: Bool[Tensor, "batch kv_head kept"]
) -> Float[Tensor, "batch kv_head kept"]:
    """3. for one of the two."""
    count = judged.sum((1, 2), keepdim=True)
    values = values.masked_fill(~judged, 0.0)
    off = (values - values.sum((1, 2), keepdim=True) / count.clamp(min=1)).masked_fill(~judged, 0.0)
    spread = (off.square().sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return off / spread.clamp(min=1e-6)
