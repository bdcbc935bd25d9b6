"""How much attention did the slots of a layer just receive? The weights of the new tokens' queries, without a matrix.

1. The queries that the layer asked with, against the keys it holds, under the layer's own rule, in float32, a block of
   queries at a time: the weights of all queries by all slots never exist together.
2. A query sees the slots up to its own position. Padding neither asks nor receives.
3. Summed over the queries, mean over the heads that share a KV head. Ragged heads are taken one by one.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import BLOCK, ROWS, Rule, unseen, weights_without
from kvlens.runtime.cache import EMPTY, HeldLayer
from kvlens.runtime.ragged import RaggedLayer


def received(
    layer: HeldLayer,
    query: Float[Tensor, "batch head new d_head"],
    rule: Rule,
    before: Int[Tensor, "batch heads held"] | None,
    new: Int[Tensor, "batch new"],
) -> Float[Tensor, "batch kv_head slots"]:
    """What each slot received, NaN for an empty one; `before` are the positions held when the new tokens came.

    Cost: one more product of queries and keys; memory a block of weights and one layer's keys in float32.
    """
    positions = new[:, None].to(query.device, torch.int32)
    if before is not None:
        before = before.to(query.device)
        positions = torch.cat([before, positions.expand(-1, before.shape[1], -1)], -1)
    if not isinstance(layer, RaggedLayer):
        return _received(query, layer.keys, rule, positions, positions[:, 0, -new.shape[1] :])
    batch, n_kv_heads = layer.shape
    group = query.shape[1] // n_kv_heads
    positions = positions.expand(-1, n_kv_heads, -1)
    total = torch.full(positions.shape, torch.nan, device=query.device)
    for row in range(batch):
        for head in range(n_kv_heads):
            own = positions[row, head]
            real = own != EMPTY
            asked = query[row : row + 1, head * group : (head + 1) * group]
            keys = layer.pair(row, head)[0][None, None]
            held, asking = own[real][None, None], own[None, -new.shape[1] :]
            total[row, head, real] = _received(asked, keys, rule, held, asking)[0, 0]
    return total


def _received(
    query: Float[Tensor, "batch head new d_head"],
    keys: Float[Tensor, "batch kv_head slots d_head"],
    rule: Rule,
    positions: Int[Tensor, "batch heads slots"],
    asking: Int[Tensor, "batch new"],
) -> Float[Tensor, "batch kv_head slots"]:
    """1. to 3. of a dense layer, or of one pair."""
    n_kv_heads, n_slots = keys.shape[1:3]
    total = torch.zeros((query.shape[0], n_kv_heads, n_slots), device=query.device)
    keys = wide(keys)
    rows = max(ROWS, BLOCK // max(1, n_slots))
    for start in range(0, query.shape[2], rows):
        asked = wide(query[:, :, start : start + rows])
        hidden = unseen(positions, asking[:, start : start + rows])
        if hidden.shape[1] > 1:
            hidden = hidden.repeat_interleave(query.shape[1] // n_kv_heads, 1)
        weights = weights_without(asked, keys, rule, hidden)[0].masked_fill_(hidden, 0.0)
        total += weights.sum(2).unflatten(1, (n_kv_heads, -1)).mean(2)
    return total.masked_fill_(positions == EMPTY, torch.nan)
