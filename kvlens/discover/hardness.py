"""Why not simply compute the best set over all keys? Because even asking for an error of 0 is NP-complete.

Given whole numbers a_1 .. a_n, PARTITION asks whether some of them sum to half of the total. The reduction:

1. Pad with n zeros, m = 2n numbers. A part that sums to half exists exactly if one with n numbers does (fill it up with
   zeros, of which there are enough): balanced PARTITION.
2. One key a number: its value is the number (one dimension), every weight is 1/m, the budget is m/2.
3. The dense output is total / m, that of a kept set A is sum_A a / (m/2). They are equal, so e(A) = 0, exactly if A
   sums to half of the total.

So an algorithm that decides "is e(A) = 0 possible" in polynomial time would decide PARTITION; and a set with e = 0 can
be checked in linear time. Exact search over all keys has no fast algorithm to hope for; over a pool it is a matter of
how many subsets there are.

Source: ContourKV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kvlens.discover.instances import instances, make_pool
from kvlens.discover.subsets import best_subsets
from kvlens.errors import InputError

MOST_NUMBERS, MOST_TOTAL = 13, 2**40  # 10 million sets; sums that float64 tells apart


class Reduced(NamedTuple):
    """One attention row whose least error is 0 exactly if the numbers can be parted."""

    weights: Float[np.ndarray, "1 key"]
    values: Float[np.ndarray, "key 1"]
    budget: int


def from_partition(numbers: Sequence[int]) -> Reduced:
    """Steps 1 and 2."""
    if not numbers or any(type(number) is not int or number < 0 for number in numbers):
        raise InputError(f"the numbers are {list(numbers)}", "give at least one whole number, none negative")
    if len(numbers) > MOST_NUMBERS or sum(numbers) > MOST_TOTAL:
        raise InputError(
            f"{len(numbers)} numbers with a total of {sum(numbers)}: the search takes all sets, in float64",
            f"give at most {MOST_NUMBERS} numbers with a total of {MOST_TOTAL}",
        )
    m = 2 * len(numbers)
    values = np.array([*numbers, *[0] * len(numbers)], dtype=np.float64)
    return Reduced(np.full((1, m), 1 / m), values[:, None], m // 2)


def can_be_parted(numbers: Sequence[int]) -> bool:
    """Whether some of the numbers sum to half of the total, by the sums that can be reached.

    Cost: total x numbers, exponential in the digits.
    """
    reached = 1  # bit i: the sum i
    for number in numbers:
        reached |= reached << number
    total = sum(numbers)
    return total % 2 == 0 and bool(reached >> (total // 2) & 1)


def zero_error_possible(row: Reduced) -> bool:
    """Whether some kept set has no error, by exact search over all keys.

    Cost: all (m choose m/2) subsets, up to m of 24 or so.
    """
    everything = instances(row.weights, row.values)
    pool = make_pool(everything, row.budget, n_extra=row.weights.shape[1] - row.budget)
    return float(best_subsets(pool, row.budget).error[0]) == 0.0
