"""Batches that fit: are they chosen from free memory, and is nothing lost when one does not fit?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny
import tiny_runs
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlens.errors import EnvironmentLacks
from kvlens.model import cache_layers, hidden, new_cache
from kvlens.probe import budget


class Machine:
    """Runs batches of at most `capacity` items, as memory would allow."""

    def __init__(self, capacity: int, error: BaseException | None = None) -> None:
        self.capacity, self.error = capacity, error or MemoryError()
        self.ran: list[list[int]] = []
        self.splits: list[int] = []

    def __call__(self, items: Sequence[int]) -> list[int]:
        if len(items) > self.capacity:
            raise self.error
        self.ran.append(list(items))
        return list(items)


@given(st.integers(1, 200), st.integers(1, 250), st.integers(1, 8))
def test_pieces_hold_every_item_once_in_order_and_a_split_only_grows(n: int, capacity: int, split: int) -> None:
    machine = Machine(capacity)
    found = budget.run_halving(list(range(n)), machine, min(split, n), machine.splits.append)
    assert [item for piece in found for item in piece] == list(range(n))
    assert machine.splits == sorted(set(machine.splits))
    assert all(number > min(split, n) for number in machine.splits)
    if machine.splits:  # later batches of the same size then fit at once
        again = Machine(capacity)
        budget.run_halving(list(range(n)), again, machine.splits[-1], again.splits.append)
        assert again.splits == []


def test_what_fits_is_not_split() -> None:
    machine = Machine(10)
    assert budget.run_halving(range(10), machine, 1, machine.splits.append) == [list(range(10))]
    assert machine.splits == []


def test_a_single_item_that_does_not_fit_is_a_lack() -> None:
    machine = Machine(0)
    with pytest.raises(EnvironmentLacks, match="one window at a time"):
        budget.run_halving(range(5), machine, 1, machine.splits.append)
    assert machine.splits == [3, 5]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:120] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
    ],
)
def test_every_way_to_run_out_of_memory_is_known(error: BaseException) -> None:
    machine = Machine(2, error)
    budget.run_halving(range(4), machine, 1, machine.splits.append)
    assert machine.splits == [2]


def test_torch_says_so_in_words_that_are_known() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert budget.is_out_of_memory(caught.value)


def test_other_errors_pass() -> None:
    machine = Machine(2, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        budget.run_halving(range(4), machine, 1, machine.splits.append)
    assert machine.splits == []


def test_rows_follow_free_memory_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_runs.model()

    def rows(free: int, n_tokens: int = 200) -> int:
        monkeypatch.setattr(budget, "free_bytes", lambda device: free)
        return budget.choose_rows(model, n_tokens)

    fixed = 3 * budget.BLOCK_ROWS * model.d_vocab * 4
    one = budget.row_bytes(model, 200)
    assert rows(2**50) == budget.CPU_ROWS
    assert rows(0) == rows(2 * fixed) == 1
    assert rows(2 * (fixed + 37 * one)) == 37
    assert rows(2 * (fixed + 37 * one), n_tokens=2000) < 37


def test_estimates_hold_on_a_real_cache() -> None:
    model = tiny_runs.model()
    cache = new_cache(model)
    with torch.no_grad():
        hidden(model, tiny.token_ids(40), cache=cache)
    size = sum(states.nbytes for pair in cache_layers(cache) for states in pair)
    assert budget.prefix_bytes(model, 40) == size
    assert budget.batch_bytes(model, 40, 64) - budget.batch_bytes(model, 40, 32) == 32 * budget.row_bytes(model, 40)


def test_memory_is_measured_here() -> None:
    here = torch.device("cpu")
    assert 2**20 < budget.free_bytes(here) < 2**50
    before = budget.peak_bytes(here)
    block = torch.ones(2**26)  # 256 MB that are really touched
    assert budget.peak_bytes(here) >= max(before, block.nbytes)
