"""Does the mass that the largest weights drop tell which rows a better choice would help, better than other statistics?

1. `row_statistics`: of each row at one budget, dropped mass dm = 1 - p(A*) and its rivals. A learned sink counts as
   kept. With mu the dense output, c_j = p_j (v_j - mu), D = max ||v_j - mu||, sigma^2 = sum p_j ||v_j - mu||^2:

   dropped_mass      dm
   residual          ||sum over A* of c_j||, which is e(A*) p(A*)
   bound             2 D dm, which e(A*) never exceeds
   spread            sqrt(dm / (1 - dm)) sigma
   entropy           of the weights (and the sink), nats
   max_weight        the largest weight
   effective_rank    of the contributions c_j
   key_norm_spread   deviation of ||k_j|| over the keys the row sees, by their mean

2. `predictor_table`: the AUC of each for `closable`, over all rows, and comparing only rows of the same cell (layer and
   head): what a cell's own level explains is gone from the second. Intervals resample whole documents, because the
   rows of one document are not independent. An AUC below .5 predicts the other way round.

Source: ContourKV (dropped mass); the rivals as METHODS lists them; the comparison within cells is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.discover.ceilings import effective_rank
from kvlens.discover.instances import Instances, keep_errors
from kvlens.errors import InputError
from kvlens.stats import auc_over_traces


def row_statistics(
    rows: Instances,
    budget: int,
    *,
    key_norms: Float[np.ndarray, " key"] | Float[np.ndarray, "row key"] | None = None,
) -> dict[str, Float[np.ndarray, " row"]]:
    """What might tell which rows are closable, by name; without `key_norms` there is no `key_norm_spread`.

    A row that sees no more keys than the budget drops nothing: its dropped mass, residual, bound and spread are 0.
    """
    if budget < 1:
        raise InputError(f"a budget of {budget} keys", "keep at least one key")
    keep = np.zeros(rows.weights.shape, dtype=bool)
    np.put_along_axis(keep, rows.by_weight[:, :budget], True, 1)
    kept = np.where(keep, rows.weights, 0.0).sum(1) + rows.sink
    dropped = np.where(rows.n_keys > budget, np.clip(1 - kept, 0.0, 1.0), 0.0)
    everything = np.concatenate([rows.weights, rows.sink[:, None]], 1)
    logs = np.log(everything, out=np.zeros_like(everything), where=everything > 0)
    farthest = np.maximum(rows.distances.max(1), np.where(rows.sink > 0, np.sqrt((rows.mean**2).sum(1)), 0.0))
    found = {
        "dropped_mass": dropped,
        "residual": np.where(dropped > 0, keep_errors(rows, keep) * kept, 0.0),
        "bound": 2 * farthest * dropped,
        "spread": np.sqrt(dropped / np.maximum(1 - dropped, np.finfo(float).tiny)) * rows.sigma,
        "entropy": -(everything * logs).sum(1),
        "max_weight": everything.max(1),
        "effective_rank": effective_rank(rows),
    }
    if key_norms is not None:
        norms = np.ma.array(np.broadcast_to(key_norms, rows.weights.shape), mask=~rows.visible)
        found["key_norm_spread"] = np.asarray(norms.std(1) / norms.mean(1))
    return found


def predictor_table(
    statistics: Mapping[str, Float[np.ndarray, " row"]],
    closable: Bool[np.ndarray, " row"],
    document: Int[np.ndarray, " row"],
    cell: Int[np.ndarray, " row"],
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """A line for each statistic, the best first: AUC over all rows and within cells, each with a 95 % interval.

    Args:
        statistics: by name, one number a row.
        closable: what is to be predicted.
        document: the document each row is of.
        cell: a number for each (layer, head).
    """
    scores = np.stack(list(statistics.values()), 1)
    over_rows = auc_over_traces(scores, closable, document, seed=seed)
    within = auc_over_traces(scores, closable, document, seed=seed, stratum=cell)
    lines = [
        {
            "statistic": name,
            "auc": over_rows.mean[i],
            "low": over_rows.low[i],
            "high": over_rows.high[i],
            "within_cells_auc": within.mean[i],
            "within_cells_low": within.low[i],
            "within_cells_high": within.high[i],
            "n_rows": len(closable),
            "n_documents": int(over_rows.n[i]),
        }
        for i, name in enumerate(statistics)
    ]
    return sorted(lines, key=lambda line: -abs(line["auc"] - 0.5) if np.isfinite(line["auc"]) else 1.0)
