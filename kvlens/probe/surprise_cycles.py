"""What would stay if surprise decided, refresh after refresh? A whole text fed through a cache that really shrinks.

1. The text goes in by `every` tokens at their own positions; each piece attends to what the cache still holds, so keys
   and values after an eviction are those that a decoder would have made.
2. After a piece, when more than `budget + frozen` rows are held, every row is scored, and `refresh` says which stay.
   The others leave the cache and the state, in fresh storage.
3. Between two refreshes up to `budget + frozen + every` rows are held.

The text is given (teacher forcing): what a model would have written after an eviction is another question.

Source: counter-causal surprise (the cycle).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.linear import fast_linear
from kvlens.model import Model
from kvlens.observables.refresh import refresh
from kvlens.observables.surprise import Scores, State, Surprise
from kvlens.observables.surprise_variant import Variant
from kvlens.probe.signal_pass import watch_entering

FROZEN = 4  # the sinks: what stands at the front takes much attention, whatever it says
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Cycle:
    """How often a cache is refreshed, and what it then holds: `budget` rows, `recent` among them, and `frozen` more."""

    budget: int
    every: int
    frozen: int = FROZEN
    recent: int = 0


@dataclass(frozen=True)
class Refreshed:
    """One refresh: what was held before it, ascending, with scores (NaN where there is none), and what stayed."""

    n_seen: int
    positions: Int[np.ndarray, " row"]
    scores: Float[np.ndarray, " row"]
    kept: Bool[np.ndarray, " row"]


def make_cycle(budget: Any, every: Any, frozen: Any, recent: Any) -> Cycle | None:
    """The cycle that was asked for; `every` is a quarter of the budget by default; None where nothing was asked.

    Raises: InputError for what is no count, or more than a budget can hold.
    """
    if budget is None:
        if asked := [name for name, value in _named(None, every, frozen, recent).items() if value is not None]:
            raise InputError(f"{asked[0]} says how a cache is refreshed, but no budget is given", "add a budget (-J N)")
        return None
    given = _named(budget, every, frozen, recent)
    for name, value in given.items():
        least = 1 if name in ("budget", "every") else 0
        if value is not None and (type(value) is not int or not least <= value <= _MOST):
            raise InputError(f"{name} {value!r} is no count from {least} to {_MOST}", "give a whole number of tokens")
    every = max(1, budget // 4) if every is None else every
    cycle = Cycle(budget, every, FROZEN if frozen is None else frozen, recent or 0)
    if cycle.recent >= budget:
        raise InputError(
            f"a budget of {budget} leaves nothing to choose beside {cycle.recent} recent tokens", "lower recent"
        )
    return cycle


def require_room(variants: Sequence[Variant], cycle: Cycle) -> None:
    """Nothing; raises InputError where no refresh of one of these variants could hold what it must.

    Units are not looked at: how long the last one is, which has no future, depends on the text.
    """
    for variant in variants:
        unknown = variant.min_gap + 1  # rows at one end of the text, which see nothing
        first = max(cycle.frozen, unknown) if variant.past else cycle.frozen
        last = cycle.recent if variant.past else max(cycle.recent, unknown)
        if first + last > cycle.budget + cycle.frozen:
            raise InputError(
                f"'{variant.name}': a budget of {cycle.budget} and {cycle.frozen} frozen rows cannot hold "
                f"{first + last} protected ones",
                "raise the budget, or lower recent or gap",
            )


def _named(budget: Any, every: Any, frozen: Any, recent: Any) -> dict[str, Any]:
    return {"budget": budget, "every": every, "frozen": frozen, "recent": recent}


@torch.inference_mode()
def cycles(
    surprise: Surprise, ids: Int[Tensor, " pos"], cycle: Cycle, units: Int[Tensor, " pos"] | None = None
) -> Iterator[Refreshed]:
    """Every refresh of a text of these tokens, in order; what comes after the last one is not fed in.

    Raises: InputError where the budget cannot hold what is protected.
    Cost: one forward pass over the text, a piece at a time, and one pass of the variant at each refresh; memory the
        cache of `budget + frozen + every` tokens.
    """
    state: State | None = None
    held: list[tuple[Tensor, Tensor]] = []
    for stop in range(cycle.every, len(ids) + 1, cycle.every):
        # 1. the next piece, behind what is still held
        new = slice(stop - cycle.every, stop)
        positions = torch.arange(new.start, new.stop, device=ids.device)[None]
        held, entering = _feed(surprise, ids[None, new], positions, state, held)
        piece = State(ids[None, new], positions, entering, None if units is None else units[None, new])
        state = piece if state is None else state.append(piece)
        if state.ids.shape[1] <= cycle.budget + cycle.frozen:
            continue
        # 2. who stays
        scores = surprise.scores(state, held)
        kept = refresh(state, scores, cycle.budget, cycle.frozen, cycle.recent)
        yield _refreshed(stop, state, scores, kept)
        state = state.select(kept)
        held = [(keys[:, :, kept[0]], values[:, :, kept[0]]) for keys, values in held]


def _feed(
    surprise: Surprise,
    ids: Int[Tensor, "one new"],
    positions: Int[Tensor, "one new"],
    state: State | None,
    held: list[tuple[Tensor, Tensor]],
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """Keys and values with those of the new tokens, and the states that entered the pass's first block."""
    model = surprise.model
    cache = models.cache_from(model, held) if held else models.new_cache(model)
    mask, key_positions = None, None
    if state is not None:
        key_positions = torch.cat([state.positions, positions], 1)
        mask = _mask(model, key_positions, ids.shape[1])
    with watch_entering(model, [surprise]) as entering, fast_linear():
        models.hidden(model, ids, positions=positions, cache=cache, mask=mask, key_positions=key_positions)
    return models.cache_layers(cache), entering.get(surprise.start)


def _mask(model: Model, key_positions: Int[Tensor, "one key"], n_new: int) -> Bool[Tensor, "one one query key"] | None:
    """What the new tokens see, where a sliding window must know how far apart kept rows are; else the backend's own."""
    if not any(model.sliding):
        return None
    n_keys = key_positions.shape[1]
    seen = torch.ones(n_new, n_keys, dtype=torch.bool, device=key_positions.device)
    return seen.tril(n_keys - n_new)[None, None]


def _refreshed(n_seen: int, state: State, scores: Scores, kept: Tensor) -> Refreshed:
    stays = torch.zeros_like(state.ids[0], dtype=torch.bool)
    stays[kept[0]] = True
    values = scores.values.masked_fill(~scores.known, torch.nan)[0]
    return Refreshed(n_seen, *(tensor.cpu().numpy() for tensor in (state.positions[0], values, stays)))
