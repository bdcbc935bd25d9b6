"""The repetition of a text over its cache: what the model's own attention gives, and that nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking_oracles import MADE, held_and_scores, seen_weights
from eviction import MANAGED, masked_logits, padded, policy, step_of_each, streamed_logits, uneven, visibility, written
from tiny import gpt2, llama, token_ids
from tiny_tokenizers import byte_level

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import all_tensors, ledger_of
from kvlens.runtime.repeat import LEAD
from kvlens.scorers.interface import EMPTY

FULL = [name for name in MANAGED if name != "gemma3"]


def by_hand(
    model: Model, ids: torch.Tensor, held: dict[int, torch.Tensor], masks: Any, prompt: list[int], chunk: int
) -> dict[int, torch.Tensor]:
    """By layer [kv_head, position]: the text and one repeated chunk as one sequence, seen by the model's own attention.

    `held[layer]` is [kv_head, slots], `masks` what each token of the text saw when it came.
    """
    n, group = len(ids), model.n_heads // model.n_kv_heads
    worth = {layer: torch.zeros(model.n_kv_heads, n, dtype=torch.float64) for layer in held}
    for start in range(0, n, chunk):
        again = torch.cat([torch.tensor(prompt).long(), ids[max(0, start - LEAD) : start + chunk]])
        whole = torch.cat([ids, again])
        seen = {}
        for layer, positions in held.items():
            mask = torch.ones(1, model.n_heads, len(whole), len(whole), dtype=torch.bool).tril()
            mask[..., :n, :n] = mask[..., :n, :n] if masks is None else masks[layer]
            for head in range(model.n_kv_heads):
                left = set(range(n)) - set(positions[head].tolist())
                mask[:, head * group : (head + 1) * group, n:, sorted(left)] = False
            seen[layer] = mask
        for layer, weights in seen_weights(model, whole, seen).items():
            most = weights[:, n:, :n].unflatten(0, (-1, group)).amax((1, 2))
            worth[layer] = torch.maximum(worth[layer], most)
    return worth


def check(run: Any, model: Model, ids: torch.Tensor, masks: Any, prompt: list[int], chunk: int) -> None:
    found = held_and_scores(run)
    held = {layer: positions[0].expand(model.n_kv_heads, -1) for layer, (positions, _) in found.items()}
    worth = by_hand(model, ids, held, masks, prompt, chunk)
    for layer, (_, scores) in found.items():
        for head in range(model.n_kv_heads):
            real = held[layer][head] != EMPTY
            wanted = worth[layer][head, held[layer][head, real].long()]
            torch.testing.assert_close(scores[0, head, real].double(), wanted, atol=1e-4, rtol=1e-3)
            assert scores[0, head, ~real].isnan().all()


@pytest.mark.parametrize("chunk", [7, 30])
@pytest.mark.parametrize("chunks", [[30], [12, 10, *[1] * 8]])
@pytest.mark.parametrize("name", [*FULL, "yarn"])
def test_pitfalls_19_26_a_slot_is_worth_its_largest_weight(name: str, chunks: list[int], chunk: int) -> None:
    model, ids = models.wrap(MADE[name]()), token_ids(30)
    with apply(policy("kvzip", tokens=100, parameters={"prompt": "", "chunk": chunk}), model) as run:
        streamed_logits(model, ids, chunks)
    check(run, model, ids[0], None, [], chunk)


@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
def test_it_repeats_the_whole_text_over_what_is_held(shape: str) -> None:
    model, ids, chunks = models.wrap(MADE["llama_6_over_3"]()), token_ids(36), [14, 12, 9, 1]
    more: dict[str, Any] = {"ragged": {"storage": "ragged", **uneven(model)}, "padded": uneven(model)}.get(shape, {})
    with apply(policy("kvzip", parameters={"prompt": "", "chunk": 16}, **more), model) as run:
        streamed_logits(model, ids, chunks)
    assert ledger_of(run.cache).state.ids[0].tolist() == ids[0].tolist()
    check(run, model, ids[0], visibility(model, run.events(), step_of_each(chunks)), [], 16)


def test_the_prompt_comes_first() -> None:
    tokenizer = byte_level()
    model, ids = models.wrap(llama(vocab_size=len(tokenizer)), tokenizer), token_ids(20)
    words = tokenizer.encode("again:", add_special_tokens=False)
    assert words
    assert tokenizer.bos_token_id not in words
    with apply(policy("kvzip", tokens=100, parameters={"prompt": "again:"}), model) as run:
        streamed_logits(model, ids, [20])
    check(run, model, ids[0], None, words, 100)


def test_pitfall_11_nothing_is_left_of_the_pass() -> None:
    model, (ids, own, _) = models.wrap(llama()), padded([30, 21], 0)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()]
    with apply(policy("kvzip", tokens=100), model) as run:
        streamed_logits(model, ids, [30], own=own)
        during = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()]
        before = {name: tensor.clone() for name, tensor in all_tensors(run.cache)}
        n_seen = run.cache.get_seq_length()
        held_and_scores(run)
        assert dict.fromkeys(before, True) == {
            name: torch.equal(tensor, before[name]) for name, tensor in all_tensors(run.cache)
        }
        assert run.cache.get_seq_length() == n_seen
        assert during == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()]


@pytest.mark.parametrize("settings", [{}, {"reduce": "head"}, {"storage": "ragged", "reduce": "head"}])
def test_generate_equals_the_masked_reference(settings: dict[str, Any]) -> None:
    model, (ids, own, _) = models.wrap(llama()), padded([30, 21], 0)
    with apply(policy("kvzip", trigger="prefill", **settings), model) as run:
        found = written(model, ids, 10, attention_mask=own)
    events, logits = run.events(), torch.stack(found.logits, 1)
    assert run.report().n_evictions == 1
    assert run.report().scoring_seconds > 0
    for row, n in enumerate((30, 21)):
        steps = step_of_each([30, *[1] * 10])[-10 - n :]
        tokens = found.sequences[row, -10 - n :]
        expected = masked_logits(model, tokens, events[events.row == row], steps)[-11:-1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


def test_the_pass_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = models.wrap(llama()), []
    own = models.Twin.run

    def counted(twin: Any, *args: Any, **more: Any) -> torch.Tensor:
        made.append(more["ids"].shape[1])
        return own(twin, *args, **more)

    with apply(policy("kvzip", reduce="head", trigger="prefill", parameters={"prompt": "", "chunk": 20}), model):
        monkeypatch.setattr(models.Twin, "run", counted)
        written(model, token_ids(50), 2)
    assert made == [20, 20 + LEAD, 10 + LEAD]


def test_what_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(ModelRefused, match="layer 0, which slides"), apply(policy("kvzip"), MADE["gemma3"]()):
        pass
    with pytest.raises(ModelRefused, match="without a tokenizer"), apply(policy("kvzip", parameters={}), llama()):
        pass
    model = models.wrap(gpt2(n_positions=40))
    with (
        pytest.raises(InputError, match="needs positions up to 58, and in-memory has 40"),
        apply(policy("kvzip", trigger="prefill", parameters={"prompt": ""}), model),
    ):
        written(model, token_ids(25), 2)
