"""`rkv`: keys that the last queries look at and that no other key repeats.

1. Importance: the scores of the last 8 queries over the slots older than they are, under the layer's own scaling and
   soft cap, the highest of the heads that share a KV head, then softmax over those slots, mean over the queries, and
   the highest of 7 neighbouring slots.
2. Redundancy: the cosine of a slot's key with every other held key of its KV head, mean over them, softmax over slots.
   A key spares the newest of those it resembles by more than .5: that cosine counts as 0, so that of many repetitions
   the last one stays.
3. lambda * importance - (1 - lambda) * redundancy. The window's own tokens are not judged yet, so they stay.

Defaults: `mix` (lambda) .07 as in the authors' code (the paper: .1), `window` 8, `pool` 7, `similar` .5. In their code
a key that resembles none spares the oldest slot; here it spares none. Query-aware. For decoding; needs queries (own
rows). Cost: 8 rows of weights a layer and refresh, and products of each held key with those that are newer than the
newest that it resembles (with all, where it resembles none); carried, 8 queries a layer.

Source: R-KV, arXiv 2505.24133.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import BLOCK, ROWS, Rule, scores_without
from kvlens.scorers.asking import Asking, Pool, QueryWindow, Shown, packed, unjudged
from kvlens.scorers.interface import EMPTY, QUERIES, Facts, Plain, Seen, Views

Mix = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Cosine = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class RKV(Plain):
    """Importance minus redundancy."""

    mix: Mix = 0.07
    window: QueryWindow = 8
    pool: Pool = 7
    similar: Cosine = 0.5

    needs = frozenset({QUERIES})
    per_layer = True

    @property
    def n_queries(self) -> int:  # type: ignore[override]
        """As many as the window holds."""
        return self.window

    def init(self, facts: Facts) -> Asking:
        """No query."""
        return Asking.of(facts)

    def observe(self, state: Asking, seen: Seen) -> Asking:
        """The last queries."""
        return state.extended(seen, self.window)

    def score(self, state: Asking, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """1. to 3."""
        shown = state.shown(views)
        if shown is None or views.rule is None:
            return unjudged(views)
        keys = wide(views.keys)
        real = (views.positions != EMPTY).to(keys.device).expand(-1, keys.shape[1], -1)
        gained = self.mix * _importance(shown, keys, views.rule, self.pool)
        lost = (1 - self.mix) * redundancy(keys, real, self.similar)
        return (gained - lost).masked_fill(~shown.judged, torch.nan)


def _importance(
    shown: Shown, keys: Float[Tensor, "batch kv_head kept d_head"], rule: Rule, pool: int
) -> Float[Tensor, "batch kv_head kept"]:
    """1."""
    group = shown.queries.shape[1] // keys.shape[1]
    hidden = ~shown.judged.repeat_interleave(group, 1)[:, :, None]
    scores = scores_without(shown.queries, keys, rule, hidden)
    highest = scores.reshape(len(scores), keys.shape[1], group, *scores.shape[2:]).amax(2)
    weights = highest.softmax(-1).masked_fill(~shown.asks[:, None, :, None], 0.0)
    mean = weights.nan_to_num(0.0).sum(2) / shown.n_asking  # of no judged slot at all there is none to share
    near, place = packed(mean, shown.judged)
    return max_pool1d(near, pool, stride=1, padding=pool // 2).gather(-1, place)


def redundancy(
    keys: Float[Tensor, "batch kv_head kept d_head"], real: Bool[Tensor, "batch kv_head kept"], similar: float
) -> Float[Tensor, "batch kv_head kept"]:
    """2., without a matrix of all slots by all slots."""
    directions = normalize(keys, dim=-1).masked_fill(~real[..., None], 0.0)
    total = (directions * directions.sum(2, keepdim=True)).sum(-1) - directions.square().sum(-1)
    for row in range(len(keys)):
        for head in range(keys.shape[1]):
            total[row, head] -= _spared(directions[row, head], real[row, head], similar)
    mean = total / real.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~real, -torch.inf).softmax(-1)


def _spared(
    directions: Float[Tensor, "kept d_head"], real: Bool[Tensor, " kept"], similar: float
) -> Float[Tensor, " kept"]:
    """The cosines that count as 0, by the slot that they would have counted for; a key of length 0 resembles none.

    Looked for from the newest slots on: most keys resemble one of the last few hundred and need no further look.
    """
    n_slots, spared = len(directions), directions.new_zeros(len(directions))
    width = max(ROWS, BLOCK // n_slots)
    searching = real.nonzero()[:, 0]
    for stop in range(n_slots, 0, -width):
        if not len(searching):
            break
        place = torch.arange(max(0, stop - width), stop, device=directions.device)
        cosines = directions.index_select(0, searching) @ directions[place[0] : stop].mT
        cosines.masked_fill_(searching[:, None] == place, 0.0)
        newest = torch.where(cosines > similar, place, -1).amax(-1)
        found = newest >= 0
        newest, cosines, searching = newest[found], cosines[found], searching[~found]
        spared.index_add_(0, newest, cosines.gather(-1, (newest - place[0])[:, None])[:, 0])
    return spared
