"""Which keys of a pool give the lowest error, exactly? All subsets, as small matrix products in float32.

With t the squared error of a set at hand, another set A is better exactly when f(A) = ||sum_A c_j||^2 - t p(A)^2 < 0: a
quadratic form in the 0/1 vector of A, so no division is needed, and one pass over all subsets is enough.

1. t comes from the balancing swaps, which are at or near the optimum in most rows.
2. Above half of the pool, the keys left out are chosen instead of those kept: T - sum of those, T being the whole pool.
   What is always there (T, a sink) gives linear terms, which go to the diagonal because x^2 = x.
3. The pool is split in halves. A subset is one of k keys of the first half and one of m - k of the second:
   f = f_1 + f_2 + 2 x_1' Q_12 x_2, which a matrix product over (half + 2) features gives for all pairs at once, in
   blocks that stay in the cache. Per subset this costs half a pool of multiplications and one comparison.
4. Float32 is off by at most (2m + 8) u sum |Q_ij| over the set's pairs, u = 2^-24 (products with 0 and 1 are exact, so
   only the sums round). Every set with f below that bound is evaluated again in float64, directly as
   ||sum c_j|| / p(A). So no better set is missed, and the result is exact but for the rounding of that last sum.

Source: the pool and the exact minimum are ContourKV's; the parametric form with halves is ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from kvlens.discover.balancing import TIED, Chosen, balance
from kvlens.discover.instances import Pool, set_errors

UNIT = 2.0**-24  # rounding of float32
BLOCK_FLOATS = 2**18  # of one block of f: a megabyte, which a core's second cache holds
PRODUCT = 2**18  # multiplications in one product of a block: below this BLAS starts no threads of its own
TILE_WIDTH = 128
TABLE_FLOATS = 2**20
DEVICE_BLOCK_FLOATS = 2**26
FAR = 1e30
RECHECKED_AT_ONCE = 2048


def best_subsets(
    pool: Pool,
    budget: int,
    *,
    start: Chosen | None = None,
    n_threads: int | None = None,
    device: str | None = None,
) -> Chosen:
    """The exact minimum of e over all `budget`-subsets of each row's pool, and a set that attains it.

    Of sets that are equal within 1e-12 the start is returned, so that it is A* where nothing beats A*.

    Args:
        pool: candidates, from `make_pool`.
        budget: keys kept, fewer than the pool has.
        start: sets to beat; None: `balance`. The nearer to the optimum, the fewer sets need a second look.
        n_threads: rows, and sizes of halves, go over this many threads; None: as many as there are processors.
        device: a torch device for the products; None: numpy on the CPU.

    Cost: about (pool / 2 + 2) multiplications and one comparison a subset.
    """
    chosen = balance(pool, budget) if start is None else start
    error, members = chosen.error.copy(), chosen.members.copy()
    open_rows = np.flatnonzero(error > 0)
    if not len(open_rows):
        return Chosen(error, members)
    form = quadratic_form(pool.take(open_rows), budget, error[open_rows])
    n_threads = n_threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(n_threads) as threads:
        for found in threads.map(lambda job: _search(pool, budget, form, open_rows, job, device), _jobs(form, device)):
            better = found.error < error[found.rows] * TIED
            rows = found.rows[better]
            error[rows], members[rows] = found.error[better], found.members[better]
    return Chosen(error, members)


class Form(NamedTuple):
    """f(x) - (what rounding may add) = x' matrix x - limit over 0/1 vectors x with `n_chosen` ones."""

    matrix: Float[np.ndarray, "row pool pool"]
    limit: Float[np.ndarray, " row"]
    n_chosen: int
    dropped: bool  # x marks the keys left out


def quadratic_form(pool: Pool, budget: int, error: Float[np.ndarray, " row"]) -> Form:
    """Steps 2 and 4: f against each row's `error`, contributions scaled so that the longest is 1."""
    dropped = 2 * budget > pool.size
    m, sign = (pool.size - budget, -1.0) if dropped else (budget, 1.0)
    scale = np.maximum(np.sqrt((pool.vectors**2).sum(2)).max(1), np.finfo(float).tiny)
    vectors, offset = pool.vectors / scale[:, None, None], pool.offset / scale[:, None]
    weights, base = pool.weights, pool.offset_weight
    t = (error / scale) ** 2
    if dropped:
        offset, base = offset + vectors.sum(1), base + weights.sum(1)
    matrix = vectors @ vectors.mT - t[:, None, None] * weights[:, :, None] * weights[:, None, :]
    linear = 2 * sign * ((vectors @ offset[:, :, None])[:, :, 0] - (t * base)[:, None] * weights)
    places = np.arange(pool.size)
    matrix[:, places, places] += linear
    constant = (offset**2).sum(1) - t * base**2
    largest = np.sort(np.abs(matrix), axis=2)[:, :, -m:].sum(2)
    size = np.sort(largest, axis=1)[:, -m:].sum(1) + np.abs(constant)
    return Form(matrix, 1.01 * (2 * m + 8) * UNIT * size - constant, m, dropped)


class Job(NamedTuple):
    """Rows [start, stop) with k chosen in the first half."""

    start: int
    stop: int
    k: int


def _jobs(form: Form, device: str | None) -> Iterator[Job]:
    """Blocks of rows whose tables fit the cache, for each way to share the chosen keys between the halves."""
    n, m = form.matrix.shape[1], form.n_chosen
    first = n // 2
    for k in range(max(0, m - (n - first)), min(m, first) + 1):
        one, two = comb(first, k), comb(n - first, m - k)
        table, block = (TABLE_FLOATS, BLOCK_FLOATS) if device is None else (DEVICE_BLOCK_FLOATS, DEVICE_BLOCK_FLOATS)
        step = max(1, min(table // (max(one, two) * (first + 2)), block // (one * two)))
        for start in range(0, len(form.matrix), step):
            yield Job(start, min(start + step, len(form.matrix)), k)


class Found(NamedTuple):
    """The best set of each row that has one worth a second look."""

    rows: Int[np.ndarray, " found"]
    error: Float[np.ndarray, " found"]
    members: Int[np.ndarray, "found kept"]


def _search(
    pool: Pool, budget: int, form: Form, open_rows: Int[np.ndarray, " open"], job: Job, device: str | None
) -> Found:
    """Steps 3 and 4 for one job."""
    n, m = form.matrix.shape[1], form.n_chosen
    best = Found(np.zeros(0, dtype=int), np.zeros(0), np.zeros((0, budget), dtype=int))
    block = slice(job.start, job.stop)
    for row, one, two in _below(form.matrix[block], form.limit[block], m, job.k, device):
        picked = np.concatenate([_places(n // 2, job.k)[one], n // 2 + _places(n - n // 2, m - job.k)[two]], 1)
        for start in range(0, len(row), RECHECKED_AT_ONCE):
            part = slice(start, start + RECHECKED_AT_ONCE)
            members = _complement(picked[part], n) if form.dropped else picked[part]
            rows = open_rows[job.start + row[part]]
            found = Found(rows, set_errors(pool, members, rows), members)
            best = _lowest(Found(*(np.concatenate(pair) for pair in zip(best, found, strict=True))))
    return best


def _lowest(found: Found) -> Found:
    """The lowest error of each row; of equal ones the first."""
    order = np.lexsort((found.error, found.rows))
    first = order[np.r_[True, np.diff(found.rows[order]) > 0]]
    return Found(*(column[first] for column in found))


def _below(
    matrix: Float[np.ndarray, "row pool pool"], limit: Float[np.ndarray, " row"], m: int, k: int, device: str | None
) -> Iterator[tuple[Int[np.ndarray, " found"], Int[np.ndarray, " found"], Int[np.ndarray, " found"]]]:
    """Step 3: row, first-half subset and second-half subset of every set with x' matrix x below the row's limit.

    Numpy arrays and torch tensors run the same lines.
    """
    n = matrix.shape[1]
    half = n // 2
    xp, place = _backend(device)
    q = place(matrix.astype(np.float32))
    one, two = place(_indicators(half, k)), place(_indicators(n - half, m - k))
    # The larger side carries the products, the smaller one is only copied.
    swapped = len(one) < len(two)
    large, small = (two, one) if swapped else (one, two)
    inside, outside = (slice(half, n), slice(0, half)) if swapped else (slice(0, half), slice(half, n))
    quadratic = ((large @ q[:, inside, inside]) * large).sum(-1) - place(limit.astype(np.float32))[:, None]
    linear = large @ (2 * q[:, inside, outside])
    constant = ((small @ q[:, outside, outside]) * small).sum(-1)
    ones = xp.ones_like(quadratic)[:, :, None]
    left = xp.concatenate([linear, quadratic[:, :, None], ones], 2)  # [row, large, feature]
    fixed = xp.broadcast_to(small.T, (len(q), *small.T.shape))
    right = xp.concatenate([fixed, xp.ones_like(constant)[:, None], constant[:, None]], 1)  # [row, feature, small]
    for tall, wide, f in _blocks(left, right, xp, whole=device is not None):
        hot = xp.amin(f, (1, 2, 3)) < 0
        if not hot.any():
            continue
        row = _nonzero(hot)[0]
        some = f[row]
        r, tile, i = _nonzero(xp.amin(some, 3) < 0)
        c, j = _nonzero(some[r, tile, i] < 0)
        row, i, j = row[r[c]], tall + tile[c] * f.shape[2] + i[c], wide + j
        yield (row, j, i) if swapped else (row, i, j)


def _blocks(left: Any, right: Any, xp: Any, *, whole: bool) -> Iterator[tuple[int, int, Any]]:
    """Blocks [row, tile, tall, wide] of left @ right, each with where it starts in the two tables.

    A tile is one matrix product. Rows that fill up the last tile are far above any limit.
    """
    n_rows, n_tall, n_features = left.shape
    n_wide = right.shape[2]
    width = n_wide if whole else min(n_wide, TILE_WIDTH)
    height = n_tall if whole else min(n_tall, max(1, PRODUCT // (width * n_features)))
    n_tiles = -(-n_tall // height)
    if n_tiles * height > n_tall:
        fill = xp.zeros_like(left[:, : n_tiles * height - n_tall])
        fill[:, :, -2] = FAR
        left = xp.concatenate([left, fill], 1)
    tiles, right = left.reshape(n_rows, n_tiles, height, n_features), right[:, None]
    step = max(1, (DEVICE_BLOCK_FLOATS if whole else BLOCK_FLOATS) // (n_rows * height * width))
    for first in range(0, n_tiles, step):
        for start in range(0, n_wide, width):
            yield first * height, start, tiles[:, first : first + step] @ right[:, :, :, start : start + width]


def _backend(device: str | None) -> tuple[Any, Callable[[np.ndarray], Any]]:
    """The array module of a device, and what takes an array there."""
    if device is None:
        return np, np.asarray
    import torch

    return torch, lambda array: torch.from_numpy(array).to(device)


def _nonzero(mask: Any) -> tuple[Int[np.ndarray, " found"], ...]:
    """The indices of True, in numpy."""
    if isinstance(mask, np.ndarray):
        return mask.nonzero()
    return tuple(column.cpu().numpy() for column in mask.nonzero(as_tuple=True))


@lru_cache(maxsize=64)
def _places(n: int, k: int) -> Int[np.ndarray, "subset chosen"]:
    """All ascending k-subsets of n places, in the order of itertools."""
    flat = np.fromiter(chain.from_iterable(combinations(range(n), k)), dtype=np.int64, count=comb(n, k) * k)
    return flat.reshape(comb(n, k), k)


@lru_cache(maxsize=64)
def _indicators(n: int, k: int) -> Float32[np.ndarray, "subset place"]:
    """The same subsets as 0/1 vectors."""
    found = np.zeros((comb(n, k), n), dtype=np.float32)
    np.put_along_axis(found, _places(n, k), 1.0, 1)
    return found


def _complement(places: Int[np.ndarray, "set left_out"], n: int) -> Int[np.ndarray, "set kept"]:
    """The places out of n that are not in each set, ascending."""
    kept = np.ones((len(places), n), dtype=bool)
    np.put_along_axis(kept, places, False, 1)
    return kept.nonzero()[1].reshape(len(places), n - places.shape[1])
