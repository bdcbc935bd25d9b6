"""The compiled search that `subsets.py` explains: many rows side by side, every subset two additions and a minimum.

1. The numbers of 64 rows lie beside each other, so that one vector instruction serves several rows.
2. A tree of prefixes: `gains[d, j]` is what key j adds to the d keys chosen so far, by itself and by its pairs with
   them. Choosing one more key is one addition for each key after it.
3. The last two keys i < j are not chosen one after the other: a set is total + gains[i] + gains[j] + q[i, j], and of
   all pairs after a prefix only the least is kept.
4. Where that is negative in some row, its sets are summed directly. A better set lowers t, and that row's numbers are
   made anew on the spot.

numba compiles this at its first use (some seconds) and keeps the result beside this file or in the user's cache folder.
"""

from __future__ import annotations

import inspect
from typing import Any

import numba
import numpy as np

LANES = 64  # at most; fewer rows take the next multiple of 8
FAR = 1e300


def compiled(function: Any) -> Any:
    """The function compiled without the interpreter's lock; kept on disk where there is a place for it."""
    plain = inspect.unwrap(function)  # without what checks types in tests
    try:
        return numba.njit(nogil=True, cache=True)(plain)
    except RuntimeError:  # no folder to write to
        return numba.njit(nogil=True)(plain)


@compiled
def fill(lane, row, t, form, tree, depth):  # type: ignore[no-untyped-def]
    """Nothing; the lane then holds its row's numbers for t, down to `depth` chosen keys; with t 0 none is negative."""
    products, signed, base, constant, slack = form
    q, gains, total, chosen = tree
    n = signed.shape[1]
    for i in range(n):
        gains[0, i, lane] = products[row, i, i] - t * signed[row, i] * (signed[row, i] + 2 * base[row])
        for j in range(i + 1, n):
            q[i, j, lane] = 2 * (products[row, i, j] - t * signed[row, i] * signed[row, j])
    total[0, lane] = constant[row] - t * base[row] ** 2 - slack[row] if t > 0 else FAR
    for d in range(depth):
        i = chosen[d]
        total[d + 1, lane] = total[d, lane] + gains[d, i, lane]
        for j in range(i + 1, n):
            gains[d + 1, j, lane] = gains[d, j, lane] + q[i, j, lane]


@compiled
def direct(row, kept, pool):  # type: ignore[no-untyped-def]
    """E of one set: ||sum c_j|| / p(A)."""
    vectors, weights, offset, offset_weight, floor = pool
    mass = offset_weight[row]
    for j in range(len(kept)):
        if kept[j]:
            mass += weights[row, j]
    if mass <= 0:
        return np.inf
    length = 0.0
    for x in range(offset.shape[1]):
        part = offset[row, x]
        for j in range(len(kept)):
            if kept[j]:
                part += vectors[row, j, x]
        length += part * part
    error = np.sqrt(length) / mass
    return 0.0 if error <= floor[row] else error


@compiled
def advance(i, depth, tree):  # type: ignore[no-untyped-def]
    """Step 2 in every lane: key i is the next of the prefix."""
    q, gains, total = tree[:3]
    n_lanes = q.shape[2]
    sums, own, further = total[depth], gains[depth, i], total[depth + 1]
    for lane in range(n_lanes):
        further[lane] = sums[lane] + own[lane]
    for j in range(i + 1, q.shape[0]):
        gain, pair, further = gains[depth, j], q[i, j], gains[depth + 1, j]
        for lane in range(n_lanes):
            further[lane] = gain[lane] + pair[lane]


@compiled
def any_negative(first, sums, last, q, least, signs):  # type: ignore[no-untyped-def]
    """Step 3: whether some lane has a pair of keys from `first` on that gives a negative f; `least` is its least f."""
    n, n_lanes = last.shape
    for lane in range(n_lanes):
        least[lane] = FAR
    for i in range(first, n - 1):
        own = last[i]
        for j in range(i + 1, n):
            gain, pair = last[j], q[i, j]
            for lane in range(n_lanes):
                value = own[lane] + (gain[lane] + pair[lane])
                least[lane] = value if value < least[lane] else least[lane]
    for lane in range(n_lanes):
        least[lane] += sums[lane]
    negative = 0
    for lane in range(n_lanes):
        negative |= signs[lane]
    return negative < 0


@compiled
def look_closer(lane, row, first, dropped, tied, form, pool, tree, kept, error, members):  # type: ignore[no-untyped-def]
    """Step 4 for one lane."""
    q, gains, total, chosen = tree
    n, m = gains.shape[1], len(chosen)
    sums, last = total[m - 2], gains[m - 2]
    for i in range(first, n - 1):
        chosen[m - 2] = i
        for j in range(i + 1, n):
            if not sums[lane] + (last[i, lane] + (last[j, lane] + q[i, j, lane])) < 0:
                continue
            chosen[m - 1] = j
            kept[:] = dropped
            for place in chosen:
                kept[place] = not dropped
            found = direct(row, kept, pool)
            if found < error[row] * tied:
                error[row] = found
                members[row] = np.flatnonzero(kept)
                fill(lane, row, (found * tied) ** 2, form, tree, m - 2)


@compiled
def search(m, dropped, tied, form, pool, error, members):  # type: ignore[no-untyped-def]
    """Nothing; `error` and `members` of each row are then those of its best set.

    `form` is products, signed weights, base, constant and slack; `pool` vectors, weights, offset, offset weight and
    floor; all arrays have the row first. m >= 2.
    """
    n_rows, n = form[1].shape
    n_lanes = min(LANES, -(-n_rows // 8) * 8)
    chosen = np.zeros(m, np.int64)
    tree = (np.zeros((n, n, n_lanes)), np.zeros((m - 1, n, n_lanes)), np.zeros((m - 1, n_lanes)), chosen)
    least, kept = np.zeros(n_lanes), np.zeros(n, np.bool_)
    signs = least.view(np.int64)
    for start in range(0, n_rows, n_lanes):
        for lane in range(n_lanes):
            row = min(start + lane, n_rows - 1)
            fill(lane, row, (error[row] * tied) ** 2 if start + lane < n_rows else 0.0, form, tree, 0)
        depth = 0
        chosen[0] = -1
        while depth >= 0:
            if depth < m - 2:
                chosen[depth] += 1
                i = chosen[depth]
                if i > n - m + depth:  # no room for the rest after it
                    depth -= 1
                else:
                    advance(i, depth, tree)
                    depth += 1
                    chosen[depth] = i
                continue
            first = chosen[m - 3] + 1 if m > 2 else 0
            if any_negative(first, tree[2][m - 2], tree[1][m - 2], tree[0], least, signs):
                for lane in range(n_lanes):
                    if least[lane] < 0:
                        look_closer(lane, start + lane, first, dropped, tied, form, pool, tree, kept, error, members)
            depth -= 1
