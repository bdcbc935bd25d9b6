"""Does the meter tell what a cache stores after every token, with a policy and without?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eviction import cache_keyword, policy
from tiny import llama, token_ids
from transformers.cache_utils import DynamicCache

from kvlens import model as models
from kvlens.model import Model
from kvlens.runtime.apply import apply
from kvlens.runtime.meter import Meter


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def metered(model: Model, n_prompt: int, n_new: int) -> tuple[Meter, DynamicCache]:
    ids = token_ids(n_prompt)
    cache = DynamicCache(config=model.hf.config)
    meter = Meter(cache)
    settings: dict[str, Any] = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    model.hf.generate(ids, attention_mask=mask, streamer=meter, **{cache_keyword(model): cache}, **settings)
    return meter, cache


def token_bytes(model: Model) -> int:
    return 2 * model.n_layers * model.n_kv_heads * model.d_head * model.dtype.itemsize


def test_the_full_cache_grows_by_a_token_each_step(model: Model) -> None:
    meter, cache = metered(model, 20, 7)
    one = token_bytes(model)
    assert meter.bytes == [n * one for n in range(20, 27)]
    assert meter.bytes[-1] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_under_a_policy_it_comes_back_to_the_budget(model: Model) -> None:
    with apply(policy("sliding_window", tokens=12, trigger="every:4"), model) as run:
        meter, _ = metered(model, 20, 13)
    one, side = token_bytes(model), run.report().side_bytes
    assert len(meter.bytes) == 13
    assert meter.bytes[-1] == run.report().physical_bytes
    refreshed = meter.bytes[0::4]  # the prompt of 20 evicts, then every fourth token
    assert all(12 * one < held <= 12 * one + side for held in refreshed)
    assert max(meter.bytes) <= (12 + 32) * one + 2 * side  # a block of free slots while tokens come one by one
