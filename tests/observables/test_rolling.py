"""Rolling mean and z-score: any window, the bound, and values that are far from zero or far apart."""

from __future__ import annotations

import numpy as np
import pytest
import signal_oracles
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.observables import rolling

numbers = st.floats(-1e6, 1e6, width=32)


@given(st.lists(numbers, min_size=1, max_size=200), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_a_zscore_is_bounded_by_its_window(values: list[float], window: int) -> None:
    _, found = rolling.zscore(rolling.init(window), torch.tensor(values))
    assert found.abs().max() <= (window - 1) ** 0.5 * (1 + 1e-12)
    few = 1 if window > 1 else len(values)
    assert torch.equal(found[:few], torch.zeros(few, dtype=torch.float64))


def test_the_bound_is_reached_and_not_by_what_leaves_the_current_value_out() -> None:
    values = torch.zeros(100)
    values[80] = 1e6
    for exclude in (False, True):
        _, found = rolling.zscore(rolling.init(), values, exclude_current=exclude)
        assert found[80] == pytest.approx(63**0.5 if not exclude else 1e12, rel=1e-9)


@pytest.mark.parametrize("window", [1, 2, 64])
@pytest.mark.parametrize("exclude", [False, True])
def test_windows_of_any_size_are_the_oracles(window: int, exclude: bool) -> None:
    values = torch.randn(150, generator=torch.Generator().manual_seed(0)) * 3 + 7
    _, mean = rolling.mean(rolling.init(window), values)
    np.testing.assert_allclose(mean.numpy(), signal_oracles.rolling_mean(values.numpy(), window), rtol=1e-12)
    _, z = rolling.zscore(rolling.init(window), values, exclude_current=exclude)
    truth = signal_oracles.zscore(values.double().numpy(), window, exclude_current=exclude)
    np.testing.assert_allclose(z.numpy(), truth, rtol=1e-9, atol=1e-9)


def test_nothing_drifts_behind_a_huge_value_or_over_a_long_trace() -> None:
    """A running sum would carry the rounding of 1e12 on to everything after it."""
    values = 1.0 + 1e-3 * torch.randn(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values[100] = 1e12
    tail = values[200:]
    for function in (rolling.mean, rolling.zscore):
        _, found = function(rolling.init(), values)
        _, alone = function(rolling.init(), tail)
        torch.testing.assert_close(found[200 + 63 :], alone[63:], rtol=1e-9, atol=1e-9)


def test_what_is_no_number_is_no_value() -> None:
    values = torch.tensor([torch.nan, 1.0, torch.nan, 3.0])
    _, mean = rolling.mean(rolling.init(3), values)
    torch.testing.assert_close(mean, torch.tensor([torch.nan, 1.0, 1.0, 2.0], dtype=torch.float64), equal_nan=True)
    _, z = rolling.zscore(rolling.init(4), torch.tensor([torch.nan, 1.0, 2.0, torch.nan]))
    assert z[:2].tolist() == [0, 0]
    assert z[2] == pytest.approx(1.0, abs=1e-5)
    assert z[3].isnan()


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 is the least"):
        rolling.init(0)
