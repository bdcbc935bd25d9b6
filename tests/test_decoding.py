"""What a model writes depends on the settings given and nothing else."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import GenerationConfig

from kvlens.decoding import generate, stop_ids
from kvlens.model import Model, logits, wrap

PROMPT = tiny.token_ids(9)[0].tolist()


@pytest.fixture
def model() -> Model:
    hf_model = tiny.llama()
    hf_model.generation_config = GenerationConfig(eos_token_id=None)
    return wrap(hf_model)


def by_hand(model: Model, n: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(n):
        ids.append(int(logits(model, torch.tensor([ids]), last=1).argmax()))
    return ids[len(PROMPT) :]


def test_greedy_is_the_likeliest_token_whatever_the_checkpoint_asks_for(model: Model) -> None:
    expected = by_hand(model, 12)
    assert generate(model, PROMPT, max_new_tokens=12) == expected
    model.hf.generation_config = GenerationConfig(
        eos_token_id=None, do_sample=True, top_k=2, temperature=0.5, repetition_penalty=9.0, no_repeat_ngram_size=1
    )
    assert len(set(expected)) < 12  # so that a penalty for repetition would change it
    assert generate(model, PROMPT, max_new_tokens=12) == expected


def test_the_token_that_ends_a_text_is_no_part_of_it(model: Model) -> None:
    expected = by_hand(model, 6)
    model.hf.generation_config = GenerationConfig(eos_token_id=[96, expected[3]])
    assert stop_ids(model) == {96, expected[3]}
    assert generate(model, PROMPT, max_new_tokens=6) == expected[: expected.index(expected[3])]
    model.hf.generation_config = GenerationConfig(eos_token_id=expected[0])
    assert generate(model, PROMPT, max_new_tokens=6) == []


def test_draws_follow_the_seed_and_leave_the_global_state_alone(model: Model) -> None:
    state = torch.random.get_rng_state()
    texts = [generate(model, PROMPT, max_new_tokens=8, temperature=2.0, seed=seed) for seed in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_draws_come_from_the_whole_vocabulary(model: Model) -> None:
    """transformers' own default keeps the 50 likeliest tokens alone."""
    drawn = {generate(model, PROMPT, max_new_tokens=1, temperature=100.0, seed=seed)[0] for seed in range(250)}
    assert len(drawn) > 60
