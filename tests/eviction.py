"""What an evicting run must compute, the slow and obvious way: the whole text at once, evicted keys masked.

The reference shares nothing with the runtime but the model and the list of what left when.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pandas as pd
import torch
from tiny import FAMILIES, token_ids

from kvlens import model as models
from kvlens.model import Model
from kvlens.policy import Policy

MANAGED = [family for family in FAMILIES if family != "mistral"]  # every layer of that one slides


# What a scorer is given where its defaults are meant for longer texts, or where it has none.
PARAMETERS: dict[str, dict[str, Any]] = {
    "lagkv": {"chunk": 4},
    "snapkv": {"window": 4},
    "h2o_keys": {"window": 5},
    "rkv": {"window": 4, "pool": 3},
    "thinkv": {"size": 4, "steps": [3, 2, 1]},
    "segment_hidden": {"size": 4, "budgets": [3, 2, 1]},
    "expected_attention": {"sinks": 1},
    "compactor": {"sinks": 1, "chunk": 4, "sketch": 5},
    "kvzip": {"prompt": "", "chunk": 16},
    "fitted": {
        "signals": ["hidden_change_z", "hidden_change", "key_norm", "value_var", "lag_causal"],
        "layers": [1, 0, 1, 1, None],
        "means": [0.0, 5.0, 2.0, 1.0, 1.5],
        "scales": [1.0, 3.0, 0.5, 2.0, 1.0],
        "weights": [1.0, -0.5, 0.3, 0.2, -0.7],
    },
    "oracle": {"positions": list(range(200)), "scores": [((7 * i) % 31) / 31 for i in range(200)]},
}
# A token's score hangs on nothing that came after it.
CAUSAL = (
    *("random", "sliding_window", "keynorm", "key_var", "value_var", "fitted", "oracle"),
    *("epikv", "hidden_change", "band_adaptive"),
)
TOGETHER = ("surprise", "surprise_fast", "importance_sampling")  # the same tokens in every layer and head


def settled(scorer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, without what a scorer that decides for all layers at once refuses."""
    apart = ("reduce", "storage", "allocate")
    return {key: value for key, value in settings.items() if scorer not in TOGETHER or key not in apart}


def refuses(model: Model, scorer: str) -> bool:
    """Whether a pass over the cache would read a layer that slides."""
    read = {"surprise": model.sliding, "surprise_fast": model.sliding[-1:], "kvzip": model.sliding}.get(scorer, ())
    return any(window is not None for window in read)


def policy(scorer: str = "random", **changes: Any) -> Policy:
    """A policy with a budget of 12 tokens, 2 sinks and 3 recent ones among them, unless changed."""
    settings: dict[str, Any] = {
        "scorer": {"name": scorer, "parameters": changes.pop("parameters", PARAMETERS.get(scorer, {}))},
        "budget": {"tokens": changes.pop("tokens", 12)},
        "protect": {"sinks": 2, "recent": 3},
        "trigger": "step",
    }
    return Policy(**settings | changes)


def uneven(model: Model) -> dict[str, Any]:
    """Settings under which every layer and KV head keeps its own number of tokens, 6 to 14."""
    table = [[6 + (3 * layer + 5 * head) % 9 for head in range(model.n_kv_heads)] for layer in range(model.n_layers)]
    return {"reduce": "head", "allocate": {"name": "table", "table": table}}


def step_of_each(chunks: Sequence[int]) -> torch.Tensor:
    """The forward pass in which each token came, from the sizes of the passes."""
    return torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(chunks))


def visibility(model: Model, events: pd.DataFrame, steps: torch.Tensor) -> dict[int, torch.Tensor]:
    """By full-attention layer [1, head, query, key]: causal, an evicted key only for queries up to its last pass."""
    n, group = len(steps), model.n_heads // model.n_kv_heads
    full = [layer for layer, window in enumerate(model.sliding) if window is None]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    seen = {layer: causal.expand(1, model.n_heads, n, n).clone() for layer in full}
    for event in events.itertuples():
        heads = slice(None) if event.kv_head == -1 else slice(event.kv_head * group, (event.kv_head + 1) * group)
        for layer in full if event.layer == -1 else [event.layer]:
            seen[layer][:, heads, steps > event.step, event.pos] = False
    return seen


def masked_logits(model: Model, ids: torch.Tensor, events: pd.DataFrame, steps: torch.Tensor) -> torch.Tensor:
    """Logits [query, d_vocab] of one row's own tokens, which came in these passes."""
    masks = visibility(model, events, steps)
    with torch.no_grad(), models.layer_masks(model, masks):
        return models.logits(model, ids[None])[0]


def cache_keyword(model: Model) -> str:
    """How this version of transformers calls the cache."""
    return "cache" if "cache" in signature(model.decoder.forward).parameters else "past_key_values"


def streamed_logits(
    model: Model, ids: torch.Tensor, chunks: Sequence[int], cache: Any = None, own: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of every token when they come in passes of these sizes; `own` says which are no padding."""
    cache = models.new_cache(model) if cache is None else cache
    rows, start = [], 0
    for size in chunks:
        more: dict[str, Any] = {cache_keyword(model): cache}
        if own is not None:
            more["attention_mask"] = own[:, : start + size]
            more["position_ids"] = (own.cumsum(-1) - 1).clamp(min=0)[:, start : start + size]
        with torch.no_grad():
            out = model.decoder(input_ids=ids[:, start : start + size], use_cache=True, **more)
        rows.append(models.unembed(model, out.last_hidden_state))
        start += size
    return torch.cat(rows, 1)


def padded(lengths: Sequence[int], n_more: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Prompts of these lengths padded on the left with `n_more` tokens behind; which are own; each row's own ids."""
    widest = max(lengths)
    tails = token_ids(n_more, batch=len(lengths), seed=99)
    rows = [torch.cat([token_ids(n, seed=n)[0], tail]) for n, tail in zip(lengths, tails, strict=True)]
    ids = torch.stack([torch.cat([torch.zeros(widest + n_more - len(row), dtype=torch.long), row]) for row in rows])
    own = torch.stack([torch.arange(widest + n_more) >= widest + n_more - len(row) for row in rows]).long()
    return ids, own, rows


def written(model: Model, ids: torch.Tensor, n: int, **more: Any) -> Any:
    """What transformers' own generate writes, greedily unless told otherwise, with the logits it wrote from."""
    settings = {
        "max_new_tokens": n,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    more.setdefault("attention_mask", torch.ones_like(ids))
    return model.hf.generate(ids, **settings | more)


def same_logits(one: Any, other: Any) -> bool:
    """Whether two generations have the same logits, bit for bit."""
    return len(one.logits) == len(other.logits) and all(map(torch.equal, one.logits, other.logits))
