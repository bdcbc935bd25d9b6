"""What do single query rows attend to, and what comes out? Rows of every layer and head, from one forward pass.

1. Choose: each key head of each layer gets its own queries, one drawn in each of `rows_per_head` equal stretches of the
   trace; the query heads of a group share them, so that a set kept for the whole group can be scored on them. The draw
   depends on the seed, the trace's id and the layer alone.
2. Run the model as it is, on its own attention backend, and look at what every attention layer is called with.
3. Recompute the chosen rows alone from the layer's own queries, keys and values, in float64, and keep them in float32:
   weights, values, dense output. No tensor of all queries by all keys exists beside those the backend makes.
4. Hold every row against what the layer put out (`row_block.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.linear import fast_linear
from kvlens.model import Model
from kvlens.observables.attention_weights import Rule, weighted_values, weights_and_sinks
from kvlens.probe.row_block import RowBlock, RowCheck, make_block
from kvlens.probe.signal_pass import require_finite
from kvlens.records import Tokens

ROWS_PER_HEAD = 6


def choose_queries(
    model: Model, tokens: Tokens, *, rows_per_head: int = ROWS_PER_HEAD, seed: int = 0, least_keys: int = 1
) -> Int[np.ndarray, "layer kv_head row"]:
    """The queries of every key head: positions in rising order, one in each of `rows_per_head` equal stretches.

    `least_keys` is how many keys a row must see. The draw depends on nothing but the arguments and the trace's id.

    Raises: InputError where the trace is empty or has too few queries that see so many keys.
    """
    what = f"rows of trace {tokens.trace.id!r}"
    if rows_per_head < 1 or least_keys < 1:
        raise InputError(
            f"{what}: {rows_per_head} rows a head that see {least_keys} keys", "both are whole numbers from 1 on"
        )
    if tokens.n_tokens == 0:
        raise InputError(f"{what}: it has no tokens", "leave it out")
    narrow = [window for window in model.sliding if window is not None and window < least_keys]
    if narrow:
        raise InputError(
            f"{what}: rows that see {least_keys} keys were asked for, and a layer with a sliding window of "
            f"{narrow[0]} shows no query so many",
            f"ask for at most {narrow[0]}",
        )
    room = tokens.n_tokens - least_keys + 1
    if room < rows_per_head:
        raise InputError(
            f"{what}: {rows_per_head} rows a head were asked for, and {max(room, 0)} of its {tokens.n_tokens} tokens "
            f"see {least_keys} keys or more",
            "use longer traces, fewer rows a head or smaller budgets",
        )
    edges = least_keys - 1 + np.arange(rows_per_head + 1) * room // rows_per_head
    name = np.frombuffer(hashlib.sha256(tokens.trace.id.encode()).digest(), dtype=np.uint32).tolist()
    shape = (model.n_kv_heads, rows_per_head)
    draws = [np.random.default_rng([seed, layer, *name]).random(shape) for layer in range(model.n_layers)]
    # A draw is below 1; its product with a width may still be rounded up to it.
    steps = np.minimum((np.stack(draws) * np.diff(edges)).astype(np.int64), np.diff(edges) - 1)
    return edges[:-1] + steps


@torch.no_grad()  # not inference_mode: blocks live on, and its tensors could not be changed in place
def read_rows(
    model: Model,
    tokens: Tokens,
    queries: Int[np.ndarray, "layer kv_head row"],
    take: Callable[[RowBlock], None],
) -> RowCheck:
    """The check of the rows at these queries (see `choose_queries`), which `take` is given layer by layer.

    `take` is called inside the forward pass: a block it does not keep is freed before the next layer runs.

    Raises: InputError for queries the trace does not have; ModelRefused where the model's output is not finite.
    Cost: one forward pass on the model's own backend, plus the rows; memory of one block beside the pass.
    """
    check_queries(model, tokens, queries)
    total = RowCheck()

    def around(
        layer: int, own: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, keywords: Mapping[str, Any]
    ) -> Tensor:
        nonlocal total
        output = own()
        rule = Rule.of_call(query, model.sliding[layer], keywords)
        at = torch.from_numpy(queries[layer]).to(query.device)
        block = _captured(tokens.trace.id, layer, at, (query[0], key[0], value[0], output[0]), rule)
        total += RowCheck.of(block)
        take(block)
        return output

    ids = torch.from_numpy(tokens.ids).to(model.device)
    with models.around_attention(model, around), fast_linear():
        states = models.hidden(model, ids[None])[0]
    require_finite(states)
    return total


def row_blocks(
    model: Model,
    everything: Sequence[Tokens],
    *,
    rows_per_head: int = ROWS_PER_HEAD,
    seed: int = 0,
    least_keys: int = 1,
) -> Iterator[RowBlock]:
    """The rows of every trace and layer, in order; arguments as in `choose_queries`, errors as in `read_rows`.

    Memory: the blocks of one trace at a time. `read_rows` holds one layer's alone.

    Raises: InputError where there is no trace, or for one that is too short, before the model runs.
    """
    if not everything:
        raise InputError("rows of no trace were asked for", "give at least one")
    options = {"rows_per_head": rows_per_head, "seed": seed, "least_keys": least_keys}
    chosen = [choose_queries(model, tokens, **options) for tokens in everything]
    for tokens, queries in zip(everything, chosen, strict=True):
        blocks: list[RowBlock] = []
        read_rows(model, tokens, queries, blocks.append)
        yield from blocks


def check_queries(model: Model, tokens: Tokens, queries: Int[np.ndarray, "layer kv_head row"]) -> None:
    """Nothing; raises InputError for queries that are not of this model and trace."""
    what = f"rows of trace {tokens.trace.id!r}"
    if queries.shape[:2] != (model.n_layers, model.n_kv_heads) or not queries.size:
        raise InputError(
            f"{what}: queries of shape {queries.shape}, and {model.name} has {model.n_layers} layers of "
            f"{model.n_kv_heads} key heads",
            "choose_queries makes them",
        )
    if queries.min() < 0 or queries.max() >= tokens.n_tokens:
        raise InputError(f"{what}: queries {queries.min()} to {queries.max()}, and it has {tokens.n_tokens} tokens")


def _captured(
    trace_id: str,
    layer: int,
    queries: Int[Tensor, "kv_head row"],
    states: tuple[Tensor, Tensor, Tensor, Tensor],
    rule: Rule,
) -> RowBlock:
    """The rows of one layer, from its queries [head, pos, d_head], keys, values and output [pos, head, d_head]."""
    query, keys, values, output = states
    positions = queries.repeat_interleave(query.shape[0] // keys.shape[0], 0)
    index = positions[..., None].expand(-1, -1, query.shape[-1])
    rows = query.gather(1, index)
    weights, sink = weights_and_sinks(rows.double(), keys.double(), rule, positions)
    dense = weighted_values(weights, values)
    plain = _plain(rows, keys, values, rule, positions)
    return make_block(
        trace_id,
        layer,
        queries,
        weights,
        values,
        dense,
        sink=sink,
        keys=keys,
        own=output.transpose(0, 1).gather(1, index),
        plain=plain,
        window=rule.window,
    )


def _plain(
    rows: Float[Tensor, "head row d_head"],
    keys: Float[Tensor, "kv_head key d_head"],
    values: Float[Tensor, "kv_head key d_head"],
    rule: Rule,
    positions: Int[Tensor, "head row"],
) -> Float[Tensor, "head row d_head"]:
    """The rows' output written out in the model's own dtype, as its eager attention would: how good that dtype is."""
    weights, _ = weights_and_sinks(rows, keys, rule, positions)
    return weighted_values(weights.to(values.dtype), values)
