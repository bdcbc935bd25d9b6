"""Which cheap signals tell which tokens matter, and what do they add to knowing the position?

1. Per trace, signal and layer, over the reasoning tokens that count: Spearman with the effect (`rho`: position
   partialled out; `raw_rho`: left in); the AUC of the signal, position partialled out, for the top tenth of tokens by
   |effect| (`auc_size`: tokens that matter either way) and for the top tenth by effect (`auc_signed`: tokens the target
   needs). Intervals are over traces.
2. Every layer has a row over all traces, to look at. To compare signals, the best layer (largest |mean rho|) is chosen
   on one half of the traces and its row is of the other half; a signal without layers has a row of that half too.
3. What each adds to position, and a combination of those a decoder can compute: `combine.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvlens.discover.bands import usable_rows
from kvlens.discover.combine import TOP, best_layer, candidate, combine, folds_of, require_sklearn
from kvlens.discover.derived import open_derived, sources
from kvlens.discover.inputs import (
    LEAST_TOKENS,
    LEAST_TRACES,
    Labelled,
    Pair,
    halves,
    read_pair,
)
from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.schemas import RANKING, RANKING_TABLES
from kvlens.stats import auc, beyond_position, correlation, over_traces, spearman, top_share

MEASURES = ("rho", "raw_rho", "auc_size", "auc_signed")
EACH, BEST, ONLY = "each layer", "best layer", "only value"
Measured = dict[str, np.ndarray]  # [trace, layer] for each of MEASURES


def signals(
    labels: Run | str | Path,
    signals: Run | str | Path,
    out: str | Path = "runs/ranking",
    *,
    audit_only: bool = False,
    seed: int = 0,
    force: bool = False,
) -> Run:
    """The finished ranking at `out`: the table `ranking` and `documents["fitted"]`, which is `fitted.json`.

    Args:
        labels, signals: a label run and a signals run of the same model and traces.
        audit_only: of a label run made with a screen, use the audit windows.

    Raises: InputError when the runs do not fit or no trace is left; EnvironmentLacks without scipy or scikit-learn.
    Cost: seconds to minutes; reads one signal at a time into memory.
    """
    pair = read_pair(labels, signals, audit_only=audit_only)
    if not pair.fields:
        raise InputError(f"'{pair.signals_path}' has no signals", "observe some: kvlens observe --signals all")
    require_sklearn()
    config = {"audit_only": audit_only}
    made: dict[str, Any] = {"config": config, "input_hash": pair.input_hash(), "seed": seed, "force": force}
    with open_derived(out, pair.labels, pair.signals_path, schema=RANKING, **made) as run:
        if not run.complete:
            for trace_id, reason in pair.skipped.items():
                run.skip(trace_id, reason)
            discover, folds = halves(pair.trace_ids, seed), folds_of(pair.trace_ids, seed)
            rows, candidates = [], []
            for name in pair.fields:
                values = pair.read(name)
                measured = _measured(pair.traces, values)
                rows += list(_rows(pair, name, measured, discover, seed))
                candidates.append(candidate(pair, name, values, measured["rho"], folds))
            combination = combine(pair, candidates, folds, seed)
            run.write_part("ranking", "all", _table(rows, combination.added))
            n_tokens = sum(len(trace.pos) for trace in pair.traces)
            run.finish(
                {"ranking": ["all"]},
                counts={"traces": len(pair.traces), "tokens": n_tokens, "confirm_traces": int((~discover).sum())},
                results={**sources(pair), "few_traces": int((~discover).sum()) < LEAST_TRACES},
                documents={"fitted": combination.document},
            )
    return load(out)


def _measured(traces: list[Labelled], values: Float[np.ndarray, "row layer"]) -> Measured:
    """By measure, the numbers of every layer in each trace; NaN where they have no meaning."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in MEASURES}
    for trace in traces:
        usable = usable_rows(trace, values)
        if usable.sum() < LEAST_TOKENS:
            for name in MEASURES:
                found[name].append(np.full(values.shape[1], np.nan))
            continue
        signal, effect, pos = values[trace.rows[usable]], trace.effect[usable], trace.pos[usable]
        beyond = beyond_position(signal, pos)
        found["rho"].append(correlation(beyond, beyond_position(effect[:, None], pos)))
        found["raw_rho"].append(spearman(signal, effect))
        found["auc_size"].append(auc(beyond, top_share(np.abs(effect), TOP)))
        found["auc_signed"].append(auc(beyond, top_share(effect, TOP)))
    return {name: np.array(rows) for name, rows in found.items()}


def _rows(
    pair: Pair, name: str, measured: Measured, discover: Bool[np.ndarray, " trace"], seed: int
) -> Iterator[dict[str, Any]]:
    """The rows of one signal: each layer over all traces, then the chosen layer over those it was not chosen on."""
    about = {"signal": name, "causal": pair.causal(name)}
    n_layers = measured["rho"].shape[1]
    if pair.per_layer(name):
        for layer, numbers in enumerate(_numbers(measured, seed)):
            yield about | {"choice": EACH, "traces": "all", "layer": layer, "depth": layer / n_layers} | numbers
        best = best_layer(measured["rho"][discover])
        where = {"choice": BEST, "traces": "confirm", "layer": best, "depth": best / n_layers}
    else:
        best, where = 0, {"choice": ONLY, "traces": "confirm", "layer": None, "depth": None}
    (numbers,) = _numbers({m: values[~discover, best : best + 1] for m, values in measured.items()}, seed)
    yield about | where | numbers


def _numbers(measured: Measured, seed: int) -> list[dict[str, Any]]:
    """For each layer, the mean of every measure with its interval, and in how many traces it has a meaning."""
    n_traces, n_layers = measured["rho"].shape
    known = np.isfinite(measured["rho"]).sum(0).tolist()
    columns: dict[str, list[Any]] = {"n_traces": known, "n_undefined": [n_traces - n for n in known]}
    for name, values in measured.items():
        found = over_traces(values, seed=seed)
        for end, numbers in (("", found.mean), ("_low", found.low), ("_high", found.high)):
            columns[name + end] = numbers.tolist()
    return [{name: column[layer] for name, column in columns.items()} for layer in range(n_layers)]


def _table(rows: list[dict[str, Any]], added: dict[str, dict[str, float]]) -> dict[str, list[Any]]:
    """The columns of the table: the rows that compare signals first, by |rho|, then all layers."""
    compared = [row | added[row["signal"]] for row in rows if row["choice"] != EACH]
    most = max(row["n_traces"] for row in compared)
    # What is defined in few of the traces, such as lag in short ones, is no rival to the others: it comes last.
    compared.sort(key=lambda row: (2 * row["n_traces"] < most, -abs(row["rho"]) if np.isfinite(row["rho"]) else 1.0))
    rows = compared + [row for row in rows if row["choice"] == EACH]
    return {name: [row.get(name) for row in rows] for name in RANKING_TABLES["ranking"].names}
