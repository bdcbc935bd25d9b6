"""How far do single swaps from the largest weights get? The balancing selector.

1. Start at A*, the largest weights.
2. Of all swaps of one kept key for one that is not, take the one with the lowest error. With S = sum of the kept
   contributions, ||S - c_out + c_in||^2 needs only S, the swapped pair and their inner product.
3. Stop where the best swap, evaluated directly, does not lower the error.

`balance` swaps within a pool, so nothing it finds beats the pool's exact optimum; `balance_all_keys` brings in any key
the row sees, and can.

Source: ContourKV.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvlens.discover.instances import Instances, Pool, make_pool, set_errors

TIED = 1 - 1e-12  # an error this close below another is the same but for rounding: the set that came first stays


class Chosen(NamedTuple):
    """One kept set a row: its error, and its members as ascending places in the pool."""

    error: Float[np.ndarray, " row"]
    members: Int[np.ndarray, "row kept"]


def top_mass(pool: Pool, budget: int) -> Chosen:
    """A* and its error."""
    members = np.tile(np.arange(budget), (len(pool.keys), 1))
    return Chosen(set_errors(pool, members), members)


def balance(pool: Pool, budget: int) -> Chosen:
    """The set where the best swap within the pool no longer helps.

    Cost: a handful of swaps a row, each budget x (pool - budget) numbers.
    """
    error, members = top_mass(pool, budget)
    active = np.flatnonzero(error > 0)
    while len(active):
        now = pool.take(active)
        tried = _best_swap(now, members[active])
        found = set_errors(now, tried)
        better = found < error[active] * TIED
        active = active[better]
        error[active], members[active] = found[better], tried[better]
    return Chosen(error, members)


def _best_swap(pool: Pool, members: Int[np.ndarray, "row kept"]) -> Int[np.ndarray, "row kept"]:
    """Each row's set after the swap that gives the lowest error; of equal ones the first by place."""
    n_rows = len(members)
    kept = np.zeros(pool.keys.shape, dtype=bool)
    np.put_along_axis(kept, members, True, 1)
    others = np.nonzero(~kept)[1].reshape(n_rows, -1)
    c_out, c_in = (np.take_along_axis(pool.vectors, places[:, :, None], 1) for places in (members, others))
    p_out, p_in = (np.take_along_axis(pool.weights, places, 1) for places in (members, others))
    total = (pool.offset + c_out.sum(1))[:, :, None]
    mass = pool.offset_weight + p_out.sum(1)
    # ||S - c_out||^2 + 2 <S - c_out, c_in> + ||c_in||^2
    left = total - c_out.transpose(0, 2, 1)
    squared = (left**2).sum(1)[:, :, None] + (c_in**2).sum(2)[:, None] + 2 * (left.transpose(0, 2, 1) @ c_in.mT)
    masses = (mass[:, None] - p_out)[:, :, None] + p_in[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(masses > 0, squared / masses**2, np.inf)
    out, into = np.divmod(errors.reshape(n_rows, -1).argmin(1), others.shape[1])
    tried = members.copy()
    tried[np.arange(n_rows), out] = others[np.arange(n_rows), into]
    tried.sort(axis=1)
    return tried


def balance_all_keys(rows: Instances, budget: int) -> Float[np.ndarray, " row"]:
    """The error where the best swap with any key the row sees no longer helps; rows see more than `budget` keys.

    Cost: d_head x budget x keys a swap, one row at a time.
    """
    found = np.empty(len(rows))
    for row in range(len(rows)):
        one = rows.take(np.array([row]))
        found[row] = balance(make_pool(one, budget, int(one.n_keys[0]) - budget), budget).error[0]
    return found
