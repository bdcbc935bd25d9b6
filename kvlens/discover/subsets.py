"""Which keys of a pool give the lowest error, exactly? A search through all of its subsets.

With t the squared error of a set at hand, another set A is better exactly when f(A) = ||sum_A c_j||^2 - t p(A)^2 < 0: a
quadratic form in the 0/1 vector of A, without a division, in which a set costs only what its last keys add.

1. Above half of the pool, the keys left out are chosen instead of those kept: T - sum of those, T being the whole pool.
   What is always there (T, a sink) gives linear terms, which go to the diagonal because x^2 = x.
2. f of every set, by `kernel.py` on the CPU (a tree of prefixes, compiled by numba) or by `halves.py` on a device
   (matrix products in torch).
3. Rounding with unit u is off by at most (2m + 8) u times what the terms of one set of m keys can sum to without their
   signs. Sets with f below that bound are evaluated directly, as ||sum c_j|| / p(A); where one is better, t falls.

So no better set is missed. Better means by more than 1e-10 of the error: of sets that are equal, and in a first layer
repeated tokens make thousands of them, the first stays.

Source: the pool and the exact minimum are ContourKV's; the parametric form and the search are ours.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvlens.discover.balancing import Chosen, top_mass
from kvlens.discover.instances import TIED, Pool, set_errors
from kvlens.errors import EnvironmentLacks
from kvlens.wording import extra

ROWS_AT_ONCE = 512
DOUBLE = 2.0**-53


def best_subsets(
    pool: Pool,
    budget: int,
    *,
    start: Chosen | None = None,
    n_threads: int | None = None,
    device: str | None = None,
) -> Chosen:
    """The exact minimum of e over all `budget`-subsets of each row's pool, and a set that attains it.

    Where nothing is better the start is returned, so that it is A* where nothing beats A*.

    Args:
        pool: candidates, from `make_pool`.
        budget: keys kept, fewer than the pool has.
        start: sets to beat; None: A*. The nearer to the optimum, the fewer sets are evaluated directly.
        n_threads: rows go over this many threads; None: as many as there are processors.
        device: a torch device to search on; None: the compiled search on the CPU.

    Raises: EnvironmentLacks without numba, unless a device is given.
    Cost: two additions a subset and row; experiments/03_subset_speed.py says what that takes.
    """
    chosen = top_mass(pool, budget) if start is None else start
    error, members = chosen.error.copy(), chosen.members.copy()
    open_rows = np.flatnonzero(error > 0)
    n_threads = n_threads or os.cpu_count() or 1
    at_once = min(ROWS_AT_ONCE, 64 * max(1, len(open_rows) // (64 * n_threads)))
    blocks = [open_rows[i : i + at_once] for i in range(0, len(open_rows), at_once)]

    def search(rows: Int[np.ndarray, " block"]) -> Chosen:
        return _search(pool.take(rows), Chosen(error[rows], members[rows]), device)

    with ThreadPoolExecutor(n_threads) as threads:
        for rows, found in zip(blocks, threads.map(search, blocks), strict=True):
            members[rows] = found.members
            error[rows] = set_errors(pool, found.members, rows)
    return Chosen(error, members)


def require_kernel() -> Any:
    """The compiled search. Raises: EnvironmentLacks without numba."""
    try:
        from kvlens.discover import kernel
    except ImportError as error:
        raise EnvironmentLacks("the exact search on the CPU needs numba", extra("lens")) from error
    return kernel


def _search(pool: Pool, start: Chosen, device: str | None) -> Chosen:
    """The best sets of one block of rows."""
    form = quadratic_form(pool, start)
    if form.n_chosen == 1:
        return _one_by_one(pool, form, start)
    if device is not None:
        from kvlens.discover import halves

        return halves.search(pool, form, start, device)
    kernel = require_kernel()
    arrays = (form.products, form.signed, form.base, form.constant, DOUBLE * form.slack)
    sets = (pool.vectors, pool.weights, pool.offset, pool.offset_weight, pool.floor)
    kernel.search(form.n_chosen, form.dropped, TIED, arrays, sets, start.error, start.members)
    return start


class Form(NamedTuple):
    """f(x) = x' products x + constant - t (base + signed' x)^2 over 0/1 vectors x with `n_chosen` ones.

    Rounded with unit u it is off by at most u `slack`, for the t of the start and any smaller one.
    """

    products: Float[np.ndarray, "row pool pool"]
    signed: Float[np.ndarray, "row pool"]
    base: Float[np.ndarray, " row"]
    constant: Float[np.ndarray, " row"]
    slack: Float[np.ndarray, " row"]
    n_chosen: int
    dropped: bool  # x marks the keys left out


def quadratic_form(pool: Pool, start: Chosen) -> Form:
    """Step 1, and the bound of step 3."""
    budget = start.members.shape[1]
    dropped = 2 * budget > pool.size
    m, sign = (pool.size - budget, -1.0) if dropped else (budget, 1.0)
    offset, base, signed = pool.offset, pool.offset_weight, sign * pool.weights
    if dropped:
        offset, base = offset + pool.vectors.sum(1), base + pool.weights.sum(1)
    products = pool.vectors @ pool.vectors.mT
    along = 2 * sign * (pool.vectors @ offset[:, :, None])[:, :, 0]
    t = start.error**2
    size = np.abs(products) + t[:, None, None] * pool.weights[:, :, None] * pool.weights[:, None]
    places = np.arange(pool.size)
    products[:, places, places] += along
    size[:, places, places] += np.abs(along) + 2 * (t * base)[:, None] * pool.weights
    # Of the m rows with the largest sums of m entries, those sums.
    largest = np.partition(size, pool.size - m, axis=2)[:, :, -m:].sum(2)
    constant = (offset**2).sum(1)
    most = np.partition(largest, pool.size - m, axis=1)[:, -m:].sum(1) + constant + t * base**2
    return Form(products, signed, base, constant, 1.01 * (2 * m + 8) * most, m, dropped)


def _one_by_one(pool: Pool, form: Form, start: Chosen) -> Chosen:
    """The best sets where a single key is chosen, or left out: as many sets as keys."""
    n_rows, n = pool.keys.shape
    one = np.eye(n, dtype=bool)
    members = np.nonzero(~one if form.dropped else one)[1].reshape(n, -1)
    rows = np.repeat(np.arange(n_rows), n)
    errors = set_errors(pool, np.tile(members, (n_rows, 1)), rows).reshape(n_rows, n)
    best = errors.argmin(1)
    better = errors[np.arange(n_rows), best] < start.error * TIED
    return Chosen(
        np.where(better, errors[np.arange(n_rows), best], start.error),
        np.where(better[:, None], members[best], start.members),
    )
