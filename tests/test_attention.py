"""Caches, masks and overrides on every family, each against attention written out or a full forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import FAMILIES, WINDOW, gemma3, llama, mistral, plain_attention, token_ids
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlens.attention import check_mask
from kvlens.backends import own_backend
from kvlens.errors import InputError, ModelRefused
from kvlens.model import (
    Model,
    around_attention,
    attention_modules,
    attention_override,
    blocks,
    cache_from,
    cache_layers,
    hidden,
    layer_masks,
    logits,
    new_cache,
    private_cache,
    wrap,
)

N = 26
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Model:
    return wrap(FAMILIES[request.param]())


def backend_state(model: Model) -> tuple[list[str], list[str]]:
    configs = {id(module.config): module.config for module in model.hf.modules() if hasattr(module, "config")}
    return [str(config._attn_implementation) for config in configs.values()], sorted(ALL_ATTENTION_FUNCTIONS)


def causal(n_query: int, n_key: int) -> Tensor:
    return torch.ones(n_key, n_key, dtype=torch.bool).tril()[None, None, n_key - n_query :]


def masked_plain(rule: Callable[[int], Tensor], model: Model) -> Callable[..., Any]:
    """Attention written out where layer i sees what `rule(i)` shows, its own window on top."""
    index = {id(module): i for i, module in enumerate(attention_modules(model))}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **extra: Any) -> Any:
        visible = rule(index[id(module)])
        window = extra.get("sliding_window")
        if window is not None:
            distance = torch.arange(key.shape[2])[:, None] - torch.arange(key.shape[2])[None]
            visible = visible & (distance < window)
        term = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -1e30)
        return plain_attention(module, query, key, value, term, **extra)

    return attend


def test_override_that_reimplements_the_backend_changes_nothing(family: Model) -> None:
    ids = token_ids(N, batch=2)
    truth = family.hf(input_ids=ids).logits
    with attention_override(family, plain_attention):
        ours = logits(family, ids)
        cache = new_cache(family)
        pieces = [logits(family, piece, cache=cache) for piece in ids.split([15, 10, 1], dim=1)]
    torch.testing.assert_close(ours, truth, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.cat(pieces, 1), truth, atol=TOLERANCE, rtol=0)


def test_override_is_called_once_per_layer_in_order_and_gets_no_mask(family: Model) -> None:
    seen: list[tuple[Any, Tensor | None]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **extra: Any) -> Any:
        seen.append((module, mask))
        return plain_attention(module, query, key, value, mask, **extra)

    with attention_override(family, spy):
        hidden(family, token_ids(N))
    assert [module for module, _ in seen] == attention_modules(family)
    assert all(mask is None for _, mask in seen)


def test_override_without_the_window_differs_only_where_layers_slide(family: Model) -> None:
    def windowless(*args: Any, **extra: Any) -> Any:
        return plain_attention(*args, **extra | {"sliding_window": None})

    ids = token_ids(N)
    plain = family.hf(input_ids=ids).logits
    with attention_override(family, windowless):
        moved = (logits(family, ids) - plain).abs().max() > 0.01
    assert bool(moved) == any(family.sliding)


def test_override_is_gone_after_exit_and_after_an_exception(family: Model) -> None:
    ids = token_ids(N)
    before, state = logits(family, ids), backend_state(family)

    def broken(*args: Any, **extra: Any) -> Any:
        raise RuntimeError("from inside the layer")

    with attention_override(family, plain_attention):
        assert backend_state(family) != state
    assert backend_state(family) == state
    with pytest.raises(RuntimeError, match="from inside the layer"), attention_override(family, broken):
        logits(family, ids)
    assert backend_state(family) == state
    assert torch.equal(logits(family, ids), before)


def test_overrides_nest_and_leave_other_models_alone() -> None:
    model, other = wrap(llama()), wrap(llama())
    ids, calls = token_ids(8), []

    def named(name: str) -> Callable[..., Any]:
        def attend(*args: Any, **extra: Any) -> Any:
            calls.append(name)
            return plain_attention(*args, **extra)

        return attend

    with attention_override(model, named("outer")):
        with attention_override(model, named("inner")):
            logits(model, ids)
        logits(model, ids)
        logits(other, ids)
    assert calls == ["inner"] * model.n_layers + ["outer"] * model.n_layers


def pass_on(layer: int, own: Callable[[], Tensor], *_: Any) -> Tensor:
    return own()


def test_a_function_around_attention_that_passes_it_on_changes_not_a_bit(family: Model) -> None:
    ids = token_ids(N, batch=2)
    seen: list[int] = []

    def see(layer: int, own: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, keywords: Any) -> Tensor:
        seen.append(layer)
        output = own()
        assert output.shape == (2, N, family.n_heads, family.d_head)
        assert key.shape == value.shape == (2, family.n_kv_heads, N, family.d_head)
        truth, _ = plain_attention(None, query, key, value, None, sliding_window=family.sliding[layer], **{
            name: keywords[name] for name in ("scaling", "softcap") if name in keywords
        })  # fmt: skip
        torch.testing.assert_close(output, truth, atol=TOLERANCE, rtol=0)
        return output

    truth = family.hf(input_ids=ids).logits
    with around_attention(family, see):
        assert torch.equal(family.hf(input_ids=ids).logits, truth)
        assert torch.equal(family.hf(input_ids=ids, use_cache=False).logits, truth)
    assert seen == [*range(family.n_layers)] * 2


def test_what_a_function_around_attention_puts_out_is_what_the_layer_puts_out(family: Model) -> None:
    def rolled_in_the_first(layer: int, own: Callable[[], Tensor], *_: Any) -> Tensor:
        return own().roll(int(layer == 0), -1)  # not scaled: two families normalise what comes out

    def rolled(module: Any, *args: Any, **extra: Any) -> Any:
        output, _ = plain_attention(module, *args, **extra)
        return output.roll(int(module is family.layers[0]), -1), None

    ids = token_ids(N)
    with around_attention(family, rolled_in_the_first):
        ours = logits(family, ids)
    with attention_override(family, rolled):
        truth = logits(family, ids)
    torch.testing.assert_close(ours, truth, atol=TOLERANCE, rtol=0)
    assert (logits(family, ids) - truth).abs().max() > 0.01


def test_a_function_around_attention_is_gone_after_exit_and_after_an_exception(family: Model) -> None:
    configs, functions = [module.config for module in family.layers], set(ALL_ATTENTION_FUNCTIONS)
    state = backend_state(family)

    def broken(*_: Any) -> Tensor:
        raise RuntimeError("from inside the layer")

    with around_attention(family, pass_on):
        assert family.decoder.config._attn_implementation == family.attention  # masks are built as always
    with pytest.raises(RuntimeError, match="from inside the layer"), around_attention(family, broken):
        logits(family, token_ids(N))
    assert all(module.config is config for module, config in zip(family.layers, configs, strict=True))
    assert (backend_state(family), set(ALL_ATTENTION_FUNCTIONS)) == (state, functions)


def test_around_an_override_the_override_is_the_layers_own() -> None:
    model = wrap(llama())

    def nothing(module: Any, query: Tensor, *_: Any, **__: Any) -> Any:
        return torch.zeros_like(query).transpose(1, 2), None

    seen: list[Tensor] = []

    def see(layer: int, own: Callable[[], Tensor], *_: Any) -> Tensor:
        seen.append(own())
        return seen[-1]

    with attention_override(model, nothing), around_attention(model, see):
        logits(model, token_ids(N))
    assert [bool(output.any()) for output in seen] == [False] * model.n_layers


def test_an_attention_block_whose_backend_is_unknown_is_refused_by_name() -> None:
    class StrangeAttention(torch.nn.Module):
        def __init__(self, backend: str) -> None:
            super().__init__()
            self.config = llama().config
            self.config._attn_implementation = backend

    for backend in ("eager", "no_such_backend"):  # the first: this test's module writes no eager attention
        with pytest.raises(ModelRefused, match=f"StrangeAttention: .* '{backend}'"):
            own_backend(StrangeAttention(backend))


def test_private_cache_returns_new_states_stores_nothing_and_counts_positions(family: Model) -> None:
    ids = token_ids(N, batch=2)
    prefix = new_cache(family)
    logits(family, ids[:, :16], cache=prefix)
    kept = dict(zip(map(id, attention_modules(family)), cache_layers(prefix), strict=True))
    shapes: set[int] = set()

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **extra: Any) -> Any:
        shapes.add(key.shape[2])
        keys, values = kept[id(module)]
        return plain_attention(module, query, torch.cat([keys, key], 2), torch.cat([values, value], 2), mask, **extra)

    cache = private_cache(family, 16)
    assert cache.get_seq_length() == 16
    with attention_override(family, attend):
        by_length = logits(family, ids[:, 16:], cache=cache)
        by_position = logits(family, ids[:, 16:], cache=cache, positions=torch.arange(16, N))
    assert shapes == {N - 16}
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)
    assert cache.get_seq_length() == 16
    truth = family.hf(input_ids=ids).logits[:, 16:]
    torch.testing.assert_close(by_length, truth, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(by_position, truth, atol=TOLERANCE, rtol=0)


def test_private_cache_of_nothing_is_a_first_pass(family: Model) -> None:
    ids = token_ids(N)
    torch.testing.assert_close(
        logits(family, ids, cache=private_cache(family, 0)), logits(family, ids), atol=TOLERANCE, rtol=0
    )


def test_new_cache_keeps_every_row_in_sliding_layers_too(family: Model) -> None:
    ids, cache = token_ids(N, batch=2), new_cache(family)
    pieces = [logits(family, piece, cache=cache) for piece in ids.split([15, 10, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), family.hf(input_ids=ids).logits, atol=TOLERANCE, rtol=0)
    for keys, values in cache_layers(cache):
        assert keys.shape == values.shape == (2, family.n_kv_heads, N, family.d_head)


def test_cache_from_shares_memory_until_appended_to(family: Model) -> None:
    ids, cache = token_ids(N), new_cache(family)
    logits(family, ids[:, :20], cache=cache)
    rows = cache_layers(cache)
    saved = [(keys.clone(), values.clone()) for keys, values in rows]
    copy = cache_from(family, rows)
    assert all(a.data_ptr() == b.data_ptr() for (a, _), (b, _) in zip(cache_layers(copy), rows, strict=True))
    first = logits(family, ids[:, 20:], cache=copy)
    assert copy.get_seq_length() == N
    torch.testing.assert_close(first, logits(family, ids, last=N - 20), atol=TOLERANCE, rtol=0)
    for (keys, values), (old_keys, old_values) in zip(cache_layers(cache), saved, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


def test_caches_are_refused_by_what_is_wrong_with_them() -> None:
    model = wrap(llama())
    with pytest.raises(InputError, match="holds no keys"):
        cache_layers(new_cache(model))
    with pytest.raises(InputError, match="model has 3"):
        cache_from(model, [])


def test_an_empty_cache_is_falsy_and_used_all_the_same(family: Model) -> None:
    assert not DynamicCache()
    cache = new_cache(family)
    logits(family, token_ids(5), cache=cache)
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("per_head", [False, True])
def test_layer_masks_hide_keys_in_the_named_layers_only(family: Model, per_head: bool) -> None:
    ids = token_ids(N, batch=2)
    full = causal(N, N)
    cut = full.expand(1, family.n_heads if per_head else 1, N, N).clone()
    cut[:, -1, -6:, 18] = False
    layer = family.n_layers - 2
    before = logits(family, ids)
    with layer_masks(family, {layer: cut}):
        ours = logits(family, ids)
    with attention_override(family, masked_plain(lambda i: cut if i == layer else full, family)):
        truth = logits(family, ids)
    torch.testing.assert_close(ours, truth, atol=TOLERANCE, rtol=0)
    assert (ours - before)[:, -6:].abs().max() > 0.005
    assert torch.equal(logits(family, ids), before)


def test_layer_masks_win_over_the_calls_own_mask_and_leave_after_an_exception(family: Model) -> None:
    ids = token_ids(N)
    full, cut = causal(N, N), causal(N, N)
    cut[..., -6:, 18] = False
    before = logits(family, ids)
    with layer_masks(family, dict.fromkeys(range(family.n_layers), full)):
        assert torch.allclose(logits(family, ids, mask=cut), before, atol=TOLERANCE)
    with pytest.raises(KeyError), layer_masks(family, {0: cut}):
        raise KeyError("from inside")
    assert torch.equal(logits(family, ids), before)


def test_layer_masks_over_a_cache_take_positions(family: Model) -> None:
    ids, cache = token_ids(N), new_cache(family)
    logits(family, ids[:, :20], cache=cache)
    kept = [pos for pos in range(20) if pos not in (17, 18)]
    short = cache_from(family, [(keys[:, :, kept], values[:, :, kept]) for keys, values in cache_layers(cache)])
    positions = torch.arange(20, N)[None]
    key_positions = torch.tensor([[*kept, *range(20, N)]])
    mask = positions[:, None, :, None] >= key_positions[:, None, None, :]
    with layer_masks(
        family, dict.fromkeys(range(family.n_layers), mask), positions=positions, key_positions=key_positions
    ):
        deleted = logits(family, ids[:, 20:], cache=short, positions=positions)
    hide = causal(N, N)
    hide[..., 20:, [17, 18]] = False
    torch.testing.assert_close(deleted, logits(family, ids, mask=hide)[:, 20:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("build", [gemma3, mistral])
def test_a_key_outside_the_window_is_hidden_already(build: Callable[[], Any]) -> None:
    """Masked or not, alone it changes nothing in a sliding layer: the last row of one layer's own attention."""
    model = wrap(build())
    ids = token_ids(N)
    cut = causal(N, N)
    cut[..., -1, N - 1 - WINDOW] = False
    sliding = {i: cut for i, window in enumerate(model.sliding) if window}
    with layer_masks(model, sliding):
        assert torch.allclose(logits(model, ids), logits(wrap(build()), ids), atol=1e-6)
    cut[..., -1, N - WINDOW] = False  # the oldest key inside
    with layer_masks(model, sliding):
        assert (logits(model, ids) - logits(wrap(build()), ids)).abs().max() > 0.01


def test_masks_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(InputError, match="float32"):
        check_mask(torch.zeros(1, 1, 6, 6))
    with pytest.raises(InputError, match=r"\(6, 6\)"):
        check_mask(causal(6, 6)[0, 0])
    with pytest.raises(InputError, match="must cover the new ones"):
        logits(wrap(mistral()), token_ids(6), mask=causal(6, 6)[..., :4])


def test_a_backend_that_ignores_masks_is_refused_by_name() -> None:
    model = dataclasses.replace(wrap(llama()), attention="flash_attention_2")
    with pytest.raises(ModelRefused, match="flash_attention_2"):
        logits(model, token_ids(6), mask=causal(6, 6))
    with pytest.raises(ModelRefused, match="flash_attention_2"), layer_masks(model, {0: causal(6, 6)}):
        pass
    with attention_override(model, plain_attention):  # the override honours it
        logits(model, token_ids(6), mask=causal(6, 6))


def test_blocks_hold_their_attention_modules(family: Model) -> None:
    stack = blocks(family)
    assert len(stack) == family.n_layers
    for block, module in zip(stack, attention_modules(family), strict=True):
        assert module in block.modules()
