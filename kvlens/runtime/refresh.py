"""What happens when an eviction is due? Scores, a choice for each set of tokens kept together, compaction.

1. Sets: with `reduce: all` one for all managed layers and heads, else one a layer; with `head` its heads choose apart.
2. Where no set holds more than its budget nothing happens.
3. Score: the mean over the layers and heads that share a set. Ragged heads are scored one by one, none is padded.
4. Choose (evict.py), for all sets before the first layer is touched.
5. Compact every layer. Under `storage: ragged` a layer whose heads or rows end up with different numbers turns ragged.
6. The ledger's positions and the scorer's state follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from kvlens.observables.attention_weights import Rule
from kvlens.policy import Policy
from kvlens.runtime.cache import EMPTY, Ledger
from kvlens.runtime.evict import Choice, choose, protected
from kvlens.runtime.ragged import RaggedLayer
from kvlens.runtime.report import Log
from kvlens.runtime.reread import SecondPass
from kvlens.scorers.interface import Kept, Views, select


@dataclass(frozen=True)
class Means:
    """What a scorer may need of the model when it scores: how each layer weighs keys, and a pass over the cache."""

    rules: dict[int, Rule]
    second_pass: SecondPass | None = None


def refresh(
    policy: Policy, cache: Cache, ledger: Ledger, limits: list[Int[Tensor, "rows _"]], log: Log, means: Means
) -> None:
    """Nothing; afterwards no set holds more than its limit, and the log says what left.

    Raises: InputError where more is protected than the budget holds; no layer was touched then.
    """
    # 1.
    groups = [ledger.layers] if policy.reduce == "all" else [(layer,) for layer in ledger.layers]
    held = ledger.sets if len(ledger.sets) == len(groups) else ledger.sets * len(groups)
    # 2.
    if all(positions.shape[-1] <= int(limit.max()) for positions, limit in zip(held, limits, strict=True)):
        return
    choices = []
    for group, positions, limit in zip(groups, held, limits, strict=True):
        # 3.
        started = perf_counter()
        scores = _scores(policy, cache, ledger, group, positions, means)
        log.scoring_seconds += perf_counter() - started
        # 4.
        started = perf_counter()
        slots = positions.expand(-1, scores.shape[1], -1)
        safe = protected(policy.protect, slots, ledger.n_own, ledger.n_prompt)
        pages = policy.granularity.page_size if policy.granularity.unit == "page" else None
        choices.append(choose(scores, slots, limit, safe, page_size=pages))
        log.evicting_seconds += perf_counter() - started
        log.evict(ledger, None if policy.reduce == "all" else group[0], slots, scores, choices[-1])
    started = perf_counter()
    # 5.
    for group, positions, choice in zip(groups, held, choices, strict=True):
        for index in group:
            _compact(policy, cache, index, positions, choice)
    # 6.
    ledger.sets = [choice.positions for choice in choices]
    ledger.holes = any(bool((positions == EMPTY).any()) for positions in ledger.sets)
    ledger.state = select(ledger.state, Kept(ledger.sets, [choice.index for choice in choices]))
    log.evicting_seconds += perf_counter() - started
    log.n_evictions += 1


def _scores(
    policy: Policy,
    cache: Cache,
    ledger: Ledger,
    group: tuple[int, ...],
    held: Int[Tensor, "batch heads slots"],
    means: Means,
) -> Float[Tensor, "batch _ slots"]:
    """3. for one set: [batch, 1, slots], or with its heads apart."""
    asked = group if ledger.scorer.per_layer else group[:1]
    n_kv_heads = cache.layers[group[0]].n_kv_heads
    total: Tensor | float = 0.0
    for index in asked:
        scores = of_layer(cache, ledger, index, held, means).to(held.device)
        total = total + (scores if policy.reduce == "head" else scores.mean(1, keepdim=True))
    mean = torch.as_tensor(total) / len(asked)
    return mean.expand(-1, n_kv_heads, -1) if policy.reduce == "head" else mean


def of_layer(
    cache: Cache, ledger: Ledger, index: int, held: Int[Tensor, "batch heads slots"], means: Means
) -> Float[Tensor, "batch _ slots"]:
    """What the scorer says of one layer's slots."""
    layer, rule = cache.layers[index], means.rules.get(index)
    if not isinstance(layer, RaggedLayer):
        reread = None if means.second_pass is None else partial(means.second_pass, cache, held[:, 0])
        views = Views(index, held, layer.keys, layer.values, rule=rule, reread=reread)
        return ledger.scorer.score(ledger.state, views)
    batch, heads = layer.shape
    held = held.expand(-1, heads, -1)
    scores = torch.full(held.shape, torch.nan, dtype=torch.float64, device=held.device)
    for row in range(batch):
        for head in range(heads):
            real = held[row, head] != EMPTY
            keys, values = (part[None, None] for part in layer.pair(row, head))
            place = slice(row, row + 1), slice(head, head + 1)
            views = Views(index, held[row, head][real][None, None], keys, values, *place, rule)
            scores[row, head, real] = ledger.scorer.score(ledger.state, views)[0, 0].to(held.device, torch.float64)
    return scores


def _compact(policy: Policy, cache: Cache, index: int, before: Tensor, choice: Choice) -> None:
    """5. for one layer."""
    layer = cache.layers[index]
    kept, held, positions = (part.expand(-1, layer.n_kv_heads, -1) for part in (choice.index, before, choice.positions))
    if isinstance(layer, RaggedLayer):
        layer.evict_ragged(kept, held, positions)
    elif policy.storage == "ragged" and bool((choice.positions == EMPTY).any()):
        cache.layers[index] = RaggedLayer.of(layer, kept, positions)
    else:
        layer.evict(choice.index)
