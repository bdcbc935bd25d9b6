"""Every allocator under every scorer, in every storage and family: exact budgets, protection, determinism.

Driven by the two tables. A new allocator is a row of `WITH`; a new scorer comes by itself, and is a row of `MASS` where
its scores are a mass.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from eviction import MANAGED, TOGETHER, padded, policy, streamed_logits
from tiny import FAMILIES

from kvlens import model as models
from kvlens.allocate.table import TABLE as ALLOCATORS
from kvlens.model import Model
from kvlens.runtime.apply import Run, apply
from kvlens.scorers.table import TABLE as SCORERS

TOKENS, SINKS, RECENT = 10, 2, 3
LENGTHS, MORE = [21, 7, 13], 6
# parameters that fit a budget of 10 tokens, and the least a head keeps of them beside what is protected
WITH: dict[str, dict[str, Any]] = {
    "uniform": {},
    "table": {},
    "pyramid": {"beta": 5.0},
    "ada": {"alpha": 0.6},
    "contour": {"floor": 4},
    "contour_mass": {"floor": 4},
}
LEAST = {"uniform": 10, "pyramid": 6, "ada": 6, "contour": 6, "contour_mass": 6}  # protected ones included
RECENT_OF = {"contour": 4, "contour_mass": 4}
MASS = ("h2o", "snapkv", "random", "key_var", "value_var", "oracle")  # scores that are never negative


@functools.cache
def family(name: str) -> Model:
    return models.wrap(FAMILIES[name]())


def ran(model: Model, scorer: str, allocator: str, **changes: Any) -> Run:
    """Three rows of unlike lengths, the prompt at once, then some tokens one at a time."""
    allocate: dict[str, Any] = {"name": allocator, "parameters": WITH[allocator]}
    if allocator == "table":
        allocate["table"] = [
            [6 + (layer + 3 * head) % 8 for head in range(model.n_kv_heads)] for layer in range(model.n_layers)
        ]
    settings = {"reduce": "head", "storage": "ragged", "allocate": allocate, "tokens": TOKENS} | changes
    ids, own, _ = padded(LENGTHS, MORE)
    with apply(policy(scorer, **settings), model) as run:
        streamed_logits(model, ids, [max(LENGTHS), *[1] * MORE], own=own)
    return run


def check(run: Run, allocator: str, *, capped: bool = False) -> None:
    """What every row holds after its last token."""
    kept, n_cells = run.report().kept, len(run.layers) * run.model.n_kv_heads
    for row, length in enumerate(LENGTHS):
        n = length + MORE
        cells = [kept[layer][row][head] for layer in run.layers for head in range(run.model.n_kv_heads)]
        for cell in cells:
            assert cell == sorted(set(cell))
            always = {*range(SINKS), *range(n - max(RECENT, RECENT_OF.get(allocator, 0)), n)}
            assert always <= set(cell)
            assert len(cell) >= min(n, LEAST.get(allocator, 6))
            assert not capped or len(cell) <= TOKENS
        counts = [len(cell) for cell in cells]
        if allocator == "table":
            table = run.policy.allocate.table
            assert table is not None
            assert counts == [min(n, b) for layer in run.layers for b in table[layer]]
        elif not capped:
            assert sum(counts) == TOKENS * n_cells


def pairs() -> list[tuple[str, str]]:
    together = [name for name in SCORERS if name in TOGETHER or SCORERS[name].second_pass is not None]
    return [
        (scorer, allocator)
        for scorer in SCORERS
        for allocator in ALLOCATORS
        if scorer not in together and (allocator != "contour_mass" or scorer in MASS)
    ]


def test_every_allocator_has_its_row() -> None:
    assert list(WITH) == list(ALLOCATORS)
    assert set(MASS) <= set(SCORERS)


@pytest.mark.parametrize(("scorer", "allocator"), pairs())
def test_budgets_are_exact_under_every_scorer(scorer: str, allocator: str) -> None:
    check(ran(family("llama"), scorer, allocator), allocator)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("name", MANAGED)
def test_budgets_are_exact_in_every_family_and_storage(name: str, allocator: str) -> None:
    if allocator != "table":
        kept = [ran(family(name), "h2o", allocator, storage=storage) for storage in ("ragged", "padded", "ragged")]
        check(kept[0], allocator)
        assert kept[0].report().kept == kept[1].report().kept == kept[2].report().kept  # shape of storage, no choice
        check(ran(family(name), "h2o", allocator, storage="uniform_cap"), allocator, capped=True)
    else:
        check(ran(family(name), "h2o", allocator), allocator)
