"""How far would each window's eviction move the answer, to first order, as gradients flow back through attention?

Attention of the target's rows written out, as a transformers attention function:

1. forward: softmax weights p over prefix and own keys, output o; the weights are not kept, they are computed again
   on the way back (checkpoint, and once more for the scores), so that one layer's weights exist at a time;
2. backward: with the gradient g at o, key j moves the loss by `p_j <g, o - v_j>` before renormalisation; a window's
   term is the sum over its keys divided by 1 - p(W), read for all windows off running sums over positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvlens.probe.occlusion import Occluder

HIGHEST_SHARE = 1 - 1e-6  # p(W) is clipped here: a row that sees nothing but W (the sink) has no finite change


class ScreenAttention:
    """Attention of the target's rows that fills `by_layer` [layer, window] during the backward pass."""

    def __init__(self, occluder: Occluder, windows: Sequence[tuple[int, int]]) -> None:
        device = occluder.ids.device
        self.prefix, self.last, self.n_inputs = occluder.prefix, occluder.last, occluder.n_inputs
        self.sliding, self.cells = occluder.model.sliding, occluder.cells
        self.start = torch.tensor([start for start, _ in windows], dtype=torch.long, device=device)
        self.end = torch.tensor([end for _, end in windows], dtype=torch.long, device=device)
        self.by_layer = torch.zeros(len(self.sliding), len(windows), dtype=torch.float64, device=device)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention output [1, query, head, d_head]; causality and window are worked out here."""
        layer = int(module.layer_idx)
        weights = partial(self._weights, layer, kwargs)
        out = checkpoint(
            lambda q, k, v: self._output(layer, weights(q, k), v), query, key, value,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        if not out.requires_grad:  # the first layer: weights are frozen, so gradients start at its output
            out.requires_grad_()
        if self.cells is None or bool(self.cells[layer].any()):
            out.register_hook(partial(self._collect, layer, weights, query.detach(), key.detach(), value.detach()))
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    def _weights(
        self, layer: int, options: Mapping[str, Any], query: Float[Tensor, "1 h q d"], key: Float[Tensor, "1 kv q d"]
    ) -> Float[Tensor, "1 h q k"]:
        """The softmax weights of every row over positions [0, n_inputs), in fp32 or wider."""
        keys = _wide(torch.cat([self.prefix[layer][0], key], 2))
        scaling = options.get("scaling")
        scores = _grouped(_wide(query), keys.mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        softcap = options.get("softcap")
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(self.last, self.n_inputs, device=keys.device)[:, None] - torch.arange(
            self.n_inputs, device=keys.device
        )
        window = self.sliding[layer]
        visible = (distance >= 0) & (distance < (self.n_inputs if window is None else window))
        scores = scores.masked_fill(~visible, -torch.inf)
        sinks = options.get("s_aux")
        if sinks is None:
            return scores.softmax(-1)
        # A learned sink is one more key, with value 0 and in no window.
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]

    def _output(
        self, layer: int, weights: Float[Tensor, "1 h q k"], value: Float[Tensor, "1 kv q d"]
    ) -> Float[Tensor, "1 h q d"]:
        return _grouped(weights, _wide(torch.cat([self.prefix[layer][1], value], 2)))

    def _collect(self, layer: int, weights_of: Any, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> None:
        """Adds the layer's terms to S once the gradient at its attention output is known."""
        weights = weights_of(query, key)
        values = _wide(torch.cat([self.prefix[layer][1], value], 2))
        pull = (grad * _grouped(weights, values)).sum(-1, keepdim=True) - _grouped(grad, values.mT)  # <grad, o - v_j>
        # p(W) <grad, o - m_W> is the sum of p_j <grad, o - v_j> over W. Running sums in fp64: their differences cancel.
        share = self._over_windows(weights).clamp(0, HIGHEST_SHARE)
        terms = self._over_windows(weights * pull) / (1 - share)
        if self.cells is not None:
            terms = terms[self.cells[layer]]
        self.by_layer[layer] = terms.sum((0, 1))

    def _over_windows(self, per_key: Float[Tensor, "1 h q k"]) -> Float64[Tensor, "h q window"]:
        running = torch.nn.functional.pad(per_key[0, :, :, : self.last].double().cumsum(-1), (1, 0))
        return running[..., self.end] - running[..., self.start]


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _grouped(rows: Float[Tensor, "1 h q x"], columns: Float[Tensor, "1 kv x y"]) -> Float[Tensor, "1 h q y"]:
    """The product of every query head's rows with its KV head's matrix, without a copy of it per query head."""
    _, n_heads, n_rows, inner = rows.shape
    folded = rows.reshape(1, columns.shape[1], -1, inner) @ columns
    return folded.reshape(1, n_heads, n_rows, -1)
