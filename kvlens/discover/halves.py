"""The search that `subsets.py` explains, as matrix products on a torch device.

1. The pool is split in halves. A subset is one of k keys of the first half and one of m - k of the second:
   f = f_1 + f_2 + 2 x_1' Q_12 x_2, which one product over (half + 2) features gives for all pairs of subsets at once,
   in float64.
2. t stays that of the start; every set below the bound is evaluated directly.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, combinations
from math import comb

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from kvlens.discover.balancing import Chosen
from kvlens.discover.instances import TIED, Pool, set_errors
from kvlens.discover.subsets import DOUBLE, Form

BLOCK_FLOATS = 2**23  # of f at a time
EVALUATED_AT_ONCE = 4096


def search(pool: Pool, form: Form, start: Chosen, device: str) -> Chosen:
    """The best set of each row."""
    error, members = start.error.copy(), start.members.copy()
    n, m = pool.size, form.n_chosen
    for k in range(max(0, m - (n - n // 2)), min(m, n // 2) + 1):
        for first, values in _blocks(form, start.error * TIED, k, device):
            row, one, two = (index.cpu().numpy() for index in (values < 0).nonzero(as_tuple=True))
            for begin in range(0, len(row), EVALUATED_AT_ONCE):
                part = slice(begin, begin + EVALUATED_AT_ONCE)
                second = n // 2 + subsets(n - n // 2, m - k)[two[part]]
                chosen = np.concatenate([subsets(n // 2, k)[one[part]], second], 1)
                kept = _complement(chosen, n) if form.dropped else chosen
                rows = first + row[part]
                found = set_errors(pool, kept, rows)
                # Of several better sets of one row the last written is its best.
                order = np.flatnonzero(found < error[rows] * TIED)
                order = order[np.argsort(-found[order], kind="stable")]
                error[rows[order]], members[rows[order]] = found[order], kept[order]
    return Chosen(error, members)


def _blocks(
    form: Form, error: np.ndarray, k: int, device: str
) -> Iterator[tuple[int, Float64[Tensor, "block one two"]]]:
    """Step 1: f less its bound for k keys of the first half, and the first row of each block."""
    n = form.signed.shape[1]
    half, t = n // 2, error**2
    matrix = form.products - t[:, None, None] * form.signed[:, :, None] * form.signed[:, None]
    places = np.arange(n)
    matrix[:, places, places] -= 2 * (t * form.base)[:, None] * form.signed
    above = form.constant - t * form.base**2 - DOUBLE * form.slack
    one = torch.from_numpy(indicators(half, k)).to(device)
    two = torch.from_numpy(indicators(n - half, form.n_chosen - k)).to(device)
    step = max(1, BLOCK_FLOATS // (len(one) * max(len(two), half + 2)))
    for first in range(0, len(matrix), step):
        q = torch.from_numpy(matrix[first : first + step]).to(device)
        rest = torch.from_numpy(above[first : first + step]).to(device)
        own = ((one @ q[:, :half, :half]) * one).sum(2) + rest[:, None]
        other = ((two @ q[:, half:, half:]) * two).sum(2)
        left = torch.cat([one @ (2 * q[:, :half, half:]), own[:, :, None], torch.ones_like(own)[:, :, None]], 2)
        fixed = two.T.expand(len(q), -1, -1)
        yield first, left @ torch.cat([fixed, torch.ones_like(other)[:, None], other[:, None]], 1)


@lru_cache(maxsize=64)
def subsets(n: int, k: int) -> Int[np.ndarray, "subset chosen"]:
    """All ascending k-subsets of n places, in the order of itertools."""
    flat = np.fromiter(chain.from_iterable(combinations(range(n), k)), dtype=np.int64, count=comb(n, k) * k)
    return flat.reshape(comb(n, k), k)


@lru_cache(maxsize=64)
def indicators(n: int, k: int) -> Float64[np.ndarray, "subset place"]:
    """The same subsets as 0/1 vectors."""
    found = np.zeros((comb(n, k), n))
    np.put_along_axis(found, subsets(n, k), 1.0, 1)
    return found


def _complement(places: Int[np.ndarray, "set left_out"], n: int) -> Int[np.ndarray, "set kept"]:
    """The places out of n that are not in each set, ascending."""
    kept = np.ones((len(places), n), dtype=bool)
    np.put_along_axis(kept, places, False, 1)
    return kept.nonzero()[1].reshape(len(places), n - places.shape[1])
