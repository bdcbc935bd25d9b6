"""What do all rows of a ceilings run say, and what do the nulls say beside them? The content of `summary.json`.

1. For each budget, of the real rows and of every null: the median ceiling, kappa, and the AUC of the dropped mass at
   that budget for `closable`. Intervals resample whole documents.
2. Of the real rows also: how often the largest weights or balancing swaps are optimal, pi = best / free weights, the
   same with Frank-Wolfe's set, what rules and shared sets cost.
3. At one budget: the dropped mass against its rivals as predictors, and the flat cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvlens.discover.ceilings import cells
from kvlens.discover.dropped_mass import predictor_table
from kvlens.stats import auc_over_traces, median_over_traces

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
CLOSE = 1.5  # kappa, as the paper counts rows that are nearly best
SAME = 1 + 1e-9  # errors equal but for rounding


def summarise(tables: Mapping[str, pd.DataFrame], budgets: Sequence[int], at: int, seed: int) -> dict[str, Any]:
    """The summary of the tables of `row_tables`; `at` is the budget of the predictors."""
    rows, nulls = tables["rows"], tables.get("nulls")
    found: dict[str, Any] = {
        "n_rows": int((rows.budget == budgets[0]).sum()),
        "n_instances": len(rows),
        "n_documents": len(set(rows.trace_id)),
        "share_exact": float(rows.exact.mean()),
        "predictor_budget": at,
        "budgets": [],
    }
    for budget in budgets:
        chosen = rows[rows.budget == budget]
        drawn = [] if nulls is None else nulls[nulls.budget == budget].groupby("null", sort=False)
        found["budgets"].append(
            {
                "budget": budget,
                "real": {**ceiling_facts(chosen, seed), **_beside(chosen, seed)},
                "nulls": {str(name): ceiling_facts(part, seed) for name, part in drawn},
            }
        )
    top = rows[["trace_id", "budget"]].assign(rule="top_mass", excess=rows.kappa)
    found["rules"] = _by_rule(pd.concat([top, tables["excess"]], ignore_index=True), budgets, seed)
    found["shared_sets"] = _shared(tables["groups"], budgets, seed)
    one = rows[rows.budget == at].reset_index(drop=True)
    statistics = tables["statistics"].drop(columns=["trace_id", "layer", "head", "query"])
    found["predictors"] = predictor_table(
        {name: statistics[name].to_numpy() for name in statistics},
        one.closable.to_numpy(),
        _documents(one),
        one["layer"].to_numpy() * 10_000 + one["head"].to_numpy(),
        seed=seed,
    )
    table = cell_table(one)
    known = table.auc.dropna()
    found["cells"] = {
        "n": len(table),
        "n_flat": int(table.flat.sum()),
        "median_auc": float(known.median()) if len(known) else None,
        "table": table.to_dict("records"),
    }
    return found


def cell_table(one: pd.DataFrame) -> pd.DataFrame:
    """The rows of `cells.parquet`, from the rows at the predictors' budget."""
    columns = (one[name].to_numpy() for name in ("layer", "head", "dropped_mass", "closable"))
    return pd.DataFrame(cells(*columns))


def ceiling_facts(rows: pd.DataFrame, seed: int) -> dict[str, Any]:
    """What rows of one budget say: real ones or a null's."""
    documents = _documents(rows)
    area = auc_over_traces(rows.dropped_mass.to_numpy()[:, None], rows.closable.to_numpy(), documents, seed=seed)
    return {
        "ceiling": {
            **_median(rows.ceiling.to_numpy(), documents, seed),
            # The lower of two middle values, as in medians.
            "quantiles": np.quantile(rows.ceiling, QUANTILES, method="inverted_cdf").round(6).tolist(),
        },
        "kappa": _median(rows.kappa.to_numpy(), documents, seed),
        "share_kappa_close": float((rows.kappa <= CLOSE).mean()),
        "share_closable": float(rows.closable.mean()),
        "auc": {"mean": float(area.mean[0]), "low": float(area.low[0]), "high": float(area.high[0])},
    }


def _beside(rows: pd.DataFrame, seed: int) -> dict[str, Any]:
    """What is measured of real rows alone."""
    documents, best = _documents(rows), rows.best_error.to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {
            name: best / rows[column].to_numpy()
            for name, column in (("pi", "free_error"), ("pi_search", "free_search_error"))
        }
        ratios["pi_either"] = np.fmax(ratios["pi"], ratios["pi_search"])
        # Where swaps with any key beat the pool, the ceiling is larger than the exact one.
        top = rows.top_mass_error.to_numpy()
        all_keys = np.where(top > 0, 1 - np.minimum(best, rows.balanced_all_error.to_numpy()) / top, 0.0)
    return {
        "share_top_mass_optimal": float((rows.top_mass_error <= best * SAME).mean()),
        "share_balanced_optimal": float((rows.balanced_error <= best * SAME).mean()),
        "share_whole_scope": float((rows.scope == "all").mean()),
        "share_beaten_outside_pool": float((rows.balanced_all_error * SAME < best).mean()),
        "share_free_below_sigma": float((rows.free_search_error <= rows.sigma / np.sqrt(rows.budget) * SAME).mean()),
        "ceiling_all_keys": _median(all_keys, documents, seed),
        **{name: _median(np.where(best > 0, ratio, np.nan), documents, seed) for name, ratio in ratios.items()},
    }


def _by_rule(table: pd.DataFrame, budgets: Sequence[int], seed: int) -> dict[str, Any]:
    """By rule and budget, the median excess over the optimum."""
    return {
        str(rule): {
            str(budget): _median(
                part.excess[part.budget == budget].to_numpy(), _documents(part[part.budget == budget]), seed
            )
            for budget in budgets
        }
        for rule, part in table.groupby("rule", sort=False)
    }


def _shared(table: pd.DataFrame, budgets: Sequence[int], seed: int) -> dict[str, Any]:
    """By budget, the median cost and excess of one set for a KV group; None where no group has two heads."""
    if table.n_heads.max() < 2:
        return {}
    parts = {budget: table[table.budget == budget] for budget in budgets}
    return {
        str(budget): {name: _median(part[name].to_numpy(), _documents(part), seed) for name in ("cost", "excess")}
        for budget, part in parts.items()
    }


def _documents(rows: pd.DataFrame) -> np.ndarray:
    """A number for each trace, in the order of their ids."""
    number = {name: place for place, name in enumerate(sorted(set(rows.trace_id)))}  # pandas 2 drops what follows a \0
    return np.array([number[name] for name in rows.trace_id], dtype=int)


def _median(values: Float[np.ndarray, " row"], documents: np.ndarray, seed: int) -> dict[str, float]:
    found = median_over_traces(values, documents, seed=seed)
    return {"median": float(found.mean), "low": float(found.low), "high": float(found.high)}
