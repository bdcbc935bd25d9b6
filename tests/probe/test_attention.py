"""Attention in parts, against attention written out in float64, one query at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlens.probe.attend import as_bias, attend, attend_plain, merge
from kvlens.probe.attention import SharedPrefixAttention

TOLERANCE = 1e-5
SCALE = 0.4


def drawn(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states(n_rows: int, n_heads: int, n_query: int, n_key: int, *, d_head: int = 8) -> list[Tensor]:
    return [drawn(n_rows, n_heads, n, d_head, seed=i) for i, n in enumerate((n_query, n_key, n_key))]


@pytest.mark.parametrize("how", [attend, attend_plain])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_under_a_mask(how: Any, heads: int, softcap: float | None) -> None:
    query, keys, values = states(3, 4, 6, 9)
    visible = torch.rand(3, heads, 6, 9, generator=torch.Generator().manual_seed(3)) < 0.5
    visible[..., 0] = True
    out, lse = how(query, keys, values, scale=SCALE, bias=as_bias(visible, torch.float32), softcap=softcap)
    true_out, true_lse = oracles.attention(query, keys, values, visible, scale=SCALE, softcap=softcap)
    torch.testing.assert_close(out.double(), true_out, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(lse.double(), true_lse, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("how", [attend, attend_plain])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_causal_attention(how: Any, softcap: float | None) -> None:
    query, keys, values = states(2, 3, 7, 7)
    out, lse = how(query, keys, values, scale=SCALE, causal=True, softcap=softcap)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    true_out, true_lse = oracles.attention(query, keys, values, visible, scale=SCALE, softcap=softcap)
    torch.testing.assert_close(out.double(), true_out, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(lse.double(), true_lse, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("how", [attend, attend_plain])
def test_a_row_that_sees_nothing_has_no_weight_in_a_merge(how: Any) -> None:
    query, keys, values = states(2, 2, 4, 5)
    visible = torch.ones(2, 1, 4, 5, dtype=torch.bool)
    visible[0, :, 1] = visible[1, :, 3] = False
    blind = how(query, keys, values, scale=SCALE, bias=as_bias(visible, torch.float32))
    assert bool(torch.isfinite(blind[0]).all())
    assert bool((blind[1][0, :, 1] < -1e30).all())
    seeing = how(query, keys + 1, values + 1, scale=SCALE)
    merged = merge([blind, seeing])
    torch.testing.assert_close(merged[0, :, 1], seeing[0][0, :, 1], atol=0, rtol=0)
    torch.testing.assert_close(merged[1, :, 3], seeing[0][1, :, 3], atol=0, rtol=0)


def test_blocks_of_queries_change_nothing() -> None:
    query, keys, values = states(2, 2, 11, 11)
    whole = attend_plain(query, keys, values, scale=SCALE, causal=True)
    pieces = attend_plain(query, keys, values, scale=SCALE, causal=True, block=4)
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@given(n_parts=st.integers(1, 4), n_query=st.integers(1, 5), seed=st.integers(0, 99), large=st.booleans())
@settings(max_examples=30, deadline=None)
def test_parts_merge_to_the_whole(n_parts: int, n_query: int, seed: int, large: bool) -> None:
    """Also where one part's scores drown another's by more than float32 can hold."""
    scale = SCALE * (60 if large else 1)
    query, keys, values = (drawn(2, 2, n, 4, seed=seed + i) for i, n in enumerate((n_query, 13, 13)))
    whose = torch.randint(n_parts, (13,), generator=torch.Generator().manual_seed(seed))
    parts = [
        attend(query, keys[:, :, whose == part], values[:, :, whose == part], scale=scale) for part in whose.unique()
    ]
    truth, _ = oracles.attention(query, keys, values, torch.ones(n_query, 13, dtype=torch.bool), scale=scale)
    # a score is rounded by its size, a weight by as much of itself, and what comes out by that of a value
    largest = scale * torch.einsum("bhqd,bhkd->bhqk", query.abs(), keys.abs()).max() * values.abs().max()
    bound = 4 * torch.finfo(torch.float32).eps * float(largest)
    torch.testing.assert_close(merge(parts).double(), truth, atol=bound + 1e-6, rtol=0)


@given(
    first=st.integers(0, 12),
    n_query=st.integers(1, 9),
    n_rows=st.integers(1, 3),
    window=st.sampled_from([None, 1, 3, 8]),
    per_head=st.booleans(),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_shared_prefix_attention_is_attention_over_the_whole(
    first: int,
    n_query: int,
    n_rows: int,
    window: int | None,
    per_head: bool,
    sinks: bool,
    softcap: float | None,
    seed: int,
) -> None:
    """Six heads on two key-value heads; any hidden keys, any cuts, a key never hidden from itself."""
    n_heads, n_kv, n = 6, 2, first + n_query
    generator = torch.Generator().manual_seed(seed)
    query = drawn(n_rows, n_heads, n_query, 8, seed=seed)
    own = [drawn(n_rows, n_kv, n_query, 8, seed=seed + i) for i in (1, 2)]
    prefix = [drawn(1, n_kv, first, 8, seed=seed + i) for i in (3, 4)]
    hidden = torch.rand(n_rows, n, generator=generator) < torch.rand((), generator=generator)
    cut = torch.randint(first, n + 1, (n_rows,), generator=generator)
    cells = torch.rand(1, n_heads, generator=generator) < 0.5 if per_head else None
    sink = drawn(n_heads, seed=seed + 5) if sinks else None
    visible = torch.zeros(n_rows, n_heads, n_query, n, dtype=torch.bool)
    for row in range(n_rows):
        hidden[row, cut[row] :] = False
        for head in range(n_heads):
            gone = hidden[row].nonzero()[:, 0].tolist() if cells is None or cells[0, head] else []
            visible[row, head] = oracles.visibility(n, gone, int(cut[row]))[first:]
    if window is not None:
        distance = torch.arange(first, n)[:, None] - torch.arange(n)
        visible &= distance < window

    engine = SharedPrefixAttention([tuple(prefix)], first, hidden, cut, [window], cells=cells)  # type: ignore[arg-type]
    ours, _ = engine(SimpleNamespace(layer_idx=0), query, *own, scaling=SCALE, softcap=softcap, s_aux=sink)
    keys, values = (torch.cat([p.expand(n_rows, -1, -1, -1), o], 2) for p, o in zip(prefix, own, strict=True))
    truth, _ = oracles.attention(query, keys, values, visible, scale=SCALE, softcap=softcap, sinks=sink)
    torch.testing.assert_close(ours.transpose(1, 2).double(), truth, atol=TOLERANCE, rtol=0)
