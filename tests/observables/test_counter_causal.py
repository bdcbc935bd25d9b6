"""Attention to the future: every rule against the mask of all rows in float64, in blocks, in linear memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import surprise_oracles as oracle
import tiny
import torch
from allocations import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlens.model import causal_backend, wrap
from kvlens.observables import counter_causal
from kvlens.observables.attention_weights import Rule
from kvlens.observables.counter_causal import Sight, attend, sdpa

N_HEADS, D_HEAD = 4, 6


def drawn(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A batch of caches of up to 14 rows: with gaps in their positions, with units, with padding in front."""
    n, n_rows = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    steps = [[draw(st.integers(1, 4)) for _ in range(n)] for _ in range(n_rows)]
    sizes = [draw(st.lists(st.integers(1, 4), min_size=n, max_size=n)) for _ in range(n_rows)]
    units = [[i for i, size in enumerate(row) for _ in range(size)][:n] for row in sizes]
    return {
        "positions": torch.tensor(steps).cumsum(1) + draw(st.integers(0, 100)) - 1,
        "units": units if draw(st.booleans()) else None,
        "n_pad": [draw(st.integers(0, n)) for _ in range(n_rows)] if draw(st.booleans()) else None,
        "gap": draw(st.integers(0, 4)),
        "past": draw(st.booleans()),
        "window": draw(st.sampled_from([None, None, 1, 3, 8, 500])),
        "softcap": draw(st.sampled_from([None, None, 1.5])),
        "sinks": draw(st.sampled_from([False, False, True])),
        "n_kv_heads": draw(st.sampled_from([1, 2, 4])),
        "seed": draw(st.integers(0, 99)),
    }


def sight_and_mask(case: dict[str, Any]) -> tuple[Sight, Tensor]:
    """The sight, and in loops what it means: [batch, row, row]."""
    positions, past, gap = case["positions"], case["past"], case["gap"]
    n_rows, n = positions.shape
    seen, edge = torch.zeros(n_rows, n, n, dtype=torch.bool), torch.zeros_like(positions)
    for row in range(n_rows):
        units = list(range(n)) if case["units"] is None else case["units"][row]
        first = 0 if case["n_pad"] is None else case["n_pad"][row]
        for i in range(n):
            mates = [j for j in range(n) if units[j] == units[i]]
            edge[row, i] = mates[0] if past else mates[-1]
            for j in range(first, n):
                seen[row, i, j] = j < mates[0] - gap if past else j > mates[-1] + gap
    n_pad = None if case["n_pad"] is None else torch.tensor(case["n_pad"])
    return Sight(positions, gap, past, None if case["units"] is None else edge, n_pad), seen


@given(cases(), st.sampled_from([(8, 1), (60, 2), (30, 5), (2**18, 16)]))
@settings(max_examples=250, deadline=None)
def test_attention_is_that_of_the_mask(case: dict[str, Any], block: tuple[int, int]) -> None:
    sight, seen = sight_and_mask(case)
    n_rows, n = case["positions"].shape
    query = drawn(n_rows, N_HEADS, n, D_HEAD, seed=case["seed"])
    keys, values = (drawn(n_rows, case["n_kv_heads"], n, D_HEAD, seed=case["seed"] + i) for i in (1, 2))
    rule = Rule(0.4, case["window"], case["softcap"], drawn(N_HEADS, seed=3) if case["sinks"] else None)
    with mock.patch.multiple(counter_causal, BLOCK=block[0], ROWS=block[1]):
        found = attend(query, keys, values, rule, sight)
    let_through = oracle.within(seen, case["positions"], rule.window)[:, None]
    truth = oracle.attention(query, keys, values, let_through, rule.scale, rule.softcap, rule.sinks)
    real = torch.arange(n) >= torch.zeros(n_rows, 1) if sight.n_pad is None else torch.arange(n) >= sight.n_pad[:, None]
    assert found.isfinite().all()
    blind = ~let_through.any(-1) & real[:, None]
    assert (found.transpose(1, 2)[blind[:, 0]] == 0).all()  # exactly
    close = (found.double() - truth).abs().amax((1, 3)) < 1e-5
    assert close[real].all()
    assert torch.equal(sight.known(), seen.any(-1) & real)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("edged", [False, True])
def test_rows_as_many_as_the_gap_and_one_more_see_nothing(past: bool, edged: bool) -> None:
    for n in (1, 2, 3, 4):
        edge = torch.arange(n)[None] if edged else None  # the same sight, by blocks instead of the triangle
        states = drawn(1, 2, n, D_HEAD, seed=n)
        for gap in range(6):
            sight = Sight(torch.arange(n)[None], gap, past, edge)
            found = attend(states, states, states, Rule(1.0), sight)
            n_seeing = max(0, n - gap - 1)
            assert int(sight.known().sum()) == n_seeing
            assert int((found != 0).all(-1).all(1).sum()) == n_seeing
            assert int((found == 0).all(-1).all(1).sum()) == n - n_seeing


def test_what_can_be_said_by_a_triangle_is_left_to_the_causal_kernel() -> None:
    """And equals the blocks; a window counts from where the text is longer than it."""
    states = drawn(2, 2, 9, D_HEAD, seed=0)
    positions = torch.arange(9).expand(2, 9)
    calls: list[int] = []

    def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        calls.append(query.shape[2])
        assert query.shape[2] == keys.shape[2] == values.shape[2]
        return sdpa(query, keys, values, scale)

    def n_calls(rule: Rule, sight: Sight) -> int:
        before = len(calls)
        attend(states, states, states, rule, sight, causal)
        return len(calls) - before

    pad = torch.tensor([0, 2])
    assert n_calls(Rule(1.0), Sight(positions)) == 1
    assert n_calls(Rule(1.0), Sight(positions, 3, past=True)) == 1
    assert calls == [8, 5]
    assert n_calls(Rule(1.0), Sight(positions, n_pad=pad)) == 1
    assert n_calls(Rule(1.0, window=9), Sight(positions)) == 1
    assert n_calls(Rule(1.0), Sight(positions, 8)) == 0
    for rule in (Rule(1.0, window=8), Rule(1.0, softcap=2.0), Rule(1.0, sinks=torch.zeros(2))):
        assert n_calls(rule, Sight(positions)) == 0
    assert n_calls(Rule(1.0, window=9), Sight(2 * positions)) == 0
    assert n_calls(Rule(1.0), Sight(positions, edge=positions)) == 0
    assert n_calls(Rule(1.0), Sight(positions, past=True, n_pad=pad)) == 0


@given(st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_sdpa_shares_key_heads(n: int, n_kv_heads: int, n_rows: int, seed: int) -> None:
    query = drawn(n_rows, N_HEADS, n, D_HEAD, seed=seed)
    keys, values = (drawn(n_rows, n_kv_heads, n, D_HEAD, seed=seed + i) for i in (1, 2))
    truth = oracle.attention(query, keys, values, torch.ones(n, n, dtype=torch.bool).tril(), 0.3)
    torch.testing.assert_close(sdpa(query, keys, values, 0.3).double(), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", [Rule(0.4), Rule(0.4, window=5), Rule(0.4, softcap=30.0)])
def test_half_precision_keys_may_be_massive(dtype: torch.dtype, rule: Rule) -> None:
    """Scores of 1e6 and more: squares of such keys are infinite in float16."""
    query, values = (drawn(1, N_HEADS, 20, D_HEAD, seed=seed).to(dtype) for seed in (0, 1))
    keys = (drawn(1, 2, 20, D_HEAD, seed=2) * 8000).clamp(-60_000, 60_000).to(dtype)
    assert keys.isfinite().all()
    seen = oracle.within(torch.ones(20, 20, dtype=torch.bool).triu(2), torch.arange(20), rule.window)
    found = attend(query, keys, values[:, :2], rule, Sight(torch.arange(20)[None], 1))
    truth = oracle.attention(query, keys, values[:, :2], seen, rule.scale, rule.softcap)
    assert found.dtype == dtype
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), truth, atol=2e-2, rtol=1e-2)  # what rounding the output leaves


# Memory


def peak(n: int, rule: Rule, past: bool, units: bool, n_heads: int = 8) -> int:
    query = torch.randn(1, n_heads, n, 8)
    keys, values = torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
    row = torch.arange(n)[None]
    sight = Sight(row, 1, past, (row // 7 * 7 + (0 if past else 6)).clamp(max=n - 1) if units else None)
    return peak_bytes(lambda: attend(query, keys, values, rule, sight))


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(
    ("rule", "units"),
    [
        (Rule(0.3), False),
        (Rule(0.3), True),
        (Rule(0.3, softcap=5.0), False),
        (Rule(0.3, window=8), False),
        (Rule(0.3, window=1000, sinks=torch.zeros(8)), True),
    ],
)
def test_memory_is_linear_in_the_rows(rule: Rule, units: bool, past: bool) -> None:
    """The weights of all heads would be 8 * 6,000 * 6,000 * 4 bytes = 1.2 GB."""
    short, long = (peak(n, rule, past, units) for n in (3000, 6000))
    assert 1e6 < long < 2.1 * short
    assert long < 4e7


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("past", [False, True])
def test_kernels_of_a_gpu_give_the_numbers_of_the_mask(backend: str, past: bool) -> None:
    """Both read causal attention as the triangle from the top left: as many queries as keys."""
    if backend == "flash_attention_2":
        pytest.importorskip("flash_attn")
    hf_model = tiny.llama(hidden_size=128, attn_implementation=backend, dtype=torch.bfloat16)  # d_head 32
    model = wrap(hf_model.to("cuda", torch.bfloat16))
    causal = causal_backend(model)
    assert (causal is None) == (backend == "sdpa")
    for n, gap in ((1, 0), (2, 0), (3, 1), (130, 0), (131, 3)):
        query, keys, values = (
            drawn(2, n_heads, n, 32, seed=n_heads).to("cuda", torch.bfloat16) for n_heads in (4, 2, 2)
        )
        sight = Sight(torch.arange(n, device="cuda").expand(2, n), gap, past)
        found = attend(query, keys, values, Rule(0.2), sight, causal or sdpa)
        ones = torch.ones(n, n, dtype=torch.bool, device="cuda")
        truth = oracle.attention(query, keys, values, ones.tril(-1 - gap) if past else ones.triu(1 + gap), 0.2)
        torch.testing.assert_close(found.double(), truth, atol=5e-2, rtol=2e-2)
