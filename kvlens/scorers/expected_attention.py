"""`expected_attention`: what queries that are still to come will look at, if they are drawn like those so far.

1. Of the queries before rotation: number, mean and sum of squared deviations, for every row, layer and head, in float32
   and merged pass by pass. The first `sinks` tokens are left out: theirs are outliers.
2. The next `future` positions after a row's last token turn mean mu and covariance S by the mean of their rotations.
3. A query q ~ N(mu, S) weighs key k by exp(c q.k), in the mean exp(c k.mu + c^2 k'Sk / 2); c is the layer's own scale,
   1/sqrt(d_head) in most. These over their sum over the slots held, sinks left out; mean over the group.
4. Times the norm of the value. Slots left out and rows without a query have no score: NaN, not judged, so they stay.

A soft cap and a learned sink of the layer are left out of 3. Decoded tokens' queries count like the prompt's.

Query-agnostic as far as the question is no part of the prompt. Needs no attention weights. Cost: as much as d_head more
keys would cost each query, and d_head * d_head numbers a head to carry.

Source: Expected Attention, arXiv 2510.00636.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables.arithmetic import wide
from kvlens.scorers.interface import EMPTY, NOTES, ROTATION, Asked, Facts, Plain, Seen, Views

Future = Annotated[int, Field(ge=1, le=65_536)]
Left = Annotated[int, Field(ge=0, le=4096)]


@dataclass(frozen=True)
class Moments:
    """Of the queries so far, float32; `n_seen` counts the row's tokens. None before the first."""

    layers: tuple[int, ...]
    group: int  # query heads that share a KV head
    n_seen: Int[Tensor, " batch"] | None = None
    count: Float[Tensor, " batch"] | None = None
    mean: Float[Tensor, "batch layer head d_head"] | None = None
    spread: Float[Tensor, "batch layer head d_head d_head"] | None = None  # sum of squared deviations


@dataclass(frozen=True)
class ExpectedAttention(Plain):
    """The attention that future queries are expected to give, times the value's norm."""

    future: Future = 512
    sinks: Left = 4

    needs = frozenset({NOTES, ROTATION})
    per_layer = True

    def init(self, facts: Facts) -> Moments:
        """No query."""
        return Moments(facts.layers, facts.n_heads // facts.n_kv_heads)

    def note(self, state: Moments, asked: Asked) -> tuple[Tensor, ...]:
        """1. for the new tokens of one layer: their mean and the sum of their squared deviations."""
        if asked.rotation is None:
            raise InputError("a scorer that reads queries before rotation was shown no rotation")
        queries = asked.rotation.undo(asked.queries, asked.positions[:, None])
        out = ~self._counts(asked.positions).to(queries.device)[:, None, :, None]
        mean = queries.masked_fill(out, 0.0).sum(2, keepdim=True) / (~out).sum(2, keepdim=True).clamp(min=1)
        off = (queries - mean).masked_fill_(out, 0.0)
        return mean[:, :, 0], off.mT @ off

    def observe(self, state: Moments, seen: Seen) -> Moments:
        """1.: the new tokens' moments merged with those so far."""
        device = seen.positions.device
        mean, spread = (
            torch.stack([seen.notes[layer][part].to(device) for layer in state.layers], 1) for part in range(2)
        )
        count = self._counts(seen.positions).sum(-1).to(mean)
        n_seen = seen.positions.amax(-1) + 1
        if state.mean is None or state.spread is None or state.count is None or state.n_seen is None:
            return replace(state, n_seen=n_seen, count=count, mean=mean, spread=spread)
        total = state.count + count
        share = (count / total.clamp(min=1))[:, None, None, None]
        step = mean - state.mean
        between = (step * share * state.count[:, None, None, None])[..., None] * step[..., None, :]
        return replace(
            state,
            n_seen=torch.maximum(state.n_seen, n_seen),
            count=total,
            mean=state.mean + step * share,
            spread=state.spread + spread + between,
        )

    def score(self, state: Moments, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """2. to 4."""
        if state.mean is None or state.count is None or views.rule is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        keys = wide(views.keys)
        mean, covariance = self._to_come(state, views)
        real = self._counts(views.positions)
        scale, weights = views.rule.scale, torch.zeros_like(keys[..., 0])
        for member in range(state.group):
            linear = (keys @ mean[:, :, member, :, None])[..., 0]
            squared = ((keys @ covariance[:, :, member]) * keys).sum(-1)
            exponent = scale * linear + scale**2 / 2 * squared
            weights += exponent.masked_fill(~real, -torch.inf).softmax(-1)
        norm: Tensor = torch.linalg.vector_norm(wide(views.values), dim=-1)
        scores = weights / state.group * norm
        none = (state.count[views.rows] == 0)[:, None, None].to(real.device)
        return scores.masked_fill(~real | none, torch.nan)

    def _counts(self, positions: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Which tokens are no padding and not left out."""
        return (positions >= self.sinks) & (positions != EMPTY)

    def _to_come(self, state: Moments, views: Views) -> tuple[Tensor, Tensor]:
        """2.: mean [batch, kv_head, group, d] and covariance [batch, kv_head, group, d, d] of the queries to come."""
        if state.mean is None or state.spread is None or state.count is None or state.n_seen is None:
            raise InputError("a state without queries expects none")
        layer, device = state.layers.index(views.layer), views.keys.device
        mean, spread = state.mean[views.rows, layer].to(device), state.spread[views.rows, layer].to(device)
        covariance = spread / state.count[views.rows].clamp(min=1)[:, None, None, None].to(device)
        d_head = mean.shape[-1]
        mean = mean.reshape(len(mean), -1, state.group, d_head)[:, views.kv_heads]
        covariance = covariance.reshape(len(mean), -1, state.group, d_head, d_head)[:, views.kv_heads]
        if views.rotation is None:
            raise InputError("a scorer that reads queries before rotation was shown no rotation")
        ahead = state.n_seen[views.rows].to(device)[:, None] + torch.arange(self.future, device=device)
        turn = views.rotation.mean_over(ahead, d_head)[:, None, None]
        return (mean[..., None, :] @ turn)[..., 0, :], turn.mT @ covariance @ turn
