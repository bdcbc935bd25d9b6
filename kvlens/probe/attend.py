"""Attention over one set of keys, with what is needed to merge it with attention over another set.

1. `attend`: output and log-sum-exp, by a fused kernel where there is one, else by matrix products;
2. `merge`: attention over a union of disjoint key sets is the average of the attentions over each, weighted by the
   softmax of their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Part = tuple[Tensor, Tensor]  # output [..., query, d_head] and log-sum-exp [..., query]


def as_bias(visible: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """What to add to scores so that only visible keys count: 0 there, and half the lowest finite number elsewhere.

    Half, so that a score plus it stays finite; its exponential is exactly 0 beside any visible key.
    """
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min / 2)


def attend(
    query: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "b h k d"],
    values: Float[Tensor, "b h k d"],
    *,
    scale: float,
    bias: Float[Tensor, "#b #h q k"] | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> Part:
    """Attention output and fp32 log-sum-exp of the scores; that of a row without visible keys is far below any.

    `bias` is added to the scores; `as_bias` makes one from a visibility.

    Cost: one attention; memory linear in keys on CPU (fused kernel), a block of scores elsewhere.
    Source: the log-sum-exp is what FlashAttention-style kernels return beside their output.
    """
    if query.device.type != "cpu" or softcap is not None:
        return attend_plain(query, keys, values, scale=scale, bias=bias, causal=causal, softcap=softcap)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


def attend_plain(
    query: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "b h k d"],
    values: Float[Tensor, "b h k d"],
    *,
    scale: float,
    bias: Float[Tensor, "#b #h q k"] | None = None,
    causal: bool = False,
    softcap: float | None = None,
    block: int = 1024,
) -> Part:
    """The same as `attend` by matrix products in fp32, `block` queries at a time; the reference and the fallback."""
    outs, lses = [], []
    n_query, n_key = query.shape[2], keys.shape[2]
    keys32, values32 = keys.float(), values.float()
    for lo in range(0, n_query, block):
        hi = min(lo + block, n_query)
        scores = query[:, :, lo:hi].float() @ keys32.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[:, :, lo:hi].float()
        if causal:
            rows = torch.arange(lo, hi, device=query.device)[:, None]
            later = torch.arange(n_key, device=query.device) > rows
            scores = scores.masked_fill(later, torch.finfo(torch.float32).min / 2)
        lse = scores.logsumexp(-1)
        outs.append(((scores - lse[..., None]).exp() @ values32).to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def merge(parts: Sequence[Part]) -> Tensor:
    """The attention output over the union of disjoint key sets, from each set's output and log-sum-exp."""
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)[..., None]
    total = parts[0][0] * weights[0].to(parts[0][0].dtype)
    for (out, _), weight in zip(parts[1:], weights[1:], strict=True):
        total = torch.addcmul(total, out, weight.to(out.dtype))
    return total
