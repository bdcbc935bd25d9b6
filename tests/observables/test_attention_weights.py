"""Recomputed attention: the model's own eager weights on every family, in blocks of any size, in linear memory."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import signal_oracles
import tiny
import torch
from allocations import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlens.model import attention_override, logits, wrap
from kvlens.observables.attention_weights import ROWS, Rule, attention_weights, blocks, weighted_values
from kvlens.observables.table import TABLE
from kvlens.probe.signal_pass import WatchedAttention, read_signals

N = 26
ATTENTION = [signal for signal in TABLE if "attention" in signal.needs]


@pytest.mark.parametrize("name", tiny.ATTENTION_FAMILIES)
def test_mass_and_entropy_are_those_of_the_models_own_eager_attention(name: str) -> None:
    ids = tiny.token_ids(N)[0]
    layers = oracles.eager_weights(tiny.ATTENTION_FAMILIES[name], ids)
    found = read_signals(wrap(tiny.ATTENTION_FAMILIES[name]()), ids, ATTENTION, torch.ones_like(ids))
    for signal in ATTENTION:
        truth = np.stack([getattr(signal_oracles, signal.name)(weights) for weights in layers], -1)
        np.testing.assert_allclose(found[signal.name], truth, atol=5e-5)
    total = found["attention_mass"].sum(0)
    assert np.allclose(total, N, atol=1e-4) != (name == "gpt_oss")  # what a sink takes, no key has


@pytest.mark.parametrize("name", tiny.ATTENTION_FAMILIES)
@torch.no_grad()
def test_watching_attention_leaves_the_models_numbers(name: str) -> None:
    """The pass runs through the recomputed attention, so a wrong output would spoil every other signal."""
    family, ids = wrap(tiny.ATTENTION_FAMILIES[name]()), tiny.token_ids(N)
    family.hf.set_attn_implementation("eager")  # the one that soft-caps
    truth = family.hf(ids, use_cache=False).logits
    seen: list[int] = []
    with attention_override(family, WatchedAttention(family, lambda chunks: seen.append(len([*chunks])))):
        ours = logits(family, ids)
    torch.testing.assert_close(ours, truth, atol=1e-4, rtol=0)
    assert seen == [1] * family.n_layers


def drawn(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    n_query=st.integers(1, 9),
    n_before=st.integers(0, 7),
    window=st.sampled_from([None, 1, 3, 50]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    n_kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_weights_are_the_definition(
    n_query: int, n_before: int, window: int | None, softcap: float | None, sinks: bool, n_kv_heads: int, seed: int
) -> None:
    query = drawn(4, n_query, 6, seed=seed)
    keys, values = (drawn(n_kv_heads, n_before + n_query, 6, seed=seed + i) for i in (1, 2))
    rule = Rule(0.4, window, softcap, drawn(4, seed=seed + 3) if sinks else None)
    ours = attention_weights(query, keys, rule)
    truth = signal_oracles.weights(
        query.numpy(),
        keys.numpy(),
        scale=0.4,
        window=window,
        softcap=softcap,
        sinks=None if rule.sinks is None else rule.sinks.numpy(),
    )
    np.testing.assert_allclose(ours.numpy(), truth, atol=1e-6)
    mixed = np.einsum("hqk,hkd->hqd", truth, values.double().repeat_interleave(4 // n_kv_heads, 0).numpy())
    np.testing.assert_allclose(weighted_values(ours, values).numpy(), mixed, atol=1e-5)


@pytest.mark.parametrize(("size", "n_blocks"), [(1, 7), (400, 6), (4000, 2), (10_000, 1)])
def test_blocks_of_any_size_are_the_whole(size: int, n_blocks: int) -> None:
    query, keys = drawn(2, 4, 100, 6, seed=0), drawn(2, 2, 100, 6, seed=1)  # two sequences at once
    rule = Rule(0.4, 6, None, drawn(4, seed=2))
    whole = attention_weights(query, keys, rule)
    start = 0
    found = list(blocks(query, keys, rule, size))
    for block in found:
        stop = start + block.shape[-2]
        assert block.shape == (2, 4, stop - start, stop)
        assert stop - start <= ROWS or (stop - start) * stop <= size
        torch.testing.assert_close(block, whole[..., start:stop, :stop], atol=1e-6, rtol=0)
        start = stop
    assert (start, len(found)) == (100, n_blocks)


def test_half_precision_scores_are_float32() -> None:
    query, keys = drawn(4, 9, 6, seed=0).bfloat16(), drawn(2, 9, 6, seed=1).bfloat16()
    ours = attention_weights(query, keys, Rule(0.4))
    assert ours.dtype == torch.float32
    truth = signal_oracles.weights(query.double().numpy(), keys.double().numpy(), scale=0.4)
    np.testing.assert_allclose(ours.numpy(), truth, atol=1e-6)
    huge = torch.full((1, 4, 6), 300.0, dtype=torch.float16)  # a score of 540,000: float16 would be infinite
    assert attention_weights(huge, huge, Rule(1.0)).isfinite().all()


# Memory


def test_memory_is_linear_in_the_trace() -> None:
    """Every signal at once. All weights of one layer would be 8 * 6,000 * 6,000 * 4 bytes = 1.2 GB."""
    model = wrap(tiny.llama(num_hidden_layers=1, num_attention_heads=8, max_position_embeddings=8192))
    peaks = {}
    for n in (3000, 6000):
        ids = tiny.token_ids(n)[0]
        peaks[n] = peak_bytes(lambda ids=ids: read_signals(model, ids, TABLE, torch.ones_like(ids)))
    assert 1e6 < peaks[6000] < 2.1 * peaks[3000] < 2e8
