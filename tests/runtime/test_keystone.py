"""Logits after eviction are those of the full cache with the evicted keys masked, however storage is shaped."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from eviction import MANAGED, masked_logits, padded, policy, settled, step_of_each, streamed_logits, uneven
from tiny import FAMILIES, token_ids

from kvlens import model as models
from kvlens.model import Model
from kvlens.runtime.apply import apply
from kvlens.runtime.ragged import RaggedLayer
from kvlens.scorers.table import TABLE

TOLERANCE = 1e-4
CHUNKS = {
    "one token at a time": [20, *[1] * 20],
    "many query tokens after evictions": [10, 10, 1, 1, 8, 1, 1, 1, 7],
    "small chunks": [*[3] * 13, 1],
}
SHAPES = {
    "uniform": lambda model: {"scorer": "epikv"},
    "layers apart": lambda model: {"scorer": "key_var", "reduce": "layer"},
    "heads apart": lambda model: {"scorer": "random", "reduce": "head"},
    "padded": lambda model: {"scorer": "keynorm", "storage": "padded", **uneven(model)},
    "ragged": lambda model: {"scorer": "value_var", "storage": "ragged", "trigger": "every:4", **uneven(model)},
    "capped": lambda model: {"scorer": "keynorm", "storage": "uniform_cap", **uneven(model)},
    "ragged by attention": lambda model: {"scorer": "h2o", "storage": "ragged", **uneven(model)},
    "layers by the last queries": lambda model: {"scorer": "snapkv", "reduce": "layer", "trigger": "every:4"},
    "padded by lag": lambda model: {"scorer": "lagkv", **uneven(model)},
    "uniform by surprise": lambda model: {"scorer": "surprise_fast", "trigger": "every:3"},
    "pages": lambda model: {"scorer": "random", "granularity": {"unit": "page", "page_size": 4}},
}
# Ragged, so that a row that holds nothing yet is seen by itself.
SPARSE: dict[str, dict[str, Any]] = {
    "even": {"reduce": "head", "storage": "ragged"},
    "uneven": {"reduce": "head", "storage": "ragged", "allocate": {"name": "ada"}},
    "pages": {"reduce": "head", "storage": "ragged", "granularity": {"unit": "page", "page_size": 3}},
}


@functools.cache
def family(name: str) -> Model:
    return models.wrap(FAMILIES[name]())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MANAGED)
def test_evicted_is_masked(name: str, shape: str) -> None:
    model, ids = family(name), token_ids(40)
    plain = models.logits(model, ids)[0]
    for chunks in CHUNKS.values():
        with apply(policy(**SHAPES[shape](model)), model) as run:
            found = streamed_logits(model, ids, chunks)[0]
        expected = masked_logits(model, ids[0], run.events(), step_of_each(chunks))
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        assert (found - plain).abs().max() > 100 * TOLERANCE  # what left was of weight
        assert isinstance(run.cache.layers[run.layers[0]], RaggedLayer) == shape.startswith("ragged")


@pytest.mark.parametrize(
    "shape",
    [
        *("uniform", "heads apart", "padded", "ragged"),
        *("ragged by attention", "layers by the last queries", "padded by lag", "uniform by surprise"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_pitfall_15_padding_is_evicted_first_and_changes_nothing(name: str, shape: str) -> None:
    model = family(name)
    ids, own, rows = padded([22, 9, 17], 12)
    for chunks in ([22, *[1] * 12], [8, 8, 6, *[1] * 12], [*[5] * 6, 1, 1, 2]):
        with apply(policy(**SHAPES[shape](model)), model) as run:
            found = streamed_logits(model, ids, chunks, own=own)
        events = run.events()
        assert (events.pos >= 0).all()
        for row, tokens in enumerate(rows):
            steps = step_of_each(chunks)[len(ids[0]) - len(tokens) :]
            expected = masked_logits(model, tokens, events[events.row == row], steps)
            torch.testing.assert_close(found[row, -len(tokens) :], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", ["uniform", "heads apart", "ragged"])
def test_padding_between_two_turns_is_no_token_either(shape: str) -> None:
    model, ids = family("llama"), token_ids(44, batch=2)
    own = torch.ones_like(ids)
    own[0, :6], own[0, 24:29], own[1, 22:24] = 0, 0, 0
    for chunks in ([20, *[1] * 2, 12, *[1] * 10], [20, 5, 5, 5, *[1] * 9]):
        with apply(policy(**SHAPES[shape](model)), model) as run:
            found = streamed_logits(model, ids, chunks, own=own)
        events, cached = run.events(), run.report().kept
        for row in range(2):
            real = own[row].bool()
            steps = step_of_each(chunks)[real]
            expected = masked_logits(model, ids[row, real], events[events.row == row], steps)
            torch.testing.assert_close(found[row, real], expected, atol=TOLERANCE, rtol=0)
            assert max(cached[0][row][0]) == int(real.sum()) - 1


@pytest.mark.parametrize("shape", ["even", "uneven", "pages"])
@pytest.mark.parametrize("scorer", TABLE)
def test_pitfall_15_a_row_whose_first_chunks_are_all_padding(scorer: str, shape: str) -> None:
    model, settings = family("llama"), SPARSE[shape]
    ids, own, rows = padded([14, 3, 9], 8)
    chunks = [2] * 11
    chosen = policy(scorer, tokens=5, protect={"sinks": 1}, **settled(scorer, settings))
    with apply(chosen, model) as run:
        found = streamed_logits(model, ids, chunks, own=own)
    events = run.events()
    for row, tokens in enumerate(rows):
        steps = step_of_each(chunks)[len(ids[0]) - len(tokens) :]
        expected = masked_logits(model, tokens, events[events.row == row], steps)
        torch.testing.assert_close(found[row, -len(tokens) :], expected, atol=TOLERANCE, rtol=0)


def test_pitfall_16_rows_do_not_share_what_they_keep() -> None:
    model = family("llama")
    ids, own, rows = padded([22, 9, 17], 12)
    for settings in ({}, {"tokens": None, "budget": {"keep_fraction": 0.5}}):
        chosen = policy("epikv", **settings)
        with apply(chosen, model) as run:
            streamed_logits(model, ids, [22, *[1] * 12], own=own)
        together = run.report().kept[0]
        for row, tokens in enumerate(rows):
            with apply(chosen, model) as alone:
                streamed_logits(model, tokens[None], [len(tokens) - 12, *[1] * 12])
            assert alone.report().kept[0][0] == together[row]


def test_eager_attention_gets_masks_it_understands() -> None:
    model = models.wrap(FAMILIES["qwen3"]())
    model.hf.set_attn_implementation("eager")
    model = models.wrap(model.hf)
    ids, own, rows = padded([22, 9], 12)
    chunks = [12, 10, *[1] * 8, 4]
    with apply(policy("keynorm", **uneven(model)), model) as run:
        found = streamed_logits(model, ids, chunks, own=own)
    events = run.events()
    for row, tokens in enumerate(rows):
        steps = step_of_each(chunks)[len(ids[0]) - len(tokens) :]
        expected = masked_logits(model, tokens, events[events.row == row], steps)
        torch.testing.assert_close(found[row, -len(tokens) :], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_same_bytes(dtype: torch.dtype) -> None:
    model = models.wrap(FAMILIES["llama"]().to(dtype))
    with apply(policy("keynorm", reduce="head"), model) as run:
        found = streamed_logits(model, token_ids(40), [20, *[1] * 20])
    report = run.report()
    assert found.isfinite().all()
    assert report.held_bytes == 12 * 3 * 2 * 2 * 8 * 2  # tokens, layers, KV heads, keys and values, d_head, bytes
