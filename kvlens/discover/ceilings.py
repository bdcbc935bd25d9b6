"""How much error could a better choice of kept keys save, with softmax weights as they are? The numbers of every row.

For each row and budget:

1. the error of the largest weights, `top_mass_error` = e(A*), and the mass they drop;
2. the exact lowest error over the pool, `best_error`, and what balancing swaps reach in it;
3. the same two sets with free weights (`free_error` of the best set, `free_top_error` of A*) and, of at most `budget`
   keys out of all, what Frank-Wolfe finds (`free_search_error`); each with its duality gap;
4. kappa = e(A*) / best, ceiling = 1 - best / e(A*), and `closable`: kappa above 1.11. A row with e(A*) = 0 has kappa 1
   and is not closable; one with best = 0 < e(A*) has an infinite kappa and is. Both stay: leaving them out would bias
   what predicts `closable`.

A row that sees no more keys than the budget keeps them all and has no error. `scope` is "all" where the pool is every
key the row sees, else "pool": nothing beats an exact value inside the same scope.

Over rows, a cell is a (layer, head): its median dropped mass at budget 8, whether it is flat (above .25), and the AUC
of dropped mass for `closable`.

Source: ContourKV; effective rank, the exact hull distances and the gaps are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.discover.balancing import balance, balance_all_keys, top_mass
from kvlens.discover.free_weights import frank_wolfe, hull_distance
from kvlens.discover.instances import Instances, extra_keys, make_pool
from kvlens.discover.subsets import best_subsets
from kvlens.errors import InputError
from kvlens.stats import auc

BUDGETS = (4, 8, 16, 32)
CLOSABLE = 1.11
FLAT = 0.25
ROWS_AT_ONCE = 256
ERRORS = ("top_mass_error", "best_error", "balanced_error")
FREE = ("free_error", "free_gap", "free_top_error", "free_top_gap", "free_search_error", "free_search_gap")

Columns = dict[str, np.ndarray]


def ceilings(
    rows: Instances,
    budgets: Sequence[int] = BUDGETS,
    *,
    free_weights: bool = True,
    all_keys: bool = False,
    n_threads: int | None = None,
    device: str | None = None,
) -> Columns:
    """The columns of `rows.parquet` that arrays give, a line for each row and budget, budgets of a row together.

    Beside the contract's: `row` (its place in `rows`), `sigma`, `free_top_gap`, `free_search_error` and
    `free_search_gap`; with `all_keys` also `balanced_all_error`, swaps with any key.

    Args:
        rows: from `instances`.
        budgets: keys kept.
        free_weights: measure step 3; without it those columns are NaN.
        all_keys: also swap over all keys; costs several times the rest.
        n_threads, device: as `best_subsets`.

    Cost: for each row and the four budgets of the paper 280,000 subsets; memory a few hundred rows' contributions.
    """
    budgets = list(budgets)
    if not len(rows) or not budgets:
        raise InputError(f"{len(rows)} rows and {len(budgets)} budgets", "give at least one of each")
    if len(set(budgets)) < len(budgets) or not all(type(budget) is int and budget > 0 for budget in budgets):
        raise InputError(f"budgets {budgets!r} are no numbers of keys", "give whole numbers from 1 on, each once")
    parts = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = rows.take(np.arange(start, min(start + ROWS_AT_ONCE, len(rows))))
        shared = {"row": np.arange(start, start + len(chunk)), "n_keys": chunk.n_keys}
        shared |= {"effective_rank": effective_rank(chunk), "sigma": chunk.sigma}
        search = frank_wolfe(chunk, budgets)[0] if free_weights else {}
        lines = []
        for budget in budgets:
            found = _kept_sets(chunk, budget, free_weights, all_keys, n_threads, device)
            if budget in search:
                found |= {"free_search_error": search[budget].error, "free_search_gap": search[budget].gap}
            lines.append(shared | {"budget": np.full(len(chunk), budget)} | found | _ratios(found))
        parts.append({name: np.stack([line[name] for line in lines], 1).ravel() for name in lines[0]})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _kept_sets(
    rows: Instances, budget: int, free_weights: bool, all_keys: bool, n_threads: int | None, device: str | None
) -> Columns:
    """Steps 1 to 3 at one budget."""
    top = np.take_along_axis(rows.weights, rows.by_weight[:, :budget], 1).sum(1)
    found: Columns = {name: np.zeros(len(rows)) for name in ERRORS}
    found |= {name: np.full(len(rows), 0.0 if free_weights else np.nan) for name in FREE}
    if all_keys:
        found["balanced_all_error"] = np.zeros(len(rows))
    size = np.minimum(rows.n_keys, budget + extra_keys(budget))
    found |= {
        "dropped_mass": np.where(rows.n_keys > budget, np.clip(1 - rows.sink - top, 0.0, 1.0), 0.0),
        "n_subsets": np.array([comb(int(n), min(budget, int(n))) for n in size], dtype=np.int64),
        "scope": np.where(rows.n_keys == size, "all", "pool").astype(object),
        "exact": np.ones(len(rows), dtype=bool),
    }
    for n in np.unique(size[size > budget]):
        places = np.flatnonzero(size == n)
        some = rows.take(places)
        pool = make_pool(some, budget)
        first, balanced = top_mass(pool, budget), balance(pool, budget)
        best = best_subsets(pool, budget, start=balanced, n_threads=n_threads, device=device)
        for name, chosen in zip(ERRORS, (first, best, balanced), strict=True):
            found[name][places] = chosen.error
        if free_weights:
            for name, chosen in (("free", best), ("free_top", first)):
                free = hull_distance(some, np.take_along_axis(pool.keys, chosen.members, 1))
                # Forced weights are free weights too: where they do as well, only rounding is between the two.
                found[f"{name}_error"][places] = np.minimum(free.error, chosen.error)
                found[f"{name}_gap"][places] = free.gap
        if all_keys:
            found["balanced_all_error"][places] = balance_all_keys(some, budget)
    return found


def _ratios(found: Columns) -> Columns:
    """Step 4."""
    top, best = found["top_mass_error"], found["best_error"]
    with np.errstate(divide="ignore", invalid="ignore"):
        kappa = np.where(top > 0, top / best, 1.0)
        ceiling = np.where(top > 0, 1 - best / top, 0.0)
    return {"kappa": kappa, "ceiling": ceiling, "closable": kappa > CLOSABLE}


def effective_rank(rows: Instances) -> Float[np.ndarray, " row"]:
    """(sum lambda)^2 / sum lambda^2 of the eigenvalues of sum_j c_j c_j': in how many directions contributions spread.

    0 where nothing contributes. Source: the participation ratio; the paper leaves its effective rank undefined.
    """
    found = np.zeros(len(rows))
    for row, deviation in enumerate(rows.deviations()):
        vectors = rows.weights[row, :, None] * deviation
        moment = vectors.T @ vectors
        if (total := float(np.trace(moment))) > 0:
            found[row] = total**2 / float((moment**2).sum())
    return found


def cells(
    layer: Int[np.ndarray, " row"],
    head: Int[np.ndarray, " row"],
    dropped_mass: Float[np.ndarray, " row"],
    closable: Bool[np.ndarray, " row"],
) -> Columns:
    """The columns of `cells.parquet`: a line for each (layer, head) there is, from the rows at one budget, 8.

    The AUC of a cell whose rows are all closable, or none, is NaN.
    """
    found: dict[str, list[Any]] = {
        name: [] for name in ("layer", "head", "median_dropped_mass", "flat", "auc", "n_rows")
    }
    for one, two in sorted(set(zip(layer.tolist(), head.tolist(), strict=True))):
        inside = (layer == one) & (head == two)
        median = float(np.median(dropped_mass[inside]))
        area = float(auc(dropped_mass[inside, None], closable[inside])[0])
        for name, value in zip(found, (one, two, median, median > FLAT, area, int(inside.sum())), strict=True):
            found[name].append(value)
    return {name: np.array(column) for name, column in found.items()}
