"""How much does each query attend to each key, without a matrix of all queries by all keys?

1. scores: query times key, scaled, soft-capped where the model does so; query heads of a group share a key head.
   Queries and keys are those that attention sees: rotated, and normalised where the model normalises them;
2. a query sees the keys up to its own position, in a sliding window layer only the last `window` of them;
3. softmax in float32 or wider; a learned sink logit takes its share and is no key, so a row then sums to less than 1;
4. `blocks` goes through the queries some rows at a time, the fewer the more keys there are, so that all blocks are of
   about one size: memory does not grow with the square of the trace, and a freed block is room for the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.observables.arithmetic import wide

BLOCK = 2**18  # weights of one head in a block: 1 MB
ROWS = 16  # queries in a block at least


@dataclass(frozen=True)
class Rule:
    """How one layer turns queries and keys into weights."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None

    @classmethod
    def of_call(cls, query: Tensor, window: int | None, keywords: Mapping[str, Any]) -> Rule:
        """The rule of a layer with this window, from the keywords that transformers calls its attention with."""
        scaling = keywords.get("scaling")
        scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        return cls(scale, window, keywords.get("softcap"), keywords.get("s_aux"))


def attention_weights(
    query: Float[Tensor, "*batch head query d_head"], keys: Float[Tensor, "*batch kv_head key d_head"], rule: Rule
) -> Float[Tensor, "*batch head query key"]:
    """The weight of each key for each query; the queries are the last tokens among the keys."""
    n_query, n_key = query.shape[-2], keys.shape[-2]
    positions = torch.arange(n_key - n_query, n_key, device=query.device)[None]
    return weights_and_sinks(wide(query), wide(keys), rule, positions)[0]


def weights_and_sinks(
    query: Float[Tensor, "*batch head query d_head"],
    keys: Float[Tensor, "*batch kv_head key d_head"],
    rule: Rule,
    positions: Int[Tensor, "#head query"],
) -> tuple[Float[Tensor, "*batch head query key"], Float[Tensor, "*batch head query"]]:
    """The weight of each key for queries at these positions, and the share of the sink, 0 without one.

    The scores are in the dtype of query and keys, which must be one, the softmax in float32 at least.
    """
    distance = positions[..., None] - torch.arange(keys.shape[-2], device=query.device)
    hidden = (distance < 0) | (distance >= (rule.window or keys.shape[-2]))
    return weights_without(query, keys, rule, hidden)


def weights_without(
    query: Float[Tensor, "*batch head query d_head"],
    keys: Float[Tensor, "*batch kv_head key d_head"],
    rule: Rule,
    hidden: Bool[Tensor, "*#batch #head #query last"],
) -> tuple[Float[Tensor, "*batch head query key"], Float[Tensor, "*batch head query"]]:
    """The same with the keys of `hidden` unseen, whatever their place; NaN in a row that sees none and has no sink.

    `hidden` may cover the last keys alone: those before them are seen by all.
    """
    scores = scores_without(query, keys, rule, hidden)
    at_least = torch.promote_types(scores.dtype, torch.float32)
    if rule.sinks is None:
        return scores.softmax(-1, at_least), scores.new_zeros(scores.shape[:-1], dtype=at_least)
    sinks = rule.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1, at_least)
    return weights[..., :-1], weights[..., -1]


def scores_without(
    query: Float[Tensor, "*batch head query d_head"],
    keys: Float[Tensor, "*batch kv_head key d_head"],
    rule: Rule,
    hidden: Bool[Tensor, "*#batch #head #query last"],
) -> Float[Tensor, "*batch head query key"]:
    """What the softmax is taken of: minus infinity for the keys of `hidden`, which may cover the last keys alone."""
    scores = _grouped(query * rule.scale, keys.shape[-3]) @ keys.mT
    scores = scores.reshape(*query.shape[:-1], keys.shape[-2])
    if rule.softcap is not None:  # in place, here and below: a block of scores is the largest thing there is
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores[..., scores.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
    return scores


def unseen(
    positions: Int[Tensor, "batch heads key"], asking: Int[Tensor, "#batch #heads query"]
) -> Bool[Tensor, "batch heads query last"]:
    """Which keys each query does not see: later ones, and empty slots (position -1), which see nothing either.

    From the first key on that some query does not see; for a single query from the first key on, whatever it sees. A
    mask costs more than the softmax that it is for, and most keys are older than all who ask.
    """
    late = positions.masked_fill(positions < 0, torch.iinfo(positions.dtype).max)
    if asking.shape[-1] > 1:
        by_all = (late <= asking.amin()).flatten(0, 1).all(0)
        late = late[..., int(by_all.int().cumprod(0).sum()) :]
    return late[:, :, None] > asking[..., None]


def blocks(
    query: Float[Tensor, "*batch head pos d_head"],
    keys: Float[Tensor, "*batch kv_head pos d_head"],
    rule: Rule,
    size: int = BLOCK,
) -> Iterator[Float[Tensor, "*batch head query key"]]:
    """The weights of a whole trace in blocks of queries, each over the keys up to its last query.

    A block holds at most `size` weights a head, or `ROWS` queries.
    """
    keys, start = wide(keys), 0
    while start < query.shape[-2]:
        rows = int(((start**2 + 4 * size) ** 0.5 - start) / 2)  # the most for which rows * (start + rows) <= size
        stop = min(start + max(rows, ROWS), query.shape[-2])
        yield attention_weights(query[..., start:stop, :], keys[..., :stop, :], rule)
        start = stop


def weighted_values(
    weights: Float[Tensor, "*batch head query key"], values: Float[Tensor, "*batch kv_head key d_head"]
) -> Float[Tensor, "*batch head query d_head"]:
    """What attention puts out: each query's mean of the values under its weights, in the wider dtype of the two."""
    dtype = torch.promote_types(weights.dtype, values.dtype)
    mixed = _grouped(weights.to(dtype), values.shape[-3]) @ values.to(dtype)
    return mixed.reshape(*weights.shape[:-1], values.shape[-1])


def _grouped(states: Float[Tensor, "*batch head query d"], n_kv_heads: int) -> Float[Tensor, "*batch kv_head rows d"]:
    """The query heads of a group as more rows of their key head, so that no key is copied."""
    return states.reshape(*states.shape[:-3], n_kv_heads, -1, states.shape[-1])
