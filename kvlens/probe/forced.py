"""Does it matter that attention keeps a few keys only? Cross-entropy with the output of chosen heads replaced by m_A.

1. In the chosen cells (layer, head) the weights of a block of queries are computed; elsewhere the model's own attention
   runs. No tensor of all queries by all keys exists.
2. A rule picks each query's kept set A from its weights: `top_mass` the largest. Ties go to the lowest position.
3. The output is m_A, the mean of the kept values under weights that are forced to keep their ratios and to sum to 1:
   sum over A of p v / p(A). A learned sink logit is always kept, with value 0, so its share counts in p(A).
4. Later layers see what comes of it. Reported is -log p of each token but the first, a mean in nats for each document.

Source: forced weights as in ContourKV; the study is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.linear import fast_linear
from kvlens.model import Model
from kvlens.observables.attention_weights import Rule, blocks, weighted_values
from kvlens.observables.table import BY_NAME, read
from kvlens.probe.signal_pass import predictions, require_finite
from kvlens.records import Tokens

Cells = Bool[np.ndarray, "layer head"]
# From the weights of the last queries among the keys [head, query, key], 0 where a query does not see a key, which
# keys each query keeps: bool, of the same shape.
Keep = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """Nats per token of one document: of the model as it is, and by name with the output of an arm's cells replaced."""

    trace_id: str
    n_tokens: int  # predicted ones: all but the first
    unchanged: float
    replaced: Mapping[str, float]


def compare(model: Model, everything: Sequence[Tokens], keep: Keep, arms: Mapping[str, Cells]) -> list[CrossEntropy]:
    """The cross-entropy of every document, unchanged and with m_A in each arm's cells.

    Give documents that had no part in choosing the cells. `random_cells` makes an arm to compare a choice with.

    Raises: InputError for a document of fewer than two tokens or cells of another model, before the model runs;
        ModelRefused where its states are not finite.
    Cost: one forward pass a document, and a slower one for each arm; memory one document's.
    """
    for cells in arms.values():
        check_cells(model, cells)
    short = next((tokens for tokens in everything if tokens.n_tokens < 2), None)
    if short is not None or not everything:
        what = "no document" if short is None else f"{short.trace.id!r} of {short.n_tokens} tokens"
        raise InputError(f"cross-entropy of {what}: nothing is predicted", "give documents of two tokens or more")
    found = []
    for tokens in everything:
        unchanged, replaced = cross_entropy(model, tokens), {}
        for name, cells in arms.items():
            with forced_attention(model, keep, cells):
                replaced[name] = cross_entropy(model, tokens)
        found.append(CrossEntropy(tokens.trace.id, tokens.n_tokens - 1, unchanged, replaced))
    return found


@torch.inference_mode()
def cross_entropy(model: Model, tokens: Tokens) -> float:
    """The mean of -log p over a document's tokens but the first, in nats, under whatever attention is in force."""
    ids = torch.from_numpy(tokens.ids).to(model.device)
    with fast_linear():
        states = models.hidden(model, ids[None])[0]
    require_finite(states)
    nats = read([BY_NAME["surprisal"]], predictions(model, states, ids))["surprisal"]
    return float(nats[1:].double().mean())


@contextmanager
def forced_attention(model: Model, keep: Keep, cells: Cells | None = None) -> Iterator[None]:
    """Within it the heads of `cells` (None: all) put out m_A of the sets that `keep` picks, a trace at a time."""
    if cells is None:
        cells = np.ones((model.n_layers, model.n_heads), dtype=bool)
    check_cells(model, cells)
    chosen = [torch.from_numpy(np.flatnonzero(heads)).to(model.device) for heads in cells]

    def around(
        layer: int, own: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, keywords: Mapping[str, Any]
    ) -> Tensor:
        heads = chosen[layer]
        if not len(heads):
            return own()
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise InputError("forced attention was given a batch or a cache", "run one whole trace at a time")
        kv_heads = heads // (query.shape[1] // key.shape[1])
        rule = Rule.of_call(query, model.sliding[layer], keywords)
        if rule.sinks is not None:
            rule = Rule(rule.scale, rule.window, rule.softcap, rule.sinks[heads])
        whole = len(heads) == query.shape[1]
        output = torch.empty_like(query.transpose(1, 2)) if whole else own().clone()
        # all heads of a layer share keys as ever; some heads get copies of theirs
        keys, values = (key[0], value[0]) if whole else (key[0, kv_heads], value[0, kv_heads])
        output[0, :, heads] = _forced(query[0, heads], keys, values, rule, keep).transpose(0, 1)
        return output

    with models.around_attention(model, around):
        yield


def _forced(
    query: Float[Tensor, "head pos d_head"],
    keys: Float[Tensor, "kv_head pos d_head"],
    values: Float[Tensor, "kv_head pos d_head"],
    rule: Rule,
    keep: Keep,
) -> Float[Tensor, "head pos d_head"]:
    """m_A of every query."""
    outputs = []
    for weights in blocks(query, keys, rule):
        kept = keep(weights)
        if kept.shape != weights.shape or kept.dtype != torch.bool:
            raise InputError(
                f"the rule gave {tuple(kept.shape)} of {kept.dtype} for weights of shape {tuple(weights.shape)}",
                "it gives a bool for each weight, True = kept",
            )
        sink = 0.0 if rule.sinks is None else (1 - weights.sum(-1, keepdim=True)).clamp_min_(0)
        weights = weights.masked_fill_(~kept, 0.0)
        mass = weights.sum(-1, keepdim=True) + sink
        if not bool((mass > 0).all()):
            raise InputError("the rule keeps no key that a query attends to, so it has no output", "keep at least one")
        outputs.append((weighted_values(weights, values[:, : weights.shape[-1]]) / mass).to(query.dtype))
    return torch.cat(outputs, 1)


def top_mass(size: int) -> Keep:
    """The rule that keeps the `size` keys of largest weight, the earlier of equals; keys without weight count as none.

    Raises: InputError for a size below 1.
    """
    if size < 1:
        raise InputError(f"top-mass sets of {size} keys", "keep at least 1")

    def keep(weights: Float[Tensor, "head query key"]) -> Bool[Tensor, "head query key"]:
        if size >= weights.shape[-1]:
            return weights > 0
        least = weights.topk(size).values[..., -1:]
        kept = weights > least
        equal = (weights == least) & (least > 0)
        left = size - kept.sum(-1, keepdim=True)
        if bool((equal.sum(-1, keepdim=True) > left).any()):
            equal &= equal.cumsum(-1, dtype=torch.int32) <= left
        return kept | equal

    return keep


def random_cells(like: Cells, seed: int = 0) -> Cells:
    """As many cells as `like` has, drawn from all; some may be the same ones."""
    found = np.zeros(like.size, dtype=bool)
    found[np.random.default_rng(seed).choice(like.size, int(like.sum()), replace=False)] = True
    return found.reshape(like.shape)


def check_cells(model: Model, cells: Cells) -> None:
    """Nothing; raises InputError for cells of another model."""
    if cells.shape != (model.n_layers, model.n_heads):
        raise InputError(
            f"cells of shape {cells.shape}: {model.name} has {model.n_layers} layers of {model.n_heads} heads"
        )
