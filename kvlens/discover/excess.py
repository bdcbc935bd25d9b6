"""What does a given choice of keys cost over the best one: any rule's kept set, or one set for all heads of a group?

1. Excess of a rule: e(A_rule) / best, row by row. The best is exact over its pool; a rule that keeps keys from outside
   can go below 1, and an excess does where it happens.
2. A KV group's heads read the same keys, and a cache that keeps one set for them cannot keep each head's own. The
   shared set is the `budget` keys with the largest weight averaged over the heads, which is what rules that score
   whole groups approximate. The outputs of the heads stand side by side in what the layer reads, so the group's error
   is the root of the mean over heads of e^2. `cost` divides it by the same for every head's own largest weights (what
   sharing alone costs), `excess` by the same for every head's own optimum.

Source: ContourKV (excess, shared sets); the mean over heads is ours, the paper leaves it open.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.discover.instances import Instances, keep_errors
from kvlens.errors import InputError


def excess(error: Float[np.ndarray, "..."], best: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """How many times the best error; 1 where both are 0, infinite where only the best is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == best, 1.0, error / best)


def largest(
    scores: Float[np.ndarray, "row key"], visible: Bool[np.ndarray, "row key"], budget: int
) -> Bool[np.ndarray, "row key"]:
    """The keep-mask of the `budget` highest scores among the keys each row sees; ties go to the lower position."""
    order = np.argsort(np.where(visible, -scores, np.inf), axis=1, kind="stable")[:, :budget]
    keep = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(keep, order, True, 1)
    return np.asarray(keep & visible)


def shared_set(
    rows: Instances, group: Int[np.ndarray, " row"], budget: int, best: Float[np.ndarray, " row"]
) -> dict[str, np.ndarray]:
    """A line for each group, in rising order: `group, shared_error, top_mass_error, best_error, cost, excess, n_heads`.

    Args:
        rows: of one KV head, or with values of their own.
        group: the same number for the heads of one KV group at one query; they see the same keys.
        budget: keys kept.
        best: each row's own optimum at that budget.

    Raises: InputError where the rows of a group do not see the same keys.
    """
    names, code = np.unique(group, return_inverse=True)
    n_heads = np.bincount(code)
    first = np.full(len(names), len(code))
    np.minimum.at(first, code, np.arange(len(code)))
    if (rows.visible != rows.visible[first[code]]).any():
        raise InputError("the rows of a KV group do not see the same keys", "group the heads of one query alone")
    mean = np.zeros((len(names), rows.weights.shape[1]))
    np.add.at(mean, code, rows.weights / n_heads[code, None])
    shared = largest(mean[code], rows.visible, budget)
    errors = {
        "shared_error": keep_errors(rows, shared),
        "top_mass_error": keep_errors(rows, largest(rows.weights, rows.visible, budget)),
        "best_error": best,
    }
    found = {name: np.sqrt(np.bincount(code, weights=error**2) / n_heads) for name, error in errors.items()}
    found["cost"] = excess(found["shared_error"], found["top_mass_error"])
    found["excess"] = excess(found["shared_error"], found["best_error"])
    return {"group": names, "n_heads": n_heads, **found}
