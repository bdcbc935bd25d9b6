"""An ordinary `generate` under a policy: positions, chunks, batches, stops, and all as before once it is gone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from eviction import (
    MANAGED,
    cache_keyword,
    masked_logits,
    padded,
    policy,
    refuses,
    same_logits,
    settled,
    step_of_each,
    uneven,
    written,
)
from tiny import FAMILIES, llama, mistral, token_ids
from transformers import TextStreamer
from transformers.cache_utils import DynamicCache, StaticCache

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model
from kvlens.runtime.apply import apply
from kvlens.scorers.table import TABLE


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def hooks(model: Model) -> list[int]:
    """How many hooks each module of the model carries."""
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()]


# The identity


@pytest.mark.parametrize("scorer", TABLE)
@pytest.mark.parametrize("name", MANAGED)
def test_pitfall_34_a_budget_at_the_length_is_the_identity(name: str, scorer: str) -> None:
    model, ids = models.wrap(FAMILIES[name]()), token_ids(20)
    if refuses(model, scorer):
        pytest.skip("this model has sliding layers, which this scorer reads")
    plain = written(model, ids, 10)
    for settings in ({}, {"storage": "ragged", "reduce": "head"}, {"trigger": "prefill"}):
        for more in ({}, {"prefill_chunk_size": 7}):
            with apply(policy(scorer, tokens=29, **settled(scorer, settings)), model) as run:
                found = written(model, ids, 10, **more)
            assert run.report().n_evicted == 0
            if not more:
                assert same_logits(found, plain)
            assert torch.equal(found.sequences, plain.sequences)


def test_pitfall_12_nothing_is_left_behind(model: Model) -> None:
    ids = token_ids(30)
    before, carried = written(model, ids, 8), hooks(model)
    configs = [module.config._attn_implementation for module in model.layers]
    for settings in ({}, {"storage": "ragged", **uneven(model)}):
        with apply(policy("epikv", **settings), model):
            changed = written(model, ids, 8)
        assert not same_logits(changed, before)
        assert hooks(model) == carried
        assert [module.config._attn_implementation for module in model.layers] == configs
        assert same_logits(written(model, ids, 8), before)


def test_pitfall_12_nor_after_an_exception(model: Model) -> None:
    ids = token_ids(30)
    before, carried = written(model, ids, 8), hooks(model)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.layers[1].register_forward_hook(fail)
    carried_with = hooks(model)
    with pytest.raises(ZeroDivisionError), apply(policy("epikv", storage="ragged"), model) as run:
        written(model, ids, 8)
    assert hooks(model) == carried_with
    handle.remove()
    assert hooks(model) == carried
    assert same_logits(written(model, ids, 8), before)
    with pytest.raises(InputError, match="failed half-way"), apply(policy("epikv"), model):
        model.decoder(input_ids=ids[:, :1], use_cache=True, **{cache_keyword(model): run.cache})


def test_a_policy_leaves_training_and_gradients_as_they_were() -> None:
    hf = llama().train()
    frozen = next(hf.parameters()).requires_grad_(False)
    with apply(policy(), hf):
        assert not hf.training
    assert hf.training
    assert [weight.requires_grad for weight in hf.parameters()].count(False) == 1
    assert not frozen.requires_grad


def test_the_run_lets_go_of_model_and_cache() -> None:
    model = models.wrap(llama())
    with apply(policy(), model) as run:
        written(model, token_ids(20), 3)
    gone = weakref.ref(run.cache)
    del run
    gc.collect()
    assert gone() is None


# Positions


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("settings", [{}, {"trigger": "prefill"}, {"trigger": "every:6"}, {"storage": "ragged"}])
def test_pitfall_04_position_of_every_decoded_token(model: Model, settings: dict[str, Any], chunk: int | None) -> None:
    ids, own, _ = padded([30, 21], 0)
    seen: list[torch.Tensor] = []
    watch = model.decoder.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    try:
        with apply(policy("keynorm", **settings), model) as run:
            written(model, ids, 10, attention_mask=own, prefill_chunk_size=chunk)
    finally:
        watch.remove()
    found = torch.cat([positions.expand(2, -1) for positions in seen], -1)
    assert found[0].tolist() == list(range(39))
    assert found[1].tolist() == [0] * 9 + list(range(30))
    assert run.cache.get_seq_length() == 39
    assert run.report().n_evicted > 0


def test_a_call_without_positions_goes_on_where_the_text_ended(model: Model) -> None:
    ids = token_ids(40)
    with apply(policy("keynorm"), model) as run, torch.no_grad():
        out = model.hf(ids[:, :30], use_cache=True)
        cache = out[cache_keyword(model)]
        rows = [model.hf(ids[:, i : i + 1], **{cache_keyword(model): cache}).logits[0] for i in range(30, 40)]
    expected = masked_logits(model, ids[0], run.events(), step_of_each([30, *[1] * 10]))[30:]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=0)


# generate's own ways


@pytest.mark.parametrize("shape", ["uniform", "ragged"])
def test_generate_equals_the_masked_reference(model: Model, shape: str) -> None:
    settings = {"storage": "ragged", **uneven(model)} if shape == "ragged" else {}
    ids, own, _ = padded([30, 21], 0)
    with apply(policy("value_var", **settings), model) as run:
        found = written(model, ids, 10, attention_mask=own)
    events, logits = run.events(), torch.stack(found.logits, 1)
    for row, n in enumerate((30, 21)):
        tokens = found.sequences[row, -10 - n :]
        steps = step_of_each([30, *[1] * 10])[-10 - n :]
        expected = masked_logits(model, tokens, events[events.row == row], steps)[-11:-1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [5, 8, 29, 30])
def test_pitfall_23_every_prefill_chunk_is_evicted_from(model: Model, chunk: int) -> None:
    ids = token_ids(30)
    with apply(policy("epikv", trigger="prefill"), model) as run:
        found = written(model, ids, 4, prefill_chunk_size=chunk)
    report = run.report()
    assert report.most_in_pass <= max(12 + chunk, 12 + 4)
    assert report.most_held <= 12 + 4
    sizes = [min(chunk, 30 - start) for start in range(0, 30, chunk)]
    expected = masked_logits(model, found.sequences[0], run.events(), step_of_each([*sizes, 1, 1, 1, 1]))
    torch.testing.assert_close(torch.cat(found.logits), expected[29:33], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("trigger", "most"), [("prefill", 12 + 19), ("step", 12), ("every:6", 12 + 5)])
def test_triggers_hold_what_they_say(model: Model, trigger: str, most: int) -> None:
    with apply(policy("epikv", trigger=trigger), model) as run:
        written(model, token_ids(30), 20)
    assert run.report().most_held == most
    assert run.report().n_passes == 20


def test_every_waits_through_a_short_prompt(model: Model) -> None:
    with apply(policy(trigger="every:16"), model) as run:
        written(model, token_ids(14), 2)
        assert run.report().most_held == 15
        written(model, token_ids(14), 3)
    assert run.report().n_evicted == 4


def test_pitfall_31_new_tokens_survive_and_leave_again(model: Model) -> None:
    for scorer in TABLE:
        with apply(policy(scorer), model) as run:
            written(model, token_ids(30), 20)
        kept = run.report().kept[0][0][0]
        assert kept[:2] == [0, 1]
        assert kept[-3:] == [46, 47, 48]


def test_pitfall_33_stops_streamers_and_sampling(model: Model) -> None:
    ids, chosen = token_ids(30), policy("epikv")
    with apply(chosen, model):
        free = written(model, ids, 12)
    new = free.sequences[0, 30:].tolist()
    with apply(chosen, model):
        stopped = written(model, ids, 12, eos_token_id=[96, new[4]])
    assert stopped.sequences[0, 30:].tolist() == new[: new.index(new[4]) + 1]
    with apply(chosen, model):
        assert written(model, ids, 12, eos_token_id=[new[0]]).sequences[0, 30:].tolist() == new[:1]

    class Heard(TextStreamer):
        def __init__(self) -> None:
            self.ids: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None:
            pass

    heard = Heard()
    with apply(chosen, model):
        written(model, ids, 12, streamer=heard)
    assert heard.ids == free.sequences[0].tolist()
    sampled = []
    for _ in range(2):
        torch.manual_seed(3)
        with apply(chosen, model) as run:
            sampled.append(written(model, ids, 12, do_sample=True, temperature=0.7, num_return_sequences=3))
    assert torch.equal(sampled[0].sequences, sampled[1].sequences)
    events = run.events()
    for row in range(3):
        tokens = sampled[1].sequences[row]
        expected = masked_logits(model, tokens, events[events.row == row], step_of_each([30, *[1] * 12]))[29:-1]
        torch.testing.assert_close(torch.stack([rows[row] for rows in sampled[1].logits]), expected, atol=1e-4, rtol=0)


def test_beam_search_moves_positions_and_state_with_the_rows(model: Model) -> None:
    ids = token_ids(30)
    plain = written(model, ids, 8, num_beams=3, num_return_sequences=3)
    with apply(policy("epikv", tokens=60), model):
        assert torch.equal(written(model, ids, 8, num_beams=3, num_return_sequences=3).sequences, plain.sequences)
    for settings in ({}, {"storage": "ragged", **uneven(model)}):
        with apply(policy("epikv", **settings), model) as run:
            found = written(model, ids, 8, num_beams=3, num_return_sequences=1, output_scores=True)
            best, score = found.sequences, found.sequences_scores
        # a row that was never reordered: the best beam forced through the same policy must be worth the same
        with apply(policy("epikv", **settings), model):
            cache = DynamicCache(config=model.decoder.config)
            total = torch.zeros(())
            with torch.no_grad():
                logits = model.hf(ids, use_cache=True, **{cache_keyword(model): cache}).logits[0, -1]
                for token in best[0, 30:]:
                    total = total + logits.log_softmax(-1)[token]
                    logits = model.hf(token[None, None], use_cache=True, **{cache_keyword(model): cache}).logits[0, -1]
        torch.testing.assert_close(total / 8, score[0], atol=1e-4, rtol=0)
        assert run.report().n_evicted > 0


def test_assisted_decoding_is_refused_by_name(model: Model) -> None:
    with (
        pytest.raises((InputError, ValueError, NotImplementedError), match=r"(?i)assisted|crop"),
        apply(policy(), model),
    ):
        written(model, token_ids(30), 8, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("kind", ["static", "filled"])
def test_pitfall_25_other_caches_are_refused_by_name(model: Model, kind: str) -> None:
    ids = token_ids(20)
    if kind == "static":
        cache: Any = StaticCache(config=model.decoder.config, max_cache_len=40)
    else:
        cache = DynamicCache(config=model.decoder.config)
        with torch.no_grad():
            model.decoder(input_ids=ids, use_cache=True, **{cache_keyword(model): cache})
    with pytest.raises((ModelRefused, InputError), match=r"StaticLayer|no policy has seen"), apply(policy(), model):
        written(model, torch.cat([ids, ids], 1), 2, **{cache_keyword(model): cache})


def test_pitfall_24_sliding_layers_stay_as_transformers_made_them() -> None:
    model, ids = models.wrap(FAMILIES["gemma3"]()), token_ids(30)
    with apply(policy("epikv"), model) as run:
        found = written(model, ids, 10)
    kinds = [type(layer).__name__ for layer in run.cache.layers]
    assert kinds == ["DynamicSlidingWindowLayer", "HeldLayer"] * 2
    assert [layer.keys.shape[2] for layer in run.cache.layers] == [7, 12, 7, 12]
    expected = masked_logits(model, found.sequences[0], run.events(), step_of_each([30, *[1] * 10]))[29:-1]
    torch.testing.assert_close(torch.cat(found.logits), expected, atol=1e-4, rtol=0)


def test_pitfall_39_a_model_whose_every_layer_slides_is_refused() -> None:
    with pytest.raises(ModelRefused, match="every layer slides"), apply(policy(), models.wrap(mistral())):
        pass


def test_pitfall_14_an_empty_cache_of_ones_own_is_used(model: Model) -> None:
    cache = DynamicCache()
    with apply(policy(), model) as run:
        written(model, token_ids(30), 4, **{cache_keyword(model): cache})
    assert run.cache is cache
    assert cache.layers[0].keys.shape[2] == 12


def test_a_forward_pass_without_a_cache_is_none_of_the_policys_business(model: Model) -> None:
    ids = token_ids(30)
    with apply(policy(), model) as run, torch.no_grad():
        assert torch.equal(model.hf(ids, use_cache=False).logits, model.hf(ids, use_cache=False).logits)
    assert run.cache is None
    with pytest.raises(InputError, match="no forward pass"):
        run.report()


# More than one run


def test_two_models_and_two_policies_interleaved() -> None:
    one, two = models.wrap(llama()), models.wrap(FAMILIES["gpt2"]())
    ids = token_ids(30)
    alone = {}
    for model, chosen in ((one, policy("epikv")), (two, policy("keynorm", reduce="head"))):
        with apply(chosen, model):
            alone[model.name, model.n_kv_heads] = written(model, ids, 6)
    with apply(policy("epikv"), one), apply(policy("keynorm", reduce="head"), two):
        for _ in range(2):
            for model in (one, two):
                assert same_logits(written(model, ids, 6), alone[model.name, model.n_kv_heads])


def test_the_innermost_policy_takes_a_new_cache_and_the_outer_one_keeps_its_own(model: Model) -> None:
    ids = token_ids(40)
    with apply(policy("keynorm", tokens=20), model) as alone:
        expected = written(model, ids[:, :30], 10)
    with apply(policy("keynorm", tokens=20), model) as outer:
        cache = DynamicCache(config=model.decoder.config)
        keyword = cache_keyword(model)
        with torch.no_grad():
            model.hf(ids[:, :30], use_cache=True, **{keyword: cache})
        with apply(policy("epikv", tokens=10), model) as inner:
            written(model, ids[:, :30], 10)
            with torch.no_grad():
                model.hf(expected.sequences[:, 30:31], use_cache=True, **{keyword: cache})
        assert inner.report().most_held == 10
        again = written(model, ids[:, :30], 10)
    assert same_logits(again, expected)
    assert cache.layers[0].keys.shape[2] == 20
    assert outer.log.n_passes == 12
    assert alone.log.n_passes == 10
