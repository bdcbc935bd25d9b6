"""How much attention did the slots of a layer just receive? The weights of the new tokens' queries, without a matrix.

1. The queries that the layer asked with, against the keys it holds, under the layer's own rule, in float32, a block of
   queries at a time: the weights of all queries by all slots never exist together.
2. A query sees the slots up to its own position. Padding neither asks nor receives.
3. Summed over the queries, mean over the heads that share a KV head. Ragged heads are taken one by one.
4. Where it is asked for, the spread of each query's weights, mean over the heads: the share of the slots it sees that
   got less than a hundredth of its largest weight, and the entropy in nats (a learned sink's share is no slot's).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import BLOCK, ROWS, Rule, unseen, weights_without
from kvlens.runtime.cache import HeldLayer
from kvlens.runtime.ragged import RaggedLayer
from kvlens.scorers.interface import EMPTY

LITTLE = 0.01  # of a row's largest weight; ThinKV's line between what is attended to and what is not


def received(
    layer: HeldLayer,
    query: Float[Tensor, "batch head asking d_head"],
    rule: Rule,
    before: Int[Tensor, "batch heads held"] | None,
    new: Int[Tensor, "batch new"],
    *,
    spread: bool = False,
) -> tuple[Float[Tensor, "batch kv_head slots"], Float[Tensor, "batch 2 asking"] | None]:
    """What each slot received, NaN for an empty one, and each query's spread, NaN for padding; None if not asked for.

    `before` are the positions held when the new tokens came; the queries are those of all new tokens or of the last.

    Cost: one more product of queries and keys; memory a block of weights and one layer's keys in float32.
    """
    positions = new[:, None].to(query.device, torch.int32)
    if before is not None:
        before = before.to(query.device)
        positions = torch.cat([before, positions.expand(-1, before.shape[1], -1)], -1)
    asking = positions[:, 0, positions.shape[-1] - query.shape[2] :]
    if not isinstance(layer, RaggedLayer):
        return _received(query, layer.keys, rule, positions, asking, spread)
    batch, n_kv_heads = layer.shape
    group = query.shape[1] // n_kv_heads
    positions = positions.expand(-1, n_kv_heads, -1)
    total = torch.full(positions.shape, torch.nan, device=query.device)
    spreads = torch.zeros((batch, 2, query.shape[2]), device=query.device)
    for row in range(batch):
        for head in range(n_kv_heads):
            real = positions[row, head] != EMPTY
            if not bool(real.any()):  # only padding so far
                spreads[row] = torch.nan
                continue
            asked = query[row : row + 1, head * group : (head + 1) * group]
            keys = layer.pair(row, head)[0][None, None]
            held = positions[row, head][real][None, None]
            mass, spread_of_head = _received(asked, keys, rule, held, asking[row : row + 1], spread)
            total[row, head, real] = mass[0, 0]
            if spread_of_head is not None:
                spreads[row] += spread_of_head[0] / n_kv_heads
    return total, spreads if spread else None


def _received(
    query: Float[Tensor, "batch head asking d_head"],
    keys: Float[Tensor, "batch kv_head slots d_head"],
    rule: Rule,
    positions: Int[Tensor, "batch heads slots"],
    asking: Int[Tensor, "batch asking"],
    spread: bool,
) -> tuple[Float[Tensor, "batch kv_head slots"], Float[Tensor, "batch 2 asking"] | None]:
    """1. to 4. of a dense layer, or of one pair."""
    n_kv_heads, n_slots = keys.shape[1:3]
    total = torch.zeros((query.shape[0], n_kv_heads, n_slots), device=query.device)
    spreads = torch.full((query.shape[0], 2, query.shape[2]), torch.nan, device=query.device)
    keys = wide(keys)
    rows = max(ROWS, BLOCK // max(1, n_slots))
    for start in range(0, query.shape[2], rows):
        asked, now = wide(query[:, :, start : start + rows]), asking[:, None, start : start + rows]
        # slots that came after all who ask now are left out
        n_later = 0 if query.shape[2] == 1 else int(_later(positions, now).flip(-1).cumprod(0).sum())
        width = max(1, n_slots - n_later)
        hidden = unseen(positions[..., :width], now)
        if hidden.shape[1] > 1:
            hidden = hidden.repeat_interleave(query.shape[1] // n_kv_heads, 1)
        weights = weights_without(asked, keys[:, :, :width], rule, hidden)[0]
        if hidden.shape[-1] == width:  # else every query sees a slot
            weights.masked_fill_(hidden, 0.0)
        total[..., :width] += weights.sum(2).unflatten(1, (n_kv_heads, -1)).mean(2)
        if spread:
            spreads[..., start : start + rows] = _spread(weights, hidden)
    padding = (asking == EMPTY)[:, None]
    total.masked_fill_(positions == EMPTY, torch.nan)
    return total, spreads.masked_fill_(padding, torch.nan) if spread else None


def _later(positions: Int[Tensor, "batch heads slots"], asking: Int[Tensor, "batch one asking"]) -> Tensor:
    """[slots], 1 for a slot that is empty or came after all who ask, in every row and head, else 0."""
    return ((positions > asking.amax()) | (positions == EMPTY)).flatten(0, 1).all(0).int()


def _spread(
    weights: Float[Tensor, "batch head query slots"], hidden: Bool[Tensor, "#batch #head query last"]
) -> Float[Tensor, "batch 2 query"]:
    """4. of a block of queries; a hidden slot's weight is 0, which is little."""
    n_hidden = hidden.sum(-1)
    little = (weights < LITTLE * weights.amax(-1, keepdim=True)).view(torch.uint8).sum(-1, dtype=torch.int32)
    sparsity = (little - n_hidden).clamp(min=0) / (weights.shape[-1] - n_hidden).clamp(min=1)
    logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()  # many times as fast as xlogy on a CPU
    entropy = -logs.mul_(weights).sum(-1)
    return torch.stack([sparsity.mean(1), entropy.mean(1)], 1)
