"""With whose cache does a run go on? With what it can go on with rightly; all else is refused before it attends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from eviction import (
    cache_keyword,
    masked_logits,
    policy,
    settled,
    step_of_each,
    streamed_logits,
    uneven,
)
from tiny import llama, token_ids
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model
from kvlens.runtime.apply import apply

IDS = token_ids(40)
SHAPES = list(permutations(["all", "layer", "head", "padded", "capped", "ragged"], 2))


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def shapes(model: Model) -> dict[str, dict[str, Any]]:
    """Ways to keep tokens together, those further down further apart."""
    apart = uneven(model)
    return {
        "all": {"reduce": "all"},
        "layer": {"reduce": "layer"},
        "head": {"reduce": "head"},
        "padded": apart | {"storage": "padded"},
        "capped": apart | {"storage": "uniform_cap"},
        "ragged": apart | {"storage": "ragged"},
    }


def may_follow(first: str, second: str) -> bool:
    """Whether a policy of the second shape can go on with a cache of the first."""
    apart = {"all": 0, "layer": 1}
    return apart.get(second, 2) >= apart.get(first, 2) and first != "ragged"


@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_a_policy_of_another_shape_goes_on_rightly_or_says_so(
    model: Model, first: str, second: str, tmp_path: Path
) -> None:
    file = tmp_path / "cache.safetensors"
    cache = models.new_cache(model)
    with apply(policy(**shapes(model)[first]), model) as begun:
        logits = [streamed_logits(model, IDS[:, :20], [20], cache)]
        begun.save(file)
    if not may_follow(first, second):
        with pytest.raises(InputError, match="was kept by"), apply(policy(**shapes(model)[second]), model):
            streamed_logits(model, IDS[:, 20:21], [1], cache)
        with pytest.raises(InputError, match="was kept by"), apply(policy(**shapes(model)[second]), model) as run:
            run.load(file)
        return
    with apply(policy(**shapes(model)[second]), model) as run:
        logits.append(streamed_logits(model, IDS[:, 20:30], [1] * 10, cache))
    with apply(policy(**shapes(model)[second]), model) as again:
        assert torch.equal(streamed_logits(model, IDS[:, 20:30], [1] * 10, again.load(file)), logits[1])
    events = pd.concat([begun.events(), run.events()])
    expected = masked_logits(model, IDS[0, :30], events, step_of_each([20, *[1] * 10]))
    torch.testing.assert_close(torch.cat(logits, 1)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"num_key_value_heads": 4}])
def test_a_cache_of_another_model_is_refused(model: Model, changes: dict[str, int], active: bool) -> None:
    other, cache = models.wrap(llama(**changes)), models.new_cache(model)
    with ExitStack() as stack:
        stack.enter_context(apply(policy(), model))
        streamed_logits(model, IDS[:, :20], [20], cache)
        if not active:
            stack.close()
        stack.enter_context(apply(policy(), other))
        with pytest.raises(InputError, match="another model"):
            streamed_logits(other, IDS[:, 20:21], [1], cache)


@pytest.mark.parametrize("trigger", ["step", "prefill"])
@pytest.mark.parametrize("before", [8, 20])
def test_tokens_that_came_outside_are_no_secret(model: Model, trigger: str, before: int) -> None:
    cache = models.new_cache(model)
    with apply(policy(trigger=trigger), model):
        streamed_logits(model, IDS[:, :before], [before], cache)
    streamed_logits(model, IDS[:, 20:22], [1, 1], cache)
    with pytest.raises(InputError, match="outside"), apply(policy(trigger=trigger), model):
        streamed_logits(model, IDS[:, 22:23], [1], cache)


def interrupted(model: Model, cache: Any, layer: int, error: type[BaseException]) -> None:
    """A forward pass of one token that ends in front of this layer."""

    def stop(*_: Any) -> None:
        raise error

    handle = model.layers[layer].register_forward_pre_hook(stop)
    try:
        with pytest.raises(error):
            streamed_logits(model, IDS[:, 20:21], [1], cache)
    finally:
        handle.remove()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("n_before", [0, 8, 20])
def test_a_pass_that_was_stopped_leaves_no_cache(
    model: Model, n_before: int, layer: int, error: type[BaseException], tmp_path: Path
) -> None:
    caches = [models.new_cache(model) for _ in range(2)]
    with apply(policy(), model) as run:
        for cache in caches:
            if n_before:
                streamed_logits(model, IDS[:, :n_before], [n_before], cache)
            interrupted(model, cache, layer, error)
        with pytest.raises(InputError, match="not whole"):
            run.save(tmp_path / "cache.safetensors")
        if n_before == 0:
            with pytest.raises(InputError, match="ended well"):
                run.report()
        run.events()
        with pytest.raises(InputError, match="half-way"):
            streamed_logits(model, IDS[:, 21:22], [1], caches[0])
    for where in (ExitStack(), apply(policy(), model)):
        with pytest.raises(InputError, match="half-way"), where:
            streamed_logits(model, IDS[:, 21:22], [1], caches[1])
    with apply(policy(), model) as run:
        assert streamed_logits(model, IDS, [20, *[1] * 20]).isfinite().all()
        assert run.report().n_evicted == 28


def test_a_pass_through_some_of_the_layers_is_noticed() -> None:
    hf = llama()
    with pytest.raises(InputError, match="some of the layers"), apply(policy(), hf):
        hf.generate(IDS, assistant_early_exit=1, max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("scorer", ["random", "h2o", "kvzip", "surprise_fast"])
def test_threads_with_caches_of_their_own_do_not_mix(
    model: Model, scorer: str, many_switches: Callable[[], None]
) -> None:
    chosen = policy(scorer, **settled(scorer, shapes(model)["ragged"]))
    texts = [token_ids(40, seed=seed) for seed in range(3)]

    def go(ids: torch.Tensor) -> torch.Tensor:
        return streamed_logits(model, ids, [20, *[1] * 10])

    with apply(chosen, model) as alone:
        expected = [go(ids) for ids in texts]
    many_switches()
    with apply(chosen, model) as together, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(go, texts))
    assert all(map(torch.equal, found, expected))
    assert together.report().n_evicted == alone.report().n_evicted


@pytest.fixture
def many_switches() -> Any:
    """A function after which threads give way to one another all the time."""
    former = sys.getswitchinterval()
    yield lambda: sys.setswitchinterval(1e-5)
    sys.setswitchinterval(former)


def test_two_threads_in_one_cache_are_told(model: Model) -> None:
    cache = models.new_cache(model)
    with apply(policy(), model):
        streamed_logits(model, IDS[:, :20], [20], cache)

        def meanwhile(*_: Any) -> None:
            with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="another thread"):
                pool.submit(streamed_logits, model, IDS[:, 30:31], [1], cache).result()

        handle = model.layers[1].register_forward_pre_hook(meanwhile)
        try:
            found = streamed_logits(model, IDS[:, 20:21], [1], cache)
        finally:
            handle.remove()
    with apply(policy(), model):
        assert torch.equal(found, streamed_logits(model, IDS[:, :21], [20, 1])[:, 20:])


@pytest.mark.parametrize("shape", ["all", "ragged"])
@pytest.mark.parametrize("tokens", [12, 100])
def test_a_cache_made_under_inference_mode_goes_on_outside_it(model: Model, shape: str, tokens: int) -> None:
    settings = shapes(model)[shape] | ({"tokens": tokens} if shape == "all" else {})
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        cache = models.new_cache(model)
        with apply(policy("h2o", **settings), model):
            with mode():
                begun = streamed_logits(model, IDS[:, :24], [20, 1, 1, 1, 1], cache)
            found.append(torch.cat([begun, streamed_logits(model, IDS[:, 24:], [1] * 8 + [8], cache)], 1))
    assert torch.equal(*found)


def test_masks_by_kind_of_layer_are_refused(model: Model) -> None:
    with pytest.raises(InputError, match="full_attention"), apply(policy(), model), torch.no_grad():
        model.decoder(input_ids=IDS, attention_mask={"full_attention": None}, use_cache=True)


def test_a_cache_without_layers_is_refused_by_name(model: Model) -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(ModelRefused, match="EncoderDecoderCache"), apply(policy(), model), torch.no_grad():
        model.decoder(input_ids=IDS, use_cache=True, **{cache_keyword(model): cache})


@pytest.mark.parametrize("shape", ["all", "head", "ragged"])
def test_a_mask_that_hides_what_was_seen_is_refused_once_tokens_have_left(model: Model, shape: str) -> None:
    begun, ids = torch.ones(2, 30, dtype=torch.long), token_ids(33).expand(2, -1).clone()
    begun[1, :7] = 0  # padding

    def go(mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        new = ids[:, mask.shape[1] - 1 : mask.shape[1]] if cache.get_seq_length() else ids[:, :30]
        output = model.hf(new, attention_mask=mask, use_cache=True, **{cache_keyword(model): cache})
        return torch.as_tensor(output.logits)

    with apply(policy("keynorm", **shapes(model)[shape]), model), torch.no_grad():
        cache = DynamicCache(config=model.hf.config)
        go(begun, cache)
        one, two = (torch.cat([begun, torch.ones(2, n, dtype=torch.long)], 1) for n in (1, 2))
        assert go(one, cache).isfinite().all()
        for row, pos in ((0, 3), (1, 20), (1, 3)):
            changed = two.clone()
            changed[row, pos] = 1 - changed[row, pos]
            with pytest.raises(InputError, match="cannot hide what it was not told"):
                go(changed, cache)
        assert go(two, cache).isfinite().all()  # nothing was touched


@pytest.mark.parametrize("tokens", [12, 500])
def test_a_call_of_other_rows_than_its_cache_is_refused(model: Model, tokens: int) -> None:
    for before, after in ((1, 2), (2, 1)):
        cache = DynamicCache(config=model.hf.config)
        with apply(policy("keynorm", tokens=tokens), model), torch.no_grad():
            model.hf(IDS.expand(before, -1), use_cache=True, **{cache_keyword(model): cache})
            with pytest.raises(InputError, match=f"holds {before} rows, and the call brings {after}"):
                model.hf(IDS[:, :1].expand(after, -1), use_cache=True, **{cache_keyword(model): cache})


def test_what_a_call_gives_by_place_is_heard_as_by_name(model: Model) -> None:
    own = torch.ones_like(IDS)
    own[0, :9] = 0
    found = []
    for by_place in (False, True):
        cache = DynamicCache(config=model.hf.config)
        with apply(policy("keynorm"), model) as run, torch.no_grad():
            more = {cache_keyword(model): cache}
            if by_place:
                model.decoder(IDS, own, None, cache)
            else:
                model.decoder(input_ids=IDS, attention_mask=own, use_cache=True, **more)
            assert run.cache is cache
            found.append(run.report().kept)
    assert found[0] == found[1]
    assert max(found[0][0][0][0]) == 30  # nine were padding
