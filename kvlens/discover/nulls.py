"""What would the numbers be if values had nothing to do with weights? Null controls for every ceiling and AUC.

The weights of each row stay; its values are replaced, independently in every row, seeded:

1. `permuted`: the row's own values, dealt out anew among the keys it sees. Everything about the values is kept but
   which weight they go with.
2. `gaussian`: independent normal values with the mean and covariance of the values the row sees. Each key counts once:
   weighting by attention would build the tie between weights and values, which the null is to cut, into the covariance
   (a row with most of its mass on a sink would get values of rank one).
3. `rank K`: the same with the covariance cut to its K leading directions: how much of a ceiling is low dimension alone.

How far they go is in experiments/03_ceilings.py: a part of a small ceiling, and all of the AUC of dropped mass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlens.discover.instances import Instances
from kvlens.errors import InputError

NULLS = ("permuted", "gaussian", "rank 4")


def null_rows(rows: Instances, name: str, seed: int | Sequence[int]) -> Instances:
    """The same rows under one of the nulls: "permuted", "gaussian" or "rank K". They have values of their own.

    Give every block of rows its own seed, such as (seed, layer, head, trace): rows are drawn in order from it.

    Raises: InputError for another name.
    Cost: memory [row, key, d_head] in float64; an eigendecomposition of d_head x d_head a row but for "permuted".
    """
    kind, _, rank = name.partition(" ")
    if kind not in ("permuted", "gaussian", "rank") or (kind == "rank") != (rank.isdecimal() and int(rank) > 0):
        raise InputError(f"no null control is called {name!r}", "take permuted, gaussian, or rank K such as 'rank 4'")
    random = np.random.default_rng(seed)
    values = np.zeros((len(rows), *rows.values.shape[-2:]))
    for row, seen in enumerate(rows.visible):
        own = rows.values_of(row)[seen]
        if kind == "permuted":
            values[row, seen] = random.permutation(own)
        else:
            values[row, seen] = _normal(own, random, int(rank) if rank else own.shape[1])
    return rows.with_values(values)


def _normal(values: np.ndarray, random: np.random.Generator, rank: int) -> np.ndarray:
    """As many normal values of the same mean and covariance, in the `rank` leading directions."""
    centred = values - values.mean(0)
    variances, directions = np.linalg.eigh(centred.T @ centred / len(values))
    deviations = np.sqrt(np.maximum(variances[-rank:], 0.0))
    drawn = random.standard_normal((len(values), len(deviations)))
    return np.asarray(values.mean(0) + (drawn * deviations) @ directions[:, -rank:].T)
