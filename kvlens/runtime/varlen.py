"""How do ragged heads attend in one call of FlashAttention? As sequences of its variable-length kernel.

1. Every (row, KV head) pair is a sequence: its keys where they lie in the layer's flat storage. The free slots behind
   them are a sequence too, one without queries, so that nothing has to be moved together first.
2. One new token: the queries of the head's group are so many rows of one attention. The kernel has a path of its own
   for one query of several heads, which fails where a sequence has no query; as rows of one head they do not meet it.
3. Several new tokens: the group's queries are heads over one KV head, causal. The kernel aligns the last query with the
   last key, and the new tokens lie at a pair's end.
4. Padding asks nothing and puts out 0.

Used where the model attends with FlashAttention; `attend` of ragged.py, pair by pair, gives the same and serves the
rest.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

if TYPE_CHECKING:
    from kvlens.causal_lm import Model
    from kvlens.runtime.ragged import RaggedLayer

Kernel = Callable[..., Tensor]  # as flash_attn.flash_attn_varlen_func


def kernel_of(model: Model) -> Kernel | None:
    """FlashAttention's variable-length kernel where the model attends with FlashAttention, else None."""
    if not model.attention.startswith("flash") or importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_varlen_func

    found: Kernel = flash_attn_varlen_func
    return found


def attend_at_once(
    layer: RaggedLayer,
    query: Float[Tensor, "batch head new d_head"],
    keywords: Mapping[str, Any],
    own: Bool[Tensor, "batch new"] | None,
    kernel: Kernel,
) -> Float[Tensor, "batch new head d_head"]:
    """What the layer puts out, by one call of the kernel. Cost: no copy of keys or values."""
    batch, n_heads, new, _ = query.shape
    n_kv_heads = layer.shape[1]
    group = n_heads // n_kv_heads
    rows = query.unflatten(1, (n_kv_heads, group)).transpose(2, 3)  # batch, KV head, new, group, d_head
    # 4.
    asks = torch.ones((batch, new), dtype=torch.bool, device=query.device) if own is None else own.to(query.device)
    asked = asks[:, None].expand(-1, n_kv_heads, -1)
    queries = rows[asked]
    counts = [n for n in asks.sum(-1).tolist() for _ in range(n_kv_heads)]
    single = new == 1
    if single:  # 2.
        queries, counts = queries.flatten(0, 1)[:, None], [n * group for n in counts]
    # 1.
    ends = [start + n for start, n in zip(layer.starts, layer.lengths, strict=True)]
    of_keys = [*chain.from_iterable(zip(layer.starts, ends, strict=True)), layer.keys.shape[0]]
    of_queries = [0, *chain.from_iterable((n, n) for n in accumulate(counts))]
    widest = max(after - before for before, after in pairwise(of_keys))
    out = kernel(
        queries.contiguous(),
        layer.keys[:, None],
        layer.values[:, None],
        _offsets(of_queries, query.device),
        _offsets(of_keys, query.device),
        group if single else new,
        widest,
        softmax_scale=keywords["scaling"],
        causal=not single,  # 3.
    )
    output = out.new_zeros((*rows.shape[:-1], out.shape[-1]))
    output[asked] = out.unflatten(0, (-1, group))[:, :, 0] if single else out
    return output.transpose(1, 2).flatten(2, 3)


def _offsets(places: list[int], device: torch.device) -> Int32[Tensor, " sequences"]:
    return torch.tensor(places, dtype=torch.int32, device=device)
