"""Slow, obvious references: every fast path is held against one of these.

Each is one full forward pass of one sequence without a cache (or attention written out in float64), so that nothing is
shared with the engines but the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlens import model as models
from kvlens.model import Model
from kvlens.records import Tokens


def visibility(n: int, hidden: Sequence[int] | np.ndarray, cut: int) -> Tensor:
    """What each query sees, [query, key]: all up to itself, but from position `cut` on none of the hidden keys."""
    seen = torch.zeros(n, n, dtype=torch.bool)
    gone = {int(pos) for pos in hidden}
    for query in range(n):
        for key in range(query + 1):
            seen[query, key] = not (query >= cut and key in gone)
    return seen


def target_rows(
    model: Model,
    tokens: Tokens,
    hidden: Sequence[int] | np.ndarray = (),
    cut: int = 0,
    cells: np.ndarray | None = None,
    ids: np.ndarray | None = None,
) -> Tensor:
    """Log-probs in float64 of the rows that predict the target, [target, d_vocab]; cells: [layer, head], None all."""
    n = tokens.n_tokens - 1
    row = torch.from_numpy(tokens.ids[:n] if ids is None else ids)[None].to(model.device)
    cut_off = visibility(n, hidden, cut)[None, None].to(model.device)
    plain = visibility(n, (), 0)[None, None].to(model.device)
    per_layer = nullcontext()
    if cells is not None:
        masks = {}
        for layer in range(model.n_layers):
            heads = [cut_off[:, 0] if cells[layer, head] else plain[:, 0] for head in range(model.n_heads)]
            masks[layer] = torch.stack(heads, 1)
        per_layer = models.layer_masks(model, masks)
    with torch.no_grad(), per_layer:
        logits = models.logits(model, row, mask=cut_off if cells is None else plain)
    return logits[0, tokens.n_context - 1 :].double().log_softmax(-1)


def of_target(rows: Tensor, tokens: Tokens) -> Tensor:
    """Log p of each target token, [target], from `target_rows`."""
    return torch.stack([rows[i, int(token)] for i, token in enumerate(tokens.ids[tokens.n_context :])]).cpu()


def masked_log_probs(
    model: Model, tokens: Tokens, window: tuple[int, int], cut: int, cells: np.ndarray | None = None
) -> Tensor:
    """Log p of each target token when queries at positions >= cut do not see the window's keys, [target] nats."""
    return of_target(target_rows(model, tokens, range(*window), cut, cells), tokens)


def substituted_log_probs(model: Model, tokens: Tokens, window: tuple[int, int], filler: np.ndarray) -> Tensor:
    """Log p of each target token when the window's ids are the filler's, [target] nats."""
    ids = tokens.ids[:-1].copy()
    ids[slice(*window)] = filler
    return of_target(target_rows(model, tokens, ids=ids), tokens)


def kl_nats(full: Tensor, rows: Tensor) -> float:
    """KL(full || rows) summed over target positions, from two `target_rows`."""
    return float((full.exp() * (full - rows)).sum())


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, float64, one query at a time; a query that sees nothing gives 0 and -inf.

    Query [row, head, query, d_head]; keys and values may have fewer heads (groups share one) and one row for all.
    """
    n_rows, n_heads, n_query, _ = query.shape
    out = torch.zeros(*query.shape[:3], values.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    visible = visible.expand(n_rows, n_heads, n_query, keys.shape[2])
    for row in range(n_rows):
        for head in range(n_heads):
            kv = head // (n_heads // keys.shape[1])
            for i in range(n_query):
                seen = visible[row, head, i]
                k, v = (x[row % x.shape[0], kv][seen].double() for x in (keys, values))
                scores = k @ query[row, head, i].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                sink = scores.new_empty(0) if sinks is None else sinks[head : head + 1].double()
                logits = torch.cat([scores, sink])
                if len(logits):
                    lse[row, head, i] = logits.logsumexp(0)
                    out[row, head, i] = (scores - lse[row, head, i]).exp() @ v
    return out, lse


@torch.no_grad()
def eager_weights(build: Callable[[], Any], ids: Tensor) -> list[np.ndarray]:
    """The weights that a model's own eager attention reports for one sequence, [head, query, key] a layer."""
    model = build()
    model.set_attn_implementation("eager")
    found = model(ids[None], output_attentions=True, use_cache=False).attentions
    return [weights[0].numpy() for weights in found]
