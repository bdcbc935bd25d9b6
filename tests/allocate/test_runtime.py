"""Allocators at work: logits are those of the masked full cache, bytes those of `uniform`, totals exact."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from eviction import cache_keyword, masked_logits, padded, policy, step_of_each, streamed_logits, written
from tiny import FAMILIES, token_ids

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import BLOCK_TOKENS
from kvlens.runtime.ragged import RaggedLayer

TOLERANCE = 1e-4
CHUNKS = {
    "one token at a time": [20, *[1] * 20],
    "chunked prefill, then turns": [10, 10, 1, 1, 8, 1, 1, 1, 7],
}
HEAD = {"reduce": "head"}
NOTHING = {"sinks": 0, "recent": 0}


def shared(name: str, **parameters: Any) -> dict[str, Any]:
    return {"allocate": {"name": name, "parameters": parameters}}


SHAPES: dict[str, dict[str, Any]] = {
    "ragged by ada": {"scorer": "h2o", "storage": "ragged", **HEAD, **shared("ada")},
    "ragged by contour": {"scorer": "h2o", "storage": "ragged", **HEAD, **shared("contour", floor=4)},
    "ragged by contour of the last queries": {
        "scorer": "snapkv", "storage": "ragged", "trigger": "every:4", **HEAD, **shared("contour", floor=4)
    },
    "ragged by contour without a floor": {
        "scorer": "keynorm", "storage": "ragged", "protect": NOTHING, **HEAD, **shared("contour", floor=0)
    },
    "ragged by mass": {"scorer": "h2o", "storage": "ragged", "trigger": "every:3", **HEAD, **shared("contour_mass", floor=3)},  # noqa: E501
    "ragged by lag": {"scorer": "lagkv", "storage": "ragged", "trigger": "every:4", **HEAD, **shared("ada", alpha=0.5)},
    "padded contour": {"scorer": "keynorm", "storage": "padded", **HEAD, **shared("contour", floor=3)},
    "capped contour": {"scorer": "keynorm", "storage": "uniform_cap", **HEAD, **shared("contour", floor=3)},
    "pyramid of layers": {"scorer": "random", "reduce": "layer", **shared("pyramid", beta=4.0)},
    "ragged pyramid": {"scorer": "value_var", "storage": "ragged", **HEAD, **shared("pyramid")},
}  # fmt: skip


@functools.cache
def family(name: str) -> Model:
    return models.wrap(FAMILIES[name]())


def kept_counts(run: Any, row: int = 0) -> list[int]:
    """Tokens of every cell of a row."""
    kept, heads = run.report().kept, run.model.n_kv_heads
    return [len(kept[layer][row][h % len(kept[layer][row])]) for layer in run.layers for h in range(heads)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "llama_6_over_3", "qwen3", "gemma3", "gpt2"])
def test_evicted_is_masked(name: str, shape: str) -> None:
    model, ids = family(name), token_ids(40)
    plain = models.logits(model, ids)[0]
    for chunks in CHUNKS.values():
        with apply(policy(**SHAPES[shape]), model) as run:
            found = streamed_logits(model, ids, chunks)[0]
        expected = masked_logits(model, ids[0], run.events(), step_of_each(chunks))
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        assert (found - plain).abs().max() > 100 * TOLERANCE  # what left was of weight
        counts = kept_counts(run)
        assert len(set(counts)) > 1 or shape == "capped contour"
        if run.policy.every == 1:
            assert sum(counts) == 12 * len(counts) or shape == "capped contour"
        ragged = any(isinstance(run.cache.layers[layer], RaggedLayer) for layer in run.layers)
        assert ragged == (shape.startswith("ragged") and shape != "ragged pyramid")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pitfall_15_padded_rows_share_their_own_budgets(name: str, shape: str) -> None:
    model = family(name)
    ids, own, rows = padded([22, 9, 17], 12)
    for chunks in ([22, *[1] * 12], [8, 8, 6, *[1] * 12]):
        with apply(policy(**SHAPES[shape]), model) as run:
            found = streamed_logits(model, ids, chunks, own=own)
        events = run.events()
        for row, tokens in enumerate(rows):
            steps = step_of_each(chunks)[len(ids[0]) - len(tokens) :]
            expected = masked_logits(model, tokens, events[events.row == row], steps)
            torch.testing.assert_close(found[row, -len(tokens) :], expected, atol=TOLERANCE, rtol=0)
            with apply(policy(**SHAPES[shape]), model) as alone:
                streamed_logits(model, tokens[None], [len(tokens) - 12, *[1] * 12])
            if len(chunks) == 13:  # pitfall 16: each row as if alone
                assert {i: kept[0] for i, kept in alone.report().kept.items()} == {
                    i: kept[row] for i, kept in run.report().kept.items()
                }


@pytest.mark.parametrize("allocate", [("ada", {}), ("contour", {"floor": 3}), ("contour_mass", {"floor": 3})])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_ragged_bytes_are_those_of_uniform_within_a_block_a_head(name: str, allocate: tuple[str, Any]) -> None:
    model, ids = family(name), token_ids(110)
    chunks = [60, *[1] * 50]
    one = 2 * model.d_head * model.dtype.itemsize  # a token's key and value in one head
    held: dict[str, list[int]] = {}
    for kind in ("uniform", allocate[0]):
        share = shared(*allocate[:1], **allocate[1]) if kind != "uniform" else {}
        settings = {"storage": "ragged", "trigger": "every:8", **HEAD, **share}
        with apply(policy("h2o", tokens=16, **settings), model) as run:
            cache, start, sizes = models.new_cache(model), 0, []
            for n in chunks:
                more = {"position_ids": torch.arange(start, start + n)[None], cache_keyword(model): cache}
                with torch.no_grad():
                    model.hf(ids[:, start : start + n], use_cache=True, **more)
                start += n
                sizes.append(run.report().held_bytes)
        held[kind] = sizes
    cells = len([w for w in model.sliding if w is None]) * model.n_kv_heads
    ours = held[allocate[0]]
    assert ours[0] == held["uniform"][0] == 16 * cells * one  # just evicted: exactly
    for step, (a, b) in enumerate(zip(ours, held["uniform"], strict=True)):
        assert abs(a - b) <= BLOCK_TOKENS * cells * one, step


def test_a_capped_head_holds_no_more_than_the_budget_and_padded_is_as_wide_as_the_widest() -> None:
    model, ids = family("llama"), token_ids(60)
    found = {}
    for storage in ("ragged", "padded", "uniform_cap"):
        settings = {"storage": storage, "trigger": "prefill", **HEAD, **shared("contour", floor=3)}
        with apply(policy("keynorm", **settings), model) as run:
            written(model, ids, 1)
        report = run.report()
        counts = torch.tensor(kept_counts(run)).view(3, 2)
        found[storage] = counts, report.held_bytes
        assert report.claimed_bytes == 12 * 6 * 2 * 8 * 4
    (ragged, ragged_bytes), (padded_, padded_bytes), (capped, capped_bytes) = found.values()
    assert torch.equal(ragged, padded_)
    assert torch.equal(capped, ragged.clamp(max=12))
    assert int(ragged.sum()) == 72 > int(capped.sum())
    assert ragged_bytes == int(ragged.sum()) * 64
    assert padded_bytes == int(ragged.max(-1).values.sum()) * 2 * 64 > ragged_bytes
    assert capped_bytes == int(capped.max(-1).values.sum()) * 2 * 64 <= ragged_bytes


def test_a_capped_head_is_cut_even_where_the_total_would_fit() -> None:
    hf = FAMILIES["llama"]()
    with torch.no_grad():  # keynorm wants none of this layer's keys, so all layers together stay below the budget
        hf.model.layers[1].self_attn.k_proj.weight *= 30
    model = models.wrap(hf)
    settings = {"storage": "uniform_cap", **HEAD, **shared("contour", floor=3)}
    with apply(policy("keynorm", **settings), model) as run:
        streamed_logits(model, token_ids(40), [30, *[1] * 10])
    assert run.cache.layers[1].n_held < 12  # room that the others may not take
    assert run.log.most_held == 12


def test_a_floor_counts_as_recent_tokens_wherever_a_budget_is_made() -> None:
    model = family("llama")
    with pytest.raises(
        InputError, match=r"recent 32 \(the floor of allocate contour: contour:floor=N sets it\) do not fit into 12"
    ):
        policy("h2o", **HEAD, **shared("contour"))
    one = 3 * 2 * 2 * 8 * 4
    settings = {"budget": {"bytes": 33 * one}, **HEAD, **shared("contour")}
    with pytest.raises(InputError, match="too few") as caught, apply(policy("h2o", **settings), model):
        pass
    assert f"{34 * one:,}" in caught.value.hint
    settings = {"budget": {"keep_fraction": 0.1}, "storage": "ragged", **HEAD, **shared("contour")}
    with apply(policy("h2o", **settings), model) as run:
        streamed_logits(model, token_ids(60), [60])
    assert set(kept_counts(run)) == {34}  # .1 of 60 tokens is less than what stays anyhow
    assert run.report().kept[0][0][0] == [0, 1, *range(28, 60)]


def test_a_scorer_that_is_no_mass_is_refused_before_any_layer_is_touched() -> None:
    model = family("llama")
    chosen = policy("keynorm", **HEAD, **shared("contour_mass", floor=2))
    with apply(chosen, model) as run, pytest.raises(InputError, match="reads scores as a mass"):
        written(model, token_ids(30), 2)
    assert {run.cache.layers[layer].n_held for layer in run.layers} == {30}


def test_a_ragged_cache_of_contour_is_saved_and_goes_on(tmp_path: Any) -> None:
    model, ids = family("llama"), token_ids(40)
    settings = {"storage": "ragged", **HEAD, **shared("contour", floor=3)}
    chosen = policy("h2o", **settings)
    with apply(chosen, model) as whole:
        expected = streamed_logits(model, ids, [20, *[1] * 20])
    with apply(chosen, model) as first:
        streamed_logits(model, ids[:, :30], [20, *[1] * 10])
        first.save(tmp_path / "cache.safetensors")
    with apply(chosen, model) as second:
        cache = second.load(tmp_path / "cache.safetensors")
        found = streamed_logits(model, ids[:, 30:], [1] * 10, cache=cache)
    assert torch.equal(found, expected[:, 30:])
    assert second.report().kept == whole.report().kept


@pytest.mark.parametrize("scorer", ["keynorm", "h2o", "snapkv"])
@pytest.mark.parametrize("storage", ["ragged", "padded"])
def test_pitfall_18_a_head_may_end_up_with_nothing(storage: str, scorer: str) -> None:
    hf = FAMILIES["llama"]()
    with torch.no_grad():  # one head's keys are so loud that keynorm wants none, and their queries ask for one token
        hf.model.layers[1].self_attn.k_proj.weight[8:] *= 30
    model, ids = models.wrap(hf), token_ids(40, batch=2)
    own = torch.ones_like(ids)
    own[0, :5], own[1, 25:27] = 0, 0  # padding on the left, and between turns
    settings = {"storage": storage, "protect": NOTHING, "tokens": 5, **HEAD, **shared("contour", floor=0)}
    chunks = [20, 1, 1, 3, 2, *[1] * 13]
    with apply(policy(scorer, **settings), model) as run:
        found = streamed_logits(model, ids, chunks, own=own)
    if scorer == "keynorm":
        assert kept_counts(run)[3] == 0 < max(kept_counts(run))
    for row in range(2):
        real = own[row].bool()
        events = run.events()
        expected = masked_logits(model, ids[row, real], events[events.row == row], step_of_each(chunks)[real])
        torch.testing.assert_close(found[row, real], expected, atol=TOLERANCE, rtol=0)
