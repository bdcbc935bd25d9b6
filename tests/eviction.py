"""What an evicting run must compute, the slow and obvious way: the whole text at once, evicted keys masked.

The reference shares nothing with the runtime but the model and the list of what left when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from kvlens import model as models
from kvlens.model import Model
from kvlens.policy import Policy


def policy(scorer: str = "random", **changes: Any) -> Policy:
    """A policy with a budget of 12 tokens, 2 of them sinks, 3 recent, unless changed."""
    parameters = changes.pop("parameters", {})
    settings: dict[str, Any] = {
        "scorer": {"name": scorer, "parameters": parameters},
        "budget": {"tokens": changes.pop("tokens", 12)},
        "protect": {"sinks": 2, "recent": 3},
        "trigger": "step",
    }
    return Policy(**settings | changes)


def step_of_each(chunks: Sequence[int]) -> torch.Tensor:
    """The forward pass in which each token came, from the sizes of the passes."""
    return torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(chunks))


def visibility(model: Model, events: pd.DataFrame, steps: torch.Tensor) -> dict[int, torch.Tensor]:
    """By full-attention layer [1, head, query, key]: causal, and an evicted key only to queries up to its last pass."""
    n = len(steps)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    full = [layer for layer, window in enumerate(model.sliding) if window is None]
    seen = {layer: causal.expand(1, model.n_heads, n, n).clone() for layer in full}
    group = model.n_heads // model.n_kv_heads
    for event in events.itertuples():
        blind = steps > event.step
        for layer in full if event.layer == -1 else [event.layer]:
            heads = range(model.n_heads) if event.kv_head == -1 else range(event.kv_head * group, (event.kv_head + 1) * group)
            for head in heads:
                seen[layer][0, head, blind, event.pos] = False
    return seen


def masked_logits(model: Model, ids: torch.Tensor, events: pd.DataFrame, chunks: Sequence[int]) -> torch.Tensor:
    """Logits [1, query, d_vocab] of one row's tokens that came in passes of these sizes."""
    masks = visibility(model, events, step_of_each(chunks))
    with torch.no_grad(), models.layer_masks(model, masks):
        return models.logits(model, ids[None])


def streamed_logits(model: Model, ids: torch.Tensor, chunks: Sequence[int], cache: Any = None, **inputs: Any) -> torch.Tensor:
    """Logits of every token when they come in passes of these sizes, under whatever policy is applied."""
    cache = models.new_cache(model) if cache is None else cache
    rows, start = [], 0
    for size in chunks:
        mask = inputs.get("attention_mask")
        now = {} if mask is None else {"attention_mask": mask[:, : start + size]}
        if mask is not None:
            now["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, start : start + size]
        with torch.no_grad():
            out = model.decoder(input_ids=ids[:, start : start + size], use_cache=True, **{decoder_cache_name(model): cache}, **now)
        rows.append(models.unembed(model, out.last_hidden_state))
        start += size
    return torch.cat(rows, 1)


def decoder_cache_name(model: Model) -> str:
    from inspect import signature

    return "cache" if "cache" in signature(model.decoder.forward).parameters else "past_key_values"
