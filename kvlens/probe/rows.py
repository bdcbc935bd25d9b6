"""What do single query rows attend to, and what comes out? Rows of every layer and head, from one forward pass.

1. Choose: each key head of each layer gets its own queries, one drawn in each of `rows_per_head` equal stretches of the
   trace; the query heads of a group share them, so that a set kept for the whole group can be scored on them. The draw
   depends on the seed, the trace's id and the layer alone.
2. Run the model as it is, on its own attention backend, and look at what every attention layer is called with.
3. Recompute the chosen rows alone from the layer's own queries, keys and values, in float64, and keep them in float32:
   weights, values, dense output. No tensor of all queries by all keys exists beside those the backend makes.
4. Check every row against what the layer put out. The allowed error follows FlashAttention's tests: twice that of
   attention written out in plain torch at the model's dtype, the largest over the layer's rows, against float64; and
   one rounding of the layer's largest value in that dtype on top, which is what is left where plain torch makes none.

A learned sink logit is a key that is always kept, with value 0: its share is `sink`, and with it a row sums to 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.linear import fast_linear
from kvlens.model import Model
from kvlens.observables.attention_weights import Rule, weighted_values, weights_and_sinks
from kvlens.probe.signal_pass import require_finite
from kvlens.records import Tokens

ROWS_PER_HEAD = 6
SLACK = 2.0  # of plain torch's error


@dataclass(frozen=True, eq=False)
class RowBlock:
    """The rows of one layer of one trace, on the model's device; row i is query `queries[i]` of query head `heads[i]`.

    Rows go by head, then by query. `weights` are 0 for keys the query does not see (later ones, and those a sliding
    window hides) and sum to 1 with `sink`, up to rounding; `values[heads[i] // (n_heads / n_kv_heads)]` are the row's.
    `error` is the largest difference from the model's own output over d_head, `allowed` how large it may be.
    """

    trace_id: str
    layer: int
    heads: Int[Tensor, " row"]
    queries: Int[Tensor, " row"]
    weights: Float32[Tensor, "row key"]
    values: Float32[Tensor, "kv_head key d_head"]
    dense: Float32[Tensor, "row d_head"]
    sink: Float32[Tensor, " row"]
    key_norms: Float32[Tensor, "kv_head key"]
    n_keys: Int[Tensor, " row"]  # visible ones
    kv_heads: Int[Tensor, " row"]
    error: Float32[Tensor, " row"]
    allowed: float

    @property
    def off(self) -> Bool[Tensor, " row"]:
        """Which rows are not the model's own."""
        return self.error > self.allowed


@dataclass(frozen=True, slots=True)
class RowCheck:
    """How many rows were held against the model's own output, how many failed, and the worst of them.

    `worst` is error over allowed error: at most 1 where all is well.
    """

    n_rows: int = 0
    n_off: int = 0
    worst: float = 0.0
    worst_layer: int = -1

    @classmethod
    def of(cls, block: RowBlock) -> RowCheck:
        """The check of one layer's rows."""
        worst = float(block.error.max()) / block.allowed
        return cls(block.error.shape[0], int(block.off.sum()), worst, block.layer)

    def __add__(self, other: RowCheck) -> RowCheck:
        worse = max(self, other, key=lambda check: check.worst)
        return RowCheck(self.n_rows + other.n_rows, self.n_off + other.n_off, worse.worst, worse.worst_layer)


def require_match(check: RowCheck, model: Model) -> None:
    """Nothing; raises ModelRefused where a captured row is not what the model itself put out."""
    if check.n_off:
        raise ModelRefused(
            f"{model.name}: {check.n_off} of {check.n_rows} captured rows are not what the model's own attention "
            f"({model.attention}) puts out, the worst in layer {check.worst_layer}, {check.worst:.3g} times the "
            "allowed error: it attends in a way that kvlens does not recompute",
            "use --attention eager: other backends leave out what they do not know, such as soft-capping",
        )


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


def make_block(
    trace_id: str,
    layer: int,
    queries: Int[Tensor, "kv_head query"],
    weights: Float[Tensor, "head query key"],
    values: Float[Tensor, "kv_head key d_head"],
    dense: Float[Tensor, "head query d_head"],
    *,
    sink: Float[Tensor, "head query"],
    keys: Float[Tensor, "kv_head key d_head"],
    own: Float[Tensor, "head query d_head"],
    plain: Float[Tensor, "head query d_head"],
    window: int | None,
) -> RowBlock:
    """The block of these rows; `own` is what the model put out, `plain` what its dtype is good for.

    Raises: ModelRefused where one of them is not finite.
    """
    n_heads, n_rows = weights.shape[:2]
    if not bool(torch.isfinite(own).all() & torch.isfinite(dense).all()):
        raise ModelRefused(
            f"the output of attention in layer {layer} holds NaN or infinity on trace {trace_id!r}",
            "check the model's weights, or use --dtype float32",
        )
    heads = torch.arange(n_heads, device=weights.device).repeat_interleave(n_rows)
    group = n_heads // values.shape[0]
    positions = queries.repeat_interleave(group, 0).flatten()
    rounding = torch.finfo(own.dtype).eps * float(values.abs().max())
    allowed = SLACK * float((plain.double() - dense).abs().max()) + max(rounding, torch.finfo(torch.float32).tiny)
    return RowBlock(
        trace_id,
        layer,
        heads,
        positions,
        weights.flatten(0, 1).float(),
        values.to(torch.float32, copy=True, memory_format=torch.contiguous_format),
        dense.flatten(0, 1).float(),
        sink.flatten().float(),
        torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32),
        positions.add(1).clamp_max(window or weights.shape[-1]),
        heads // group,
        (own.double() - dense).abs().amax(-1).flatten().float(),
        allowed,
    )
