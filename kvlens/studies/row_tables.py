"""What do the rows of one layer say? Every table of a ceilings run, for one block of captured rows.

1. Rows of one KV head share their values and are searched together: ceilings of every budget (`rows`), the same under
   each null control (`nulls`).
2. At the budget of the predictor: what might tell which rows are closable (`statistics`).
3. What rules that a cache could use cost over the optimum (`excess`), and one set for a whole KV group (`groups`).

Rules, by what they keep: `streaming` the first four keys and the most recent (StreamingLLM), `key_norm` the smallest
key norms (Devoto et al.), `value_weighted` the largest p_j ||v_j||, `random` any. `top_mass`, the largest weights, is
what TOVA keeps at its own query, and stands in `rows`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.discover.ceilings import ceilings
from kvlens.discover.dropped_mass import row_statistics
from kvlens.discover.excess import excess, largest, shared_set
from kvlens.discover.instances import Instances, instances, keep_errors
from kvlens.discover.nulls import null_rows
from kvlens.probe.row_block import RowBlock

Columns = dict[str, np.ndarray]
Tables = dict[str, Columns]
TABLES = ("rows", "nulls", "statistics", "excess", "groups")
RULES = ("streaming", "key_norm", "value_weighted", "random")
SINKS = 4  # StreamingLLM's
PREDICTOR_BUDGET = 8
NULL_COLUMNS = ("top_mass_error", "best_error", "dropped_mass", "kappa", "ceiling", "closable")


def predictor_budget(budgets: Sequence[int]) -> int:
    """The budget at which rows are told apart: 8, or the nearest there is."""
    return min(budgets, key=lambda budget: (abs(budget - PREDICTOR_BUDGET), budget))


def measure_block(block: RowBlock, budgets: Sequence[int], nulls: Sequence[str], seed: int) -> Tables:
    """Every table's rows for one layer of one trace. Cost: `ceilings` once, and without free weights once a null."""
    parts: dict[str, list[Columns]] = {name: [] for name in TABLES}
    for kv_head in range(len(block.values)):
        rows, heads, queries, norms = _of_kv_head(block, kv_head)
        if not len(rows):
            continue
        where = {"trace_id": np.full(len(rows), block.trace_id, dtype=object)}
        where |= {"layer": np.full(len(rows), block.layer), "head": heads, "query": queries}
        entropy = (seed, block.layer, kv_head, zlib.crc32(block.trace_id.encode("utf-8", "surrogatepass")))
        for name, columns in _measure(rows, where, norms, budgets, nulls, entropy).items():
            parts[name].append(columns)
    return {
        name: {column: np.concatenate([part[column] for part in found]) for column in found[0]}
        for name, found in parts.items()
        if found
    }


def _of_kv_head(
    block: RowBlock, kv_head: int
) -> tuple[Instances, Int[np.ndarray, " row"], Int[np.ndarray, " row"], Float[np.ndarray, " key"]]:
    """The rows of one KV head, up to the last key that one of them sees; their heads, queries and the keys' norms."""
    chosen = (block.kv_heads == kv_head).nonzero()[:, 0]
    queries, n_keys = block.queries[chosen].cpu().numpy(), block.n_keys[chosen].cpu().numpy()
    stop = int(queries.max(initial=-1)) + 1
    pos = np.arange(stop)
    visible = (pos <= queries[:, None]) & (pos > (queries - n_keys)[:, None])
    rows = instances(
        block.weights[chosen, :stop].cpu().numpy(),
        block.values[kv_head, :stop].cpu().numpy(),
        visible=visible,
        sink=block.sink[chosen].cpu().numpy(),
    )
    return rows, block.heads[chosen].cpu().numpy(), queries, block.key_norms[kv_head, :stop].cpu().numpy()


def _measure(
    rows: Instances,
    where: Columns,
    key_norms: Float[np.ndarray, " key"],
    budgets: Sequence[int],
    nulls: Sequence[str],
    entropy: tuple[int, ...],
) -> Tables:
    found = ceilings(rows, budgets, all_keys=True)
    tables = {"rows": _placed(where, found)}
    drawn = []
    for number, name in enumerate(nulls):
        null = ceilings(null_rows(rows, name, (*entropy, number)), budgets, free_weights=False)
        kept = {column: null[column] for column in ("budget", *NULL_COLUMNS)}
        drawn.append(_placed(where, kept | {"row": null["row"], "null": np.full(len(null["row"]), name, dtype=object)}))
    if drawn:
        tables["nulls"] = {column: np.concatenate([part[column] for part in drawn]) for column in drawn[0]}
    statistics = row_statistics(rows, predictor_budget(budgets), key_norms=key_norms)
    tables["statistics"] = where | statistics
    best = {budget: found["best_error"][found["budget"] == budget] for budget in budgets}
    tables["excess"] = _rules(rows, where, key_norms, best, entropy)
    tables["groups"] = _groups(rows, where, best)
    return tables


def _placed(where: Columns, found: Columns) -> Columns:
    """The columns with the trace, layer, head and query of each line in front; `row` says which row it is of."""
    return {name: column[found["row"]] for name, column in where.items()} | {
        name: column for name, column in found.items() if name != "row"
    }


def _rules(
    rows: Instances,
    where: Columns,
    key_norms: Float[np.ndarray, " key"],
    best: dict[int, Float[np.ndarray, " row"]],
    entropy: tuple[int, ...],
) -> Columns:
    """The error of every rule at every budget, and how many times the best one it is."""
    parts = []
    for budget, least in best.items():
        for rule in RULES:
            error = keep_errors(rows, kept_by(rule, rows, key_norms, budget, entropy))
            line = {"budget": np.full(len(rows), budget), "rule": np.full(len(rows), rule, dtype=object)}
            parts.append(where | line | {"error": error, "excess": excess(error, least)})
    return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}


def kept_by(
    rule: str, rows: Instances, key_norms: Float[np.ndarray, " key"], budget: int, entropy: Sequence[int]
) -> Bool[np.ndarray, "row key"]:
    """The keep-mask of one of `RULES`."""
    shape = rows.weights.shape
    pos = np.arange(shape[1], dtype=float)
    scores = {
        # Of a budget that is no larger than the sinks, the most recent key is still kept: a query sees itself.
        "streaming": lambda: np.where(pos < min(SINKS, budget - 1), np.inf, pos),
        "key_norm": lambda: -key_norms,
        "value_weighted": lambda: rows.weights * np.sqrt((rows.values**2).sum(-1)),
        "random": lambda: np.random.default_rng([*entropy, budget]).random(shape),
    }[rule]()
    return largest(np.broadcast_to(scores, shape), rows.visible, budget)


def _groups(rows: Instances, where: Columns, best: dict[int, Float[np.ndarray, " row"]]) -> Columns:
    """What one set for all heads of the group costs at every query and budget; heads with a cache of their own none."""
    parts = []
    for budget, least in best.items():
        found = shared_set(rows, where["query"], budget, least)
        line = {name: np.full(len(found["group"]), where[name][0]) for name in ("trace_id", "layer")}
        line |= {"first_head": np.full(len(found["group"]), where["head"].min()), "query": found.pop("group")}
        parts.append(line | {"budget": np.full(len(line["query"]), budget)} | found)
    return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
