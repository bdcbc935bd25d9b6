"""Pitfalls that no single part of the runtime answers for: who saw what, what FlashAttention is handed, filler."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from eviction import CAUSAL, PARAMETERS, padded, policy, same_logits, streamed_logits, uneven, written
from tiny import FAMILIES, llama, token_ids

from kvlens import model as models
from kvlens.errors import ModelRefused
from kvlens.model import Model
from kvlens.runtime import attention
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.ragged import RaggedLayer
from kvlens.runtime.refresh import of_layer
from kvlens.scorers import table


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def scores_of(run: Run) -> list[torch.Tensor]:
    """By layer what the scorer says now, [heads, slots] of the first row."""
    ledger = ledger_of(run.cache)
    return [of_layer(run.cache, ledger, i, ledger.set_of(i), run.means)[0] for i in run.layers]


# 20. No score knows what comes later, unless it says that it reads the future

N_SAME, CHUNK = 20, 4
FUTURES = ([30], [12, 10, 8], [20, *[1] * 10])


def after(model: Model, name: str, ids: torch.Tensor, chunks: list[int], **parameters: Any) -> list[torch.Tensor]:
    with apply(policy(name, tokens=100, parameters=PARAMETERS.get(name, {}) | parameters), model) as run:
        streamed_logits(model, ids, chunks)
    return scores_of(run)


def with_future(n: int, seed: int) -> torch.Tensor:
    """The same first tokens and others behind them."""
    return torch.cat([token_ids(N_SAME), token_ids(n - N_SAME, seed=seed)], 1)


@pytest.mark.parametrize("name", [*CAUSAL, "lagkv", "lagkv causal"])  # lagkv reads one chunk
def test_pitfall_20_scores_of_earlier_tokens_know_no_later_ones(model: Model, name: str) -> None:
    name, _, causal = name.partition(" ")
    more = {"causal": True} if causal else {}
    n_known = N_SAME - 2 * CHUNK if name == "lagkv" and not causal else N_SAME  # judged by a chunk that is the same
    found = [after(model, name, with_future(30, seed), chunks, **more) for seed, chunks in product((1, 2), FUTURES)]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            known, now = one[:, :n_known], two[:, :n_known]
            torch.testing.assert_close(known, now, atol=1e-4, rtol=1e-4, equal_nan=True)
            assert known[:, 1:].isfinite().all()


@pytest.mark.parametrize("last", [3, 40, 96])
@pytest.mark.parametrize("chunks", [[N_SAME + 1], [9, N_SAME - 8], [N_SAME, 1]])
def test_pitfall_20_what_earlier_queries_gave_is_not_changed_by_a_later_token(
    model: Model, last: int, chunks: list[int]
) -> None:
    first = token_ids(N_SAME)
    ids = torch.cat([first, torch.tensor([[last]])], 1)
    before = after(model, "h2o", first, [N_SAME])
    by_the_last = after(model, "snapkv", ids, chunks, window=1, pool=1)  # the last query's own weights
    for given, one, both in zip(before, by_the_last, after(model, "h2o", ids, chunks), strict=True):
        torch.testing.assert_close(both[:, :N_SAME] - one[:, :N_SAME], given, atol=1e-5, rtol=1e-4)
    earlier = after(model, "snapkv", first, [N_SAME], window=3, pool=1)
    four = after(model, "snapkv", ids, chunks, window=4, pool=1)
    for three, one, all_four in zip(earlier, by_the_last, four, strict=True):
        judged = N_SAME - 3
        shares = 4 * all_four[:, :judged] - one[:, :judged]
        # over the slots that are held: the last query's is among them, so that the earlier ones see no more than before
        torch.testing.assert_close(shares, 3 * three[:, :judged], atol=1e-5, rtol=1e-4)


# 22. Events say which tokens had come when one left

N_CONTEXT = 30
QUESTIONS = [token_ids(5, seed=seed) for seed in (7, 8)]


@pytest.mark.parametrize("name", [name for name in table.TABLE if name not in ("surprise", "surprise_fast")])
@pytest.mark.parametrize("chunks", [[N_CONTEXT], [11, 11, 8]])
def test_pitfall_22_a_question_that_comes_later_has_no_say(model: Model, name: str, chunks: list[int]) -> None:
    left = []
    for question in QUESTIONS:
        with apply(policy(name, trigger="prefill"), model) as run:
            streamed_logits(model, torch.cat([token_ids(N_CONTEXT), question], 1), [*chunks, *[1] * 5])
        events = run.events()
        assert (events.pos + events.tenure <= N_CONTEXT).all()  # the tokens that had come
        left.append(events)
        kept = run.report().kept[0][0][0]
        assert kept[-5:] == list(range(N_CONTEXT, N_CONTEXT + 5))
    assert len(left[0]) > 0
    assert left[0].equals(left[1])


def test_pitfall_22_a_question_in_the_prompt_has_one_and_the_events_show_it(model: Model) -> None:
    context, kept = token_ids(N_CONTEXT), []
    for question in QUESTIONS:
        with apply(policy("snapkv", parameters={"window": 5}, trigger="prefill", reduce="head"), model) as run:
            streamed_logits(model, torch.cat([context, question], 1), [N_CONTEXT + 5])
        events = run.events()
        assert (events.pos + events.tenure == N_CONTEXT + 5).all()
        kept.append(run.report().kept)
    assert kept[0] != kept[1]


# 32. Nothing of weight leaves, so nothing of weight changes


@pytest.mark.real
def test_pitfall_32_without_its_filler_a_text_says_the_same(smollm2: Model) -> None:
    fact = "Anna's dog is called Rex."
    filler = " The sky was grey and the street was quiet that day." * 24
    question = " Question: What is Anna's dog called? Answer: Anna's dog is called"
    tokenizer = smollm2.tokenizer
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (fact, filler, question)]
    n_fact, n_filler, n_question = map(len, parts)
    ids, n_context = torch.tensor([[i for part in parts for i in part]]), n_fact + n_filler
    answer = tokenizer(" Rex", add_special_tokens=False)["input_ids"][0]
    chunks = [n_context, *[1] * n_question]

    def answered(sinks: int, scores: list[float]) -> torch.Tensor:
        parameters = {"positions": list(range(n_context)), "scores": scores}
        protect = {"sinks": sinks, "recent": 1}
        chosen = policy("oracle", parameters=parameters, tokens=n_fact + 8, protect=protect, trigger="prefill")
        with apply(chosen, smollm2) as run:
            found = streamed_logits(smollm2, ids, chunks)[0, -1].log_softmax(-1)
        assert run.report().n_evicted == n_filler - 8
        return found

    full = streamed_logits(smollm2, ids, chunks)[0, -1].log_softmax(-1)
    kept = answered(4, [1.0] * n_fact + [0.0] * n_filler)
    lost = answered(0, [0.0] * n_fact + [1.0] * n_filler)  # the sinks and the fact leave, filler stays
    assert int(full.argmax()) == int(kept.argmax()) == answer
    assert kept[answer] > full[answer] - 0.5  # nats
    assert lost[answer] < full[answer] - 3


# 35. What FlashAttention is handed


@pytest.mark.parametrize("shape", [{}, {"trigger": "every:7"}, "padded", {"reduce": "head"}])
@pytest.mark.parametrize("batch", [1, 2])
def test_pitfall_35_attention_is_handed_whole_rows_in_order(model: Model, shape: Any, batch: int) -> None:
    handed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(_: int, own: Any, __: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ___: Any) -> torch.Tensor:
        handed.append((key, value))
        return own()

    more = uneven(model) if shape == "padded" else shape
    with models.around_attention(model, watch), apply(policy("keynorm", **more), model) as run:
        streamed_logits(model, token_ids(45, batch=batch), [20, 5, *[1] * 20])
    assert run.report().n_evictions > 2
    for pair in handed:
        for states in pair:
            n_slots, d_head = states.shape[2:]
            assert states.stride()[2:] == (d_head, 1)  # rows next to one another, nothing repeated or turned
            assert states.stride(1) >= n_slots * d_head
    for layer in run.cache.layers:
        assert layer._room[0].is_contiguous()
        assert layer._room[1].is_contiguous()


def flash(model: Model) -> Model:
    """The model as it would be under FlashAttention; nothing is run."""
    return replace(model, attention="flash_attention_2")


@pytest.mark.parametrize("chunks", [[26, *[1] * 6], [14, 6, 6, *[1] * 6], [26, 6]])
@pytest.mark.parametrize("lengths", [[26, 4, 9], [26, 26, 26]])
def test_flash_attention_gets_the_padding_that_the_mask_means(
    model: Model, lengths: list[int], chunks: list[int]
) -> None:
    n_masks = 0
    ids, own, _ = padded(lengths, 6)
    real = attention.layer_mask

    def compared(_: Model, ledger: Any, layer: int, n_new: int, new_own: Any) -> Any:
        nonlocal n_masks
        mask = real(model, ledger, layer, n_new, new_own)
        keys = real(flash(model), ledger, layer, n_new, new_own)
        seen = attention.visible(ledger, layer, model.n_heads, n_new, new_own)
        width = ledger.set_of(layer).shape[-1] + n_new
        causal = torch.ones(n_new, width, dtype=torch.bool).tril(width - n_new)  # aligned to the end, as it does
        if keys is None:  # nothing to hide
            assert seen is None or bool((seen == causal).all())
        else:
            n_masks += 1
            assert (keys.shape, keys.dtype) == ((3, width), torch.bool)
            # what padding puts out is read by nobody
            asks = torch.ones(3, n_new, dtype=torch.bool) if new_own is None else new_own
            expected = (keys[:, None] & causal).masked_fill(~asks[..., None], False)
            whole = torch.ones_like(causal).tril(width - n_new)[None] if seen is None else seen[:, 0]
            assert torch.equal(whole.masked_fill(~asks[..., None], False), expected)
        return mask

    with pytest.MonkeyPatch.context() as patch, apply(policy("epikv"), model) as run:
        patch.setattr(attention, "layer_mask", compared)
        streamed_logits(model, ids, chunks, own=own)
    assert run.report().n_evicted > 0
    assert (n_masks > 0) == (lengths != [26, 26, 26])


def test_flash_attention_cannot_tell_heads_apart(model: Model) -> None:
    with apply(policy("keynorm", **uneven(model)), model) as run:
        streamed_logits(model, token_ids(30), [30])
    ledger = ledger_of(run.cache)
    assert ledger.holes
    assert attention.layer_mask(model, ledger, 0, 1, None).shape[1] == model.n_heads
    with pytest.raises(ModelRefused, match="flash_attention_2 takes no mask that differs from head to head") as caught:
        attention.layer_mask(flash(model), ledger, 0, 1, None)
    assert "ragged" in caught.value.hint
    with apply(policy("keynorm", reduce="head"), model) as run:  # other tokens, as many in each: no mask is needed
        streamed_logits(model, token_ids(30), [30])
    for n_new in (1, 4):
        assert attention.layer_mask(flash(model), ledger_of(run.cache), 0, n_new, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["uniform", "heads apart", "ragged"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_pitfall_35_generate_under_flash_attention_2_after_evictions(name: str, shape: str) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    more: dict[str, Any] = {"uniform": {}, "heads apart": {"reduce": "head"}, "ragged": {"storage": "ragged"}}[shape]
    found = {}
    for backend in ("sdpa", "flash_attention_2"):
        hf = FAMILIES[name]().to("cuda", torch.bfloat16)
        hf.set_attn_implementation(backend)
        wrapped = models.wrap(hf)
        more |= uneven(wrapped) if shape == "ragged" else {}
        ids, own, _ = (part if isinstance(part, list) else part.cuda() for part in padded([30, 21], 0))
        with apply(policy("sliding_window", **more), wrapped) as run:  # the same tokens leave, whatever rounding does
            found[backend] = written(wrapped, ids, 12, attention_mask=own)
        assert run.report().n_evicted > 0
        assert isinstance(run.cache.layers[0], RaggedLayer) == (shape == "ragged")
    plain, flashed = (torch.stack(found[backend].logits).float() for backend in ("sdpa", "flash_attention_2"))
    same = (found["sdpa"].sequences == found["flash_attention_2"].sequences).all(0)[30:].cumprod(0).bool()
    assert same.any()
    error = (plain[: int(same.sum())] - flashed[: int(same.sum())]).abs().max()
    assert error < 0.05 * plain.abs().max()
    assert not same_logits(found["sdpa"], found["flash_attention_2"])  # it was another backend
