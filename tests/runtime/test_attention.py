"""Masks and ragged heads at their edges, against attention written out."""

from __future__ import annotations

import subprocess
import sys
import weakref
from itertools import pairwise

import pytest
import torch
from eviction import masked_logits, policy, step_of_each, streamed_logits, uneven
from tiny import FAMILIES, llama, plain_attention, token_ids

from kvlens import model as models
from kvlens.errors import ModelRefused
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import HeldLayer, Ledger
from kvlens.runtime.ragged import RaggedLayer, attend
from kvlens.runtime.varlen import Kernel
from kvlens.scorers import table
from kvlens.scorers.interface import EMPTY


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("reduce", ["layer", "head"])
def test_pitfall_17_layers_of_unequal_length(backend: str, reduce: str) -> None:
    hf = FAMILIES["qwen2"]()
    hf.set_attn_implementation(backend)
    model, ids = models.wrap(hf), token_ids(40)
    more = uneven(model)
    if reduce == "layer":
        widths = [[row[0]] * len(row) for row in more["allocate"]["table"]]
        more = {"reduce": "layer", "allocate": {"name": "table", "table": widths}}
    for chunks in ([20, *[1] * 20], [20, 6, 1, 6, 7]):
        with apply(policy("keynorm", **more), model) as run:
            found = streamed_logits(model, ids, chunks)[0]
        assert len({layer.keys.shape[2] for layer in run.cache.layers}) == 3
        expected = masked_logits(model, ids[0], run.events(), step_of_each(chunks))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def ragged(
    lengths: list[list[int]], new: int, n_heads: int, own: torch.Tensor | None
) -> tuple[RaggedLayer, list, tuple]:
    """A ragged layer that holds so many tokens a (row, head), `new` more just added; what each pair holds; the new."""
    batch, heads = len(lengths), len(lengths[0])
    none = torch.zeros(batch, dtype=torch.long)
    ledger = Ledger(table.make("random", {}), None, (0,), weakref.ref(none), none, none, driven=True)
    dense = HeldLayer(ledger, 0)
    wide = max(max(row) for row in lengths)
    keys, values = torch.randn(2, batch, heads, wide, 8, generator=torch.Generator().manual_seed(1))
    dense.update(keys, values)
    positions = torch.full((batch, heads, wide), EMPTY)
    for row in range(batch):
        for head in range(heads):
            positions[row, head, wide - lengths[row][head] :] = torch.arange(lengths[row][head])
    layer = RaggedLayer.of(dense, torch.arange(wide).expand(batch, heads, wide), positions)
    ledger.own = own
    fresh = torch.randn(3, batch, n_heads, new, 8, generator=torch.Generator().manual_seed(2))
    layer.update(fresh[1][:, :heads], fresh[2][:, :heads])
    pairs = [
        (keys[b, h, wide - lengths[b][h] :], values[b, h, wide - lengths[b][h] :])
        for b in range(batch)
        for h in range(heads)
    ]
    return layer, pairs, (fresh[0], fresh[1][:, :heads], fresh[2][:, :heads])


def varlen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    """What flash_attn_varlen_func says it does, written out, with what it asks of its arguments (2.8)."""
    assert of_queries.dtype == of_keys.dtype == torch.int32
    assert len(of_queries) == len(of_keys)
    assert int(of_queries[-1]) == len(queries)
    assert int(of_keys[-1]) == len(keys) == len(values)
    assert {queries.stride(-1), keys.stride(-1), values.stride(-1)} == {1}
    n_queries, n_keys = of_queries.diff(), of_keys.diff()
    assert int(n_queries.max()) <= most_queries
    assert int(n_keys.max()) <= most_keys
    one_query_of_several_heads = most_queries == 1 and queries.shape[1] > keys.shape[1]
    assert not (one_query_of_several_heads and (n_queries == 0).any())  # its known fault with empty sequences
    group = queries.shape[1] // keys.shape[1]
    out = torch.full_like(queries, torch.nan)
    for (q0, q1), (k0, k1) in zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True):
        k, v = (part[k0:k1].repeat_interleave(group, 1).double() for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries[q0:q1].double(), k) * softmax_scale
        if causal:  # the last query sees the last key
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(k1 - k0 - (q1 - q0) + 1).bool(), -torch.inf)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v).to(out.dtype)
    return out


@pytest.mark.parametrize("new", [1, 2, 40])
@pytest.mark.parametrize("lengths", [[[0, 1]], [[5, 0], [1, 7]], [[3, 3], [3, 3]]])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kernel", [None, varlen])
def test_pitfall_18_heads_that_hold_nothing_or_one_token(
    lengths: list[list[int]], new: int, padded: bool, kernel: Kernel | None
) -> None:
    own = torch.ones(len(lengths), new, dtype=torch.bool) if padded else None
    if own is not None:
        own[0, : new // 2] = False
    layer, pairs, (query, keys, values) = ragged(lengths, new, 4, own)
    found = attend(layer, query, {"scaling": 0.5}, own, kernel)
    for row in range(len(lengths)):
        real = torch.ones(new, dtype=torch.bool) if own is None else own[row]
        for head in range(2):
            held = pairs[2 * row + head]
            k = torch.cat([held[0], keys[row, head, real]])[None, None]
            v = torch.cat([held[1], values[row, head, real]])[None, None]
            q = query[row, 2 * head : 2 * head + 2, real][None]
            expected, _ = plain_attention(None, q, k, v, None, scaling=0.5)
            torch.testing.assert_close(found[row, real, 2 * head : 2 * head + 2], expected[0], atol=1e-5, rtol=1e-5)
    assert found.isfinite().all()
    assert layer.keys.shape[0] <= sum(map(sum, lengths)) + 2 * len(lengths) * (new + 31)


def test_pitfall_19_storage_is_by_kv_head() -> None:
    model = models.wrap(llama(num_attention_heads=4, num_key_value_heads=1))
    for storage in ("padded", "ragged"):
        with apply(policy("keynorm", reduce="head", storage=storage), model) as run:
            streamed_logits(model, token_ids(30), [30])
        assert (
            run.report().held_bytes == 12 * 3 * 1 * 2 * 8 * 4
        )  # tokens, layers, KV heads, keys and values, d_head, bytes


def test_ragged_attention_with_a_soft_cap_is_refused_by_name() -> None:
    layer, _, (query, *_) = ragged([[2, 3]], 1, 4, None)
    with pytest.raises(ModelRefused, match="softcap"):
        attend(layer, query, {"scaling": 0.5, "softcap": 3.0}, None)


@pytest.mark.parametrize("shape", ["uniform", "ragged"])
def test_pitfall_29_what_is_kept_is_what_never_left(shape: str) -> None:
    model = models.wrap(llama())
    more = {"storage": "ragged", **uneven(model)} if shape == "ragged" else {}
    with apply(policy("epikv", **more), model) as run:
        streamed_logits(model, token_ids(60), [20, 10, *[1] * 30])
    events = run.events()
    for layer, rows in run.report().kept.items():
        for head, kept in enumerate(rows[0]):
            mine = events[events.layer.isin([-1, layer]) & events.kv_head.isin([-1, head])]
            assert sorted([*mine.pos, *kept]) == list(range(60))
            assert all(before < after for before, after in pairwise(kept))
    came = step_of_each([20, 10, *[1] * 30])
    assert (events.step >= [int(came[pos]) for pos in events.pos]).all()
    ends = torch.tensor([20, 30, *range(31, 61)])
    assert (events.tenure == [int(ends[step]) - pos for step, pos in zip(events.step, events.pos, strict=True)]).all()


def test_pitfall_13_importing_the_runtime_changes_nothing_of_transformers() -> None:
    code = """
from transformers import cache_utils, masking_utils, modeling_utils
def table():
    functions = {name: id(value) for name, value in modeling_utils.ALL_ATTENTION_FUNCTIONS.items()}
    masks = {name: id(value) for name, value in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.items()}
    return functions, masks, {name: id(value) for name, value in vars(cache_utils).items()}
before = table()
import kvlens.runtime.apply, kvlens.runtime.saved, kvlens.scorers.table
assert table() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
