"""Captured rows: the model's own eager weights on every family, the same by hooks, every row checked, linear memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import oracles
import pytest
import signal_oracles
import tiny
import torch
from allocations import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from lenses import require_transformer_lens, tiny_lens
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, wrap
from kvlens.probe.lens_rows import NO_SHARE, read_rows_by_hooks
from kvlens.probe.row_block import RowBlock, RowCheck, require_match
from kvlens.probe.rows import choose_queries, read_rows, row_blocks
from kvlens.records import Tokens, Trace

N = 26
TOKENS = tiny.as_tokens(tiny.token_ids(N), 1)
ROWS = 4
FIELDS = [field.name for field in dataclasses.fields(RowBlock)]


@pytest.fixture(params=tiny.ATTENTION_FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def family(name: str) -> Model:
    return wrap(tiny.ATTENTION_FAMILIES[name](), name=name)


def captured(model: Model, tokens: Tokens = TOKENS, **options: Any) -> tuple[list[RowBlock], RowCheck]:
    blocks: list[RowBlock] = []
    check = read_rows(model, tokens, choose_queries(model, tokens, **{"rows_per_head": ROWS} | options), blocks.append)
    return blocks, check


def cached(model: Model, tokens: Tokens) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [kv_head, pos, d_head] of every layer, as the cache of a plain pass holds them."""
    cache = models.new_cache(model)
    with torch.no_grad():
        models.hidden(model, torch.from_numpy(tokens.ids)[None], cache=cache)
    return [(keys[0], values[0]) for keys, values in models.cache_layers(cache)]


# What rows are


def test_rows_are_those_of_the_models_own_eager_attention(name: str) -> None:
    model = family(name)
    blocks, check = captured(model)
    truths = oracles.eager_weights(tiny.ATTENTION_FAMILIES[name], torch.from_numpy(TOKENS.ids))
    assert [block.layer for block in blocks] == [*range(model.n_layers)]
    for block, truth, (keys, values) in zip(blocks, truths, cached(model, TOKENS), strict=True):
        assert block.trace_id == TOKENS.trace.id
        torch.testing.assert_close(block.values, values, atol=2e-5, rtol=0)
        torch.testing.assert_close(block.key_norms, keys.double().norm(dim=-1).float(), atol=2e-5, rtol=0)
        assert sorted(zip(block.heads.tolist(), block.queries.tolist(), strict=True)) == [
            *zip(block.heads.tolist(), block.queries.tolist(), strict=True)
        ]
        assert block.heads.bincount().tolist() == [ROWS] * model.n_heads
        window = model.sliding[block.layer] or N
        for i, (head, query) in enumerate(zip(block.heads.tolist(), block.queries.tolist(), strict=True)):
            row = truth[head, query].astype(np.float64)
            np.testing.assert_allclose(block.weights[i], row, atol=1e-5)
            assert block.kv_heads[i] == head // (model.n_heads // model.n_kv_heads)
            dense = row @ values[block.kv_heads[i]].double().numpy()
            np.testing.assert_allclose(block.dense[i], dense, atol=5e-5)
            seen = range(max(0, query + 1 - window), query + 1)
            assert block.n_keys[i] == len(seen)
            assert not block.weights[i, [key for key in range(N) if key not in seen]].any()
            assert block.sink[i] == pytest.approx(1 - row.sum(), abs=1e-5)
        torch.testing.assert_close(block.weights.sum(-1) + block.sink, torch.ones(len(block.heads)), atol=1e-6, rtol=0)
        assert bool((block.sink > 0).all()) == (name == "gpt_oss")
    assert check.n_rows == model.n_layers * model.n_heads * ROWS


def test_every_row_is_held_against_the_models_own_output(name: str) -> None:
    model = family(name)
    outputs: list[Tensor] = []

    def see(layer: int, own: Any, *_: Any) -> Tensor:
        outputs.append(own())
        return outputs[-1]

    with torch.no_grad(), models.around_attention(model, see):
        models.hidden(model, torch.from_numpy(TOKENS.ids)[None])
    blocks, check = captured(model)
    for block, output in zip(blocks, outputs, strict=True):
        own = output[0, block.queries, block.heads]
        torch.testing.assert_close(block.error, (own - block.dense).abs().amax(-1), atol=1e-6, rtol=0)
        assert 0 < block.allowed < 1e-4
    assert (check.n_off, check.worst <= 1) == (0, True)
    require_match(check, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision_models_are_float32_from_their_own_queries_and_keys(
    name: str, dtype: torch.dtype
) -> None:
    model = wrap(tiny.ATTENTION_FAMILIES[name]().to(dtype), name=name)
    calls: list[tuple[Tensor, Tensor, Tensor, Any]] = []

    def see(layer: int, own: Any, query: Tensor, key: Tensor, value: Tensor, keywords: Any) -> Tensor:
        calls.append((query[0], key[0], value[0], keywords))
        return own()

    with torch.no_grad(), models.around_attention(model, see):
        models.hidden(model, torch.from_numpy(TOKENS.ids)[None])
    blocks, check = captured(model)
    for block, (query, key, value, keywords) in zip(blocks, calls, strict=True):
        sinks = keywords.get("s_aux")
        truth = signal_oracles.weights(
            query.double().numpy(),
            key.double().numpy(),
            scale=keywords["scaling"],
            window=model.sliding[block.layer],
            softcap=keywords.get("softcap"),
            sinks=None if sinks is None else sinks.double().numpy(),
        )
        rows = truth[block.heads, block.queries]
        assert {getattr(block, field).dtype for field in ("weights", "values", "dense", "sink")} == {torch.float32}
        np.testing.assert_allclose(block.weights, rows, atol=1e-6)
        assert torch.equal(block.values, value.float())
        dense = np.einsum("rk,rkd->rd", rows, value.double().numpy()[block.kv_heads])
        np.testing.assert_allclose(block.dense, dense, atol=1e-5)
    assert (check.n_off, check.n_rows) == (0, model.n_layers * model.n_heads * ROWS)


def test_a_backend_that_leaves_the_soft_cap_out_is_counted_and_refused() -> None:
    """As transformers' sdpa did for Gemma2 up to 5.23."""

    def capless(*args: Any, **keywords: Any) -> Any:
        return tiny.plain_attention(*args, **keywords | {"softcap": None})

    model = dataclasses.replace(family("gemma2"), attention="sdpa")
    with models.attention_override(model, capless):
        _, check = captured(model)
    assert check.n_off > check.n_rows // 2
    assert check.worst > 100
    with pytest.raises(ModelRefused, match=rf"gemma2: {check.n_off} of {check.n_rows} .*sdpa.*layer") as caught:
        require_match(check, model)
    assert "eager" in caught.value.hint


def test_checks_add_up_and_keep_the_worst() -> None:
    one, two = RowCheck(10, 1, 1.5, 3), RowCheck(5, 0, 0.5, 4)
    assert one + two == two + one == RowCheck(15, 1, 1.5, 3)
    assert RowCheck() + two == two


@pytest.mark.parametrize("name", tiny.ATTENTION_FAMILIES)
def test_hooks_give_the_same_rows(name: str) -> None:
    require_transformer_lens()
    lens = tiny_lens(name)
    ours, _ = captured(lens.model)
    theirs: list[RowBlock] = []
    check = read_rows_by_hooks(lens, TOKENS, choose_queries(lens.model, TOKENS, rows_per_head=ROWS), theirs.append)
    assert len(ours) == len(theirs) == lens.model.n_layers
    for a, b in zip(ours, theirs, strict=True):
        for field in FIELDS:
            if isinstance(getattr(a, field), Tensor) and field != "error":
                tolerance = NO_SHARE if field == "sink" else 3e-5
                torch.testing.assert_close(getattr(a, field), getattr(b, field), atol=tolerance, rtol=0)
    assert (check.n_off, check.n_rows) == (0, lens.model.n_layers * lens.model.n_heads * ROWS)


def test_hooks_in_half_precision_are_refused() -> None:
    require_transformer_lens()
    lens = tiny_lens("llama")
    half = dataclasses.replace(lens, model=wrap(tiny.llama().bfloat16()))
    with pytest.raises(InputError, match="bfloat16"):
        read_rows_by_hooks(half, TOKENS, choose_queries(half.model, TOKENS), lambda _: None)


def test_rows_are_read_again_from_their_indices_bit_for_bit() -> None:
    model = family("qwen3")
    first, _ = captured(model, seed=5)
    shape = (model.n_heads, ROWS)
    group = model.n_heads // model.n_kv_heads
    queries = np.stack([block.queries.reshape(shape)[::group].numpy() for block in first])
    again: list[RowBlock] = []
    read_rows(model, TOKENS, queries, again.append)
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(getattr(a, field), getattr(b, field)) for field in ("queries", "weights", "dense"))


def test_reading_rows_leaves_the_model_as_it_was_also_after_an_exception() -> None:
    model = family("llama")
    ids = torch.from_numpy(TOKENS.ids)[None]
    before = models.logits(model, ids)

    def broken(block: RowBlock) -> None:
        raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"):
        read_rows(model, TOKENS, choose_queries(model, TOKENS), broken)
    assert torch.equal(models.logits(model, ids), before)


def test_blocks_are_ordinary_tensors_without_gradient() -> None:
    (block, *_), _ = captured(family("llama"))
    block.weights.div_(block.weights.sum(-1, keepdim=True))  # inference tensors refuse this
    assert not block.weights.requires_grad


def test_the_generator_gives_trace_after_trace_layer_after_layer() -> None:
    model = family("llama")
    other = dataclasses.replace(tiny.as_tokens(tiny.token_ids(15, seed=1), 1), trace=Trace("other"))
    found = [*row_blocks(model, [TOKENS, other], rows_per_head=2, seed=3)]
    layers = range(model.n_layers)
    assert [(b.trace_id, b.layer) for b in found] == [(t, layer) for t in ("tiny", "other") for layer in layers]
    alone, _ = captured(model, other, rows_per_head=2, seed=3)
    for a, b in zip(found[model.n_layers :], alone, strict=True):
        assert torch.equal(a.weights, b.weights)


# Which rows


@given(
    n_tokens=st.integers(1, 60),
    rows_per_head=st.integers(1, 9),
    least_keys=st.integers(1, 12),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_one_query_in_each_stretch(n_tokens: int, rows_per_head: int, least_keys: int, seed: int) -> None:
    tokens = tiny.as_tokens(np.arange(n_tokens), 0)
    room = n_tokens - least_keys + 1
    if room < rows_per_head:
        with pytest.raises(InputError, match="rows a head were asked for"):
            choose_queries(LLAMA, tokens, rows_per_head=rows_per_head, least_keys=least_keys, seed=seed)
        return
    found = choose_queries(LLAMA, tokens, rows_per_head=rows_per_head, least_keys=least_keys, seed=seed)
    assert found.shape == (LLAMA.n_layers, LLAMA.n_kv_heads, rows_per_head)
    for i in range(rows_per_head):
        low, high = (least_keys - 1 + j * room // rows_per_head for j in (i, i + 1))
        assert low <= found[..., i].min() <= found[..., i].max() < high


LLAMA = wrap(tiny.llama())


def test_every_position_of_a_stretch_is_drawn_about_equally_often() -> None:
    tokens = tiny.as_tokens(np.arange(21), 0)
    draws = np.concatenate([choose_queries(LLAMA, tokens, rows_per_head=2, seed=i).ravel() for i in range(200)])
    counts = np.bincount(draws, minlength=21)  # 1,200 draws over 10 positions and as many over 11
    np.testing.assert_allclose(counts, [120] * 10 + [1200 / 11] * 11, atol=45)


def test_the_draw_depends_on_seed_trace_and_layer_alone() -> None:
    tokens = tiny.as_tokens(np.arange(200), 0)
    other = dataclasses.replace(tokens, trace=Trace("other"))
    drawn = choose_queries(LLAMA, tokens, seed=1)
    assert np.array_equal(drawn, choose_queries(LLAMA, tokens, seed=1))
    assert not np.array_equal(drawn, choose_queries(LLAMA, tokens, seed=2))
    assert not np.array_equal(drawn, choose_queries(LLAMA, other, seed=1))
    assert len({rows.tobytes() for rows in drawn}) == LLAMA.n_layers
    assert len({rows.tobytes() for rows in drawn[0]}) == LLAMA.n_kv_heads
    deeper = wrap(tiny.llama(num_hidden_layers=5))
    assert np.array_equal(choose_queries(deeper, tokens, seed=1)[:3], drawn)


# What is refused


@pytest.mark.parametrize(
    ("n_tokens", "options", "message"),
    [
        (0, {}, "no tokens"),
        (5, {}, "6 rows a head were asked for, and 5 of its 5 tokens"),
        (30, {"least_keys": 31}, "0 of its 30 tokens see 31 keys"),
        (30, {"rows_per_head": 0}, "0 rows a head"),
        (30, {"rows_per_head": -3}, "-3 rows a head"),
        (30, {"rows_per_head": 31}, "31 rows a head were asked for, and 30"),
        (30, {"least_keys": 0}, "see 0 keys"),
    ],
)
def test_rows_that_cannot_be_had_are_refused_before_the_model_runs(
    monkeypatch: pytest.MonkeyPatch, n_tokens: int, options: dict[str, int], message: str
) -> None:
    tokens = tiny.as_tokens(np.arange(n_tokens) % 90, 0)
    monkeypatch.delattr(models, "hidden")
    with pytest.raises(InputError, match=message) as caught:
        next(row_blocks(LLAMA, [tokens], **options))
    assert "'tiny'" in str(caught.value)
    assert caught.value.hint


def test_no_trace_is_refused() -> None:
    with pytest.raises(InputError, match="no trace"):
        next(row_blocks(LLAMA, []))


def test_a_sliding_window_narrower_than_the_keys_asked_for_is_refused() -> None:
    with pytest.raises(InputError, match=f"9 keys were asked for, .* window of {tiny.WINDOW} "):
        choose_queries(family("gemma3"), TOKENS, least_keys=9)
    choose_queries(family("gemma3"), TOKENS, least_keys=8)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (np.zeros((2, 2, 1), dtype=np.int64), "3 layers of 2 key heads"),
        (np.zeros((3, 4, 1), dtype=np.int64), "3 layers of 2 key heads"),
        (np.zeros((3, 2, 0), dtype=np.int64), "queries of shape"),
        (np.full((3, 2, 1), N), f"queries {N} to {N}"),
        (np.full((3, 2, 1), -1), "queries -1 to -1"),
    ],
)
def test_queries_that_do_not_fit_are_refused(queries: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(LLAMA, TOKENS, queries, lambda _: None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_output_that_is_not_finite_is_refused_by_its_layer(bad: float) -> None:
    model = wrap(tiny.llama())
    model.layers[1].v_proj.weight.data[:] = bad
    with pytest.raises(ModelRefused, match="attention in layer 1 holds NaN"):
        captured(model)


def test_states_that_end_in_nan_are_refused_where_no_chosen_row_shows_it() -> None:
    model = wrap(tiny.llama())
    model.hf.model.norm.weight.data[:] = torch.nan
    with pytest.raises(ModelRefused, match="hidden states hold NaN"):
        captured(model)


# Memory


def test_memory_is_linear_in_the_trace() -> None:
    """All weights of one layer would be 8 * 6,000 * 6,000 * 4 bytes = 1.2 GB."""
    model = wrap(tiny.llama(num_hidden_layers=1, num_attention_heads=8, max_position_embeddings=8192))
    peaks = {}
    for n in (3000, 6000):
        tokens = tiny.as_tokens(tiny.token_ids(n), 1)
        queries = choose_queries(model, tokens)
        peaks[n] = peak_bytes(lambda t=tokens, q=queries: read_rows(model, t, q, lambda _: None))
    assert 1e6 < peaks[6000] < 2.1 * peaks[3000] < 2e8


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_a_block_keeps_nothing_alive_but_itself(name: str) -> None:
    """Phi3 and GPT-2 cut queries, keys and values from one tensor, whose views would keep it all."""
    for block in captured(family(name))[0]:
        for field in FIELDS:
            tensor = getattr(block, field)
            if isinstance(tensor, Tensor):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, field


@pytest.mark.gpu
@pytest.mark.parametrize("name", tiny.ATTENTION_FAMILIES)
def test_a_gpu_gives_the_same_rows(name: str) -> None:
    here, _ = captured(family(name))
    there, check = captured(wrap(tiny.ATTENTION_FAMILIES[name]().cuda(), name=name))
    assert (check.n_off, len(there)) == (0, len(here))
    for a, b in zip(here, there, strict=True):
        for field in ("heads", "queries", "weights", "values", "dense", "sink", "key_norms", "n_keys"):
            assert getattr(b, field).is_cuda
            torch.testing.assert_close(getattr(b, field).cpu(), getattr(a, field), atol=1e-3, rtol=1e-3)


@pytest.mark.real
def test_rows_of_the_default_model_are_its_own(smollm2: Model) -> None:
    text = "The red box is under the table. The blue box is on the shelf. " * 12
    tokens = tiny.as_tokens(smollm2.tokenizer(text)["input_ids"], 4)
    blocks, check = captured(smollm2, tokens, rows_per_head=6)
    assert (check.n_rows, check.n_off) == (30 * 9 * 6, 0)
    for block in (blocks[0], blocks[17], blocks[29]):
        mixed = torch.einsum("rk,rkd->rd", block.weights.double(), block.values.double()[block.kv_heads])
        torch.testing.assert_close(mixed, block.dense.double(), atol=1e-5, rtol=0)
