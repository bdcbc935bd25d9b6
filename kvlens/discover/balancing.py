"""How far do single swaps from the largest weights get? The balancing selector.

1. Start at A*, the largest weights.
2. Of all swaps of one kept key for one that is not, take the one with the lowest error. With S = sum of the kept
   contributions, ||S - c_out + c_in||^2 needs only inner products, which are the same for all swaps of a row.
3. Stop where the best swap, evaluated directly, does not lower the error.

`balance` swaps within a pool, so nothing it finds beats the pool's exact optimum; `balance_all_keys` brings in any key
the row sees, and can.

Source: ContourKV.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvlens.discover.instances import TIED, Instances, Pool, make_pool, set_errors

LOOKED_AT = 16  # swaps of a row


class Chosen(NamedTuple):
    """One kept set a row: its error, and its members as ascending places in the pool."""

    error: Float[np.ndarray, " row"]
    members: Int[np.ndarray, "row kept"]


def top_mass(pool: Pool, budget: int) -> Chosen:
    """A* and its error."""
    members = np.tile(np.arange(budget), (len(pool.keys), 1))
    return Chosen(set_errors(pool, members), members)


def balance(pool: Pool, budget: int, start: Chosen | None = None) -> Chosen:
    """The set where the best swap within the pool no longer helps, from `start` (None: A*).

    Cost: a handful of swaps a row, each budget x pool inner products.
    """
    first = top_mass(pool, budget) if start is None else start
    error, members = first.error.copy(), first.members.copy()
    active = np.flatnonzero(error > 0)
    now = pool.take(active)
    while len(active):
        tried = _best_swap(now, members[active])
        found = set_errors(now, tried)
        better = found < error[active] * TIED
        active, now = active[better], now.take(better)
        error[active], members[active] = found[better], tried[better]
    return Chosen(error, members)


def _best_swap(pool: Pool, members: Int[np.ndarray, "row kept"]) -> Int[np.ndarray, "row kept"]:
    """Each row's set after the swap that gives the lowest error; of equal ones the first by place."""
    n_rows, budget = members.shape
    row = np.arange(n_rows)[:, None]
    kept = np.zeros(pool.keys.shape, dtype=bool)
    kept[row, members] = True
    others = np.nonzero(~kept)[1].reshape(n_rows, -1)
    c_out = pool.vectors[row, members]
    total = pool.offset + c_out.sum(1)
    along = (pool.vectors @ total[:, :, None])[:, :, 0]
    own = np.einsum("rkd,rkd->rk", pool.vectors, pool.vectors)
    # ||S - c_out + c_in||^2
    out = (total**2).sum(1)[:, None] + (own - 2 * along)[row, members]
    into = (own + 2 * along)[row, others]
    products = np.take_along_axis(c_out @ pool.vectors.mT, others[:, None], 2)
    squared = out[:, :, None] + into[:, None] - 2 * products
    mass = pool.offset_weight + (pool.weights * kept).sum(1)
    masses = (mass[:, None] - pool.weights[row, members])[:, :, None] + pool.weights[row, others][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(masses > 0, squared / masses**2, np.inf)
    # A set of tiny mass magnifies the rounding of the inner products: the lowest few are looked at directly.
    errors = errors.reshape(n_rows, -1)
    few = np.argsort(errors, axis=1, kind="stable")[:, :LOOKED_AT]
    swap_out, swap_in = np.divmod(few, pool.size - budget)
    tried = np.repeat(members[:, None], few.shape[1], 1)
    places = np.arange(few.shape[1])
    tried[row, places, swap_out] = others[row, swap_in]
    tried.sort(axis=2)
    direct = set_errors(pool, tried.reshape(-1, budget), np.repeat(np.arange(n_rows), few.shape[1]))
    return np.asarray(tried[row[:, 0], direct.reshape(n_rows, -1).argmin(1)])


def balance_all_keys(rows: Instances, budget: int) -> Float[np.ndarray, " row"]:
    """The error where the best swap with any key the row sees no longer helps; rows see more than `budget` keys.

    Cost: as `balance` with a pool of all keys, one row at a time.
    """
    found = np.empty(len(rows))
    for row in range(len(rows)):
        one = rows.take(np.array([row]))
        found[row] = balance(make_pool(one, budget, int(one.n_keys[0]) - budget), budget).error[0]
    return found
