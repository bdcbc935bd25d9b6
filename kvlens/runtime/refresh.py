"""What happens when an eviction is due? Scores, a budget and a choice for each set of tokens kept together, compaction.

1. Sets: with `reduce: all` one for all managed layers and heads, else one a layer; with `head` its heads choose apart.
2. Budgets, where the allocator needs no scores. Where no head holds more than its budget, or all sets together no more
   than the whole budget, nothing happens.
3. Score: the mean over the layers and heads that share a set. Ragged heads are scored one by one, none is padded.
4. Budgets that follow the scores, of all sets; `storage: uniform_cap` cuts each to the mean. Choose (evict.py), for all
   sets before the first layer is touched.
5. Compact every layer. Under `storage: ragged` a layer whose heads or rows end up with different numbers turns ragged.
6. The ledger's positions and the scorer's state follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from time import perf_counter

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from kvlens.allocate.interface import Allocator, Cells
from kvlens.observables.attention_weights import Rule
from kvlens.observables.rotation import Rotation
from kvlens.policy import Policy
from kvlens.runtime.cache import Ledger
from kvlens.runtime.evict import Choice, choose, protected
from kvlens.runtime.ragged import RaggedLayer
from kvlens.runtime.report import Log
from kvlens.runtime.reread import SecondPass
from kvlens.scorers.interface import EMPTY, Kept, Reread, Views, select

_ONE_AT_A_TIME = Lock()  # a second pass lays what its blocks put out where another thread's would read it


@dataclass(frozen=True)
class Means:
    """What a scorer may need of the model when it scores: how layers weigh and turn keys, and a pass over the cache."""

    rules: dict[int, Rule]
    second_pass: SecondPass | None = None
    rotations: dict[int, Rotation] = field(default_factory=dict)


def refresh(policy: Policy, cache: Cache, ledger: Ledger, mean: Int[Tensor, " batch"], log: Log, means: Means) -> None:
    """Nothing; afterwards no set holds more than its budget, and the log says what left. `mean` is J of every row.

    Raises: InputError where more is protected than the budget holds; no layer was touched then.
    """
    # 1.
    groups = [ledger.layers] if policy.reduce == "all" else [(layer,) for layer in ledger.layers]
    held = ledger.sets if len(ledger.sets) == len(groups) else ledger.sets * len(groups)
    heads = cache.layers[ledger.layers[0]].n_kv_heads if policy.reduce == "head" else 1
    cells = _cells(policy, ledger, held, mean, heads)
    allocator = policy.allocate.make()
    # 2.
    limits = None if allocator.reads_scores else _capped(policy, allocator, cells)
    if not _crowded(policy, cells, limits):
        return
    # 3.
    found: dict[int, Tensor] = {}  # of the second pass, which is made once for all layers
    started = perf_counter()
    scores = [
        _scores(policy, cache, ledger, group, positions, means, found)
        for group, positions in zip(groups, held, strict=True)
    ]
    log.scored(perf_counter() - started)
    # 4.
    started = perf_counter()
    if limits is None:
        limits = _capped(policy, allocator, replace(cells, scores=scores))
    pages = policy.granularity.page_size if policy.granularity.unit == "page" else None
    choices = [choose(*each, page_size=pages) for each in zip(scores, cells.positions, limits, cells.safe, strict=True)]
    for group, slots, score, choice in zip(groups, cells.positions, scores, choices, strict=True):
        log.evict(ledger, None if policy.reduce == "all" else group[0], slots, score, choice)
    # 5.
    for group, positions, choice in zip(groups, held, choices, strict=True):
        for index in group:
            _compact(policy, cache, index, positions, choice)
    # 6.
    ledger.sets = [choice.positions for choice in choices]
    ledger.lost = True
    ledger.holes = any(bool((positions == EMPTY).any()) for positions in ledger.sets)
    ledger.state = select(ledger.state, Kept(ledger.sets, [choice.index for choice in choices], scores))
    log.refreshed(perf_counter() - started)


def _cells(policy: Policy, ledger: Ledger, held: Sequence[Tensor], mean: Tensor, heads: int) -> Cells:
    """1. as an allocator sees it, but for the scores."""
    slots = [positions.expand(-1, heads, -1) for positions in held]
    protect = policy.protection()
    safe = [protected(protect, each, ledger.n_own, ledger.n_prompt) for each in slots]
    return Cells(ledger.layers, mean, slots, safe)


def _capped(policy: Policy, allocator: Allocator, cells: Cells) -> list[Int[Tensor, "#batch #heads"]]:
    """2. and 4. The budget of every set."""
    limits = allocator.budgets(cells)
    if policy.storage == "uniform_cap":
        limits = [torch.minimum(limit, cells.mean[:, None]) for limit in limits]
    return limits


def _crowded(policy: Policy, cells: Cells, limits: Sequence[Tensor] | None) -> bool:
    """2. Whether there are more slots than the budgets hold, or more tokens in a head than its own does."""
    widths = [positions.shape[-1] for positions in cells.positions]
    if limits is not None:
        return any(
            positions.shape[-1] > int(limit.max()) or bool(((positions != EMPTY).sum(-1) > limit).any())
            for positions, limit in zip(cells.positions, limits, strict=True)
        )
    least = int(cells.mean.min())
    return sum(widths) > least * len(widths) or (policy.storage == "uniform_cap" and max(widths) > least)


def _scores(
    policy: Policy,
    cache: Cache,
    ledger: Ledger,
    group: tuple[int, ...],
    held: Int[Tensor, "batch heads slots"],
    means: Means,
    found: dict[int, Tensor],
) -> Float[Tensor, "batch _ slots"]:
    """3. for one set: [batch, 1, slots], or with its heads apart."""
    asked = group if ledger.scorer.per_layer else group[:1]
    n_kv_heads = cache.layers[group[0]].n_kv_heads
    total: Tensor | float = 0.0
    for index in asked:
        scores = of_layer(cache, ledger, index, held, means, found).to(held.device)
        total = total + (scores if policy.reduce == "head" else scores.mean(1, keepdim=True))
    mean = torch.as_tensor(total) / len(asked)
    return mean.expand(-1, n_kv_heads, -1) if policy.reduce == "head" else mean


def of_layer(
    cache: Cache,
    ledger: Ledger,
    index: int,
    held: Int[Tensor, "batch heads slots"],
    means: Means,
    found: dict[int, Tensor] | None = None,
) -> Float[Tensor, "batch _ slots"]:
    """What the scorer says of one layer's slots; `found` is where a second pass leaves what it says of the others."""
    layer, rule, turn = cache.layers[index], means.rules.get(index), means.rotations.get(index)
    found = {} if found is None else found

    def reread(row: slice, head: slice, ids: Tensor, states: Tensor | None) -> Tensor:
        if index not in found and means.second_pass is not None:
            with _ONE_AT_A_TIME:
                found.update(means.second_pass(cache, ledger, ids, states))
        return found[index][row, head]

    def keys_of(other: int) -> Tensor:
        return cache.layers[other].keys

    if not isinstance(layer, RaggedLayer):
        again = None if means.second_pass is None else partial(reread, slice(None), slice(None))
        views = Views(index, held, layer.keys, layer.values, rule=rule, reread=again, rotation=turn, keys_of=keys_of)
        return ledger.scorer.score(ledger.state, views)
    batch, heads = layer.shape
    held = held.expand(-1, heads, -1)
    scores = torch.full(held.shape, torch.nan, dtype=torch.float64, device=held.device)
    for row in range(batch):
        for head in range(heads):
            real = held[row, head] != EMPTY
            if not bool(real.any()):  # only padding so far: there is nothing to score
                continue
            keys, values = (part[None, None] for part in layer.pair(row, head))
            place = slice(row, row + 1), slice(head, head + 1)
            again = None
            if means.second_pass is not None:
                again = partial(_of_pair, partial(reread, *place), real)
            views = Views(index, held[row, head][real][None, None], keys, values, *place, rule, again, rotation=turn)
            scores[row, head, real] = ledger.scorer.score(ledger.state, views)[0, 0].to(held.device, torch.float64)
    return scores


def _of_pair(reread: Reread, real: Bool[Tensor, " slots"], ids: Tensor, states: Tensor | None) -> Tensor:
    """What a second pass says of one ragged head, without its empty slots."""
    return reread(ids, states)[..., real]


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
