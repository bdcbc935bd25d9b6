"""Do PARTITION and "is there a kept set without error" agree?"""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.discover.hardness import can_be_parted, from_partition, zero_error_possible
from kvlens.errors import InputError


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_both_sides_agree(numbers: list[int]) -> None:
    parts = chain.from_iterable(combinations(numbers, k) for k in range(len(numbers) + 1))
    by_hand = any(2 * sum(part) == sum(numbers) for part in parts)
    assert can_be_parted(numbers) == by_hand
    assert zero_error_possible(from_partition(numbers)) == by_hand


def test_both_answers_occur_at_random() -> None:
    random = np.random.default_rng(0)
    answers = [can_be_parted(random.integers(1, 40, size=7).tolist()) for _ in range(40)]
    assert 5 < sum(answers) < 35


def test_one_number_more_than_half_cannot_be_parted() -> None:
    assert not zero_error_possible(from_partition([9, 1, 2, 3]))
    assert zero_error_possible(from_partition([6, 1, 2, 3]))


def test_no_or_negative_numbers_are_refused() -> None:
    for numbers in ([], [1, -1]):
        with pytest.raises(InputError, match="numbers are"):
            from_partition(numbers)


@pytest.mark.parametrize("numbers", [[2**60, 2**60 + 1], [1] * 20, [-1, 1]])
def test_numbers_that_the_search_cannot_tell_are_refused(numbers: list[int]) -> None:
    with pytest.raises(InputError):
        from_partition(numbers)
