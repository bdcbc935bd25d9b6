"""What an evicting cache holds: bytes that are really given back, several questions, rows, and the disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from eviction import (
    TOGETHER,
    cache_keyword,
    masked_logits,
    padded,
    policy,
    refuses,
    same_logits,
    settled,
    step_of_each,
    streamed_logits,
    uneven,
    written,
)
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import FAMILIES, llama, token_ids
from transformers.cache_utils import DynamicCache

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.cache import HeldLayer, all_tensors, storage_bytes
from kvlens.scorers.table import TABLE

ONE = 2 * 2 * 8 * 4  # bytes of a token in one layer: KV heads, keys and values, d_head, float32


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def shapes(model: Model) -> dict[str, dict[str, Any]]:
    return {"uniform": {}, "ragged": {"storage": "ragged", **uneven(model)}, "padded": {**uneven(model)}}


# Bytes


def reachable_bytes(run: Run) -> int:
    """Bytes of every storage that hangs on the cache's layers and its ledger, found without the cache's own help."""
    found: dict[int, int] = {}

    def visit(value: Any, seen: set[int]) -> None:
        if id(value) in seen or isinstance(value, (str, int, float, type(None), type, Run)):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            [visit(part, seen) for part in value.values()]
        elif isinstance(value, (list, tuple)):
            [visit(part, seen) for part in value]
        elif hasattr(value, "__dict__"):
            visit(vars(value), seen)

    visit(run.cache, set())
    return sum(found.values())


@pytest.mark.parametrize("scorer", TABLE)
@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
def test_pitfalls_01_02_03_what_is_reported_is_what_is_stored(model: Model, shape: str, scorer: str) -> None:
    shape = "uniform" if scorer in TOGETHER else shape
    with apply(policy(scorer, **shapes(model)[shape]), model) as run:
        written(model, token_ids(60), 5)
    report = run.report()
    assert report.physical_bytes == report.held_bytes + report.side_bytes == reachable_bytes(run)
    kept = [len(head) for rows in report.kept.values() for row in rows for head in row]
    if shape == "uniform":
        assert report.held_bytes == report.claimed_bytes == 3 * 12 * ONE
    elif shape == "ragged":
        assert report.held_bytes == report.claimed_bytes == sum(kept) * ONE // 2  # a byte for each kept token, no more
        assert report.held_bytes < 3 * max(kept) * ONE
    else:
        assert report.held_bytes == sum(max(len(head) for head in rows[0]) for rows in report.kept.values()) * ONE
    assert report.full_bytes == 3 * 64 * ONE
    for layer in run.cache.layers:
        for tensor in (layer.keys, layer.values):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_pitfall_01_a_policy_that_only_masks_is_caught(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def view_only(layer: HeldLayer, index: torch.Tensor) -> None:
        """Keeps the right number of rows in sight and the whole storage alive."""
        layer.keys, layer.values = layer.keys[:, :, : index.shape[-1]], layer.values[:, :, : index.shape[-1]]
        layer._room = [layer.keys, layer.values]

    monkeypatch.setattr(HeldLayer, "evict", view_only)
    with apply(policy("keynorm", trigger="prefill"), model) as run:
        written(model, token_ids(60), 1)
    report = run.report()
    assert run.cache.layers[0].keys.shape[2] == 12
    assert report.held_bytes > 4 * report.claimed_bytes


def test_pitfall_02_growth_is_by_blocks_and_an_eviction_needs_no_second_cache() -> None:
    model = models.wrap(llama(max_position_embeddings=4096))
    with apply(policy("keynorm", tokens=64, trigger="every:512"), model) as run:
        streamed_logits(model, token_ids(200), [200])
        assert run.report().held_bytes == 3 * 200 * ONE
        streamed_logits(model, token_ids(201), [200, 1])
        assert run.report().held_bytes == 3 * (200 + 32) * ONE

        def fill() -> None:
            streamed_logits(model, token_ids(2048), [2048])

        fill()
        full = 3 * 2048 * ONE
        layer = run.cache.layers[0]
        index = torch.arange(64)[None, None]
        other = copy.deepcopy(layer)
        extra = peak_bytes(lambda: other.evict(index))
    assert run.report().full_bytes == full
    assert extra <= 64 * ONE + 2 * (64 + 1) * 8  # the kept rows and where they stood, never the layer again


def test_peak_memory_of_a_chunked_prefill_follows_the_budget() -> None:
    model = models.wrap(llama(max_position_embeddings=4096))
    ids = token_ids(1600)

    def prefill(n: int) -> None:
        with apply(policy("keynorm", tokens=64, trigger="prefill"), model, record=False):
            streamed_last(model, ids[:, :n], 100)

    short, long = peak_bytes(lambda: prefill(400)), peak_bytes(lambda: prefill(1600))
    assert long - short < 3 * 100 * ONE


def streamed_last(model: Model, ids: torch.Tensor, chunk: int) -> None:
    cache = models.new_cache(model)
    for part in ids.split(chunk, -1):
        with torch.no_grad():
            model.decoder(input_ids=part, use_cache=True, **{cache_keyword(model): cache})


# Several questions of one cache


@pytest.mark.parametrize("shape", ["uniform", "ragged"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pitfall_30_the_order_of_questions_changes_nothing(name: str, shape: str) -> None:
    model = models.wrap(FAMILIES[name]())
    context, one, two = token_ids(30), token_ids(5, seed=1), token_ids(8, seed=2)
    chosen = policy("epikv", **shapes(model)[shape])

    def ask(context_cache: Any, question: torch.Tensor) -> Any:
        ids = torch.cat([context, question], -1)
        return written(model, ids, 6, **{cache_keyword(model): copy.deepcopy(context_cache)})

    with apply(chosen, model) as run:
        streamed_logits(model, context, [30], DynamicCache(config=model.decoder.config))
        cache = run.cache
        bytes_before = storage_bytes(all_tensors(cache))
        first = ask(cache, one), ask(cache, two)
        second = ask(cache, two), ask(cache, one)
    assert same_logits(first[0], second[1])
    assert same_logits(first[1], second[0])
    assert storage_bytes(all_tensors(cache)) == bytes_before
    assert cache.get_seq_length() == 30


def test_a_second_turn_goes_on_under_a_new_run(model: Model) -> None:
    ids = token_ids(50)
    with apply(policy("epikv"), model) as whole:
        expected = streamed_logits(model, ids, [20, *[1] * 10, 15, *[1] * 5])
    with apply(policy("epikv"), model) as first:
        begun = streamed_logits(model, ids[:, :30], [20, *[1] * 10])
    with apply(policy("epikv"), model) as second:
        ended = streamed_logits(model, ids[:, 30:], [15, *[1] * 5], first.cache)
    assert torch.equal(torch.cat([begun, ended], 1), expected)
    assert second.report().kept == whole.report().kept
    with pytest.raises(InputError, match="was scored by"), apply(policy("keynorm"), model):
        streamed_logits(model, ids[:, :1], [1], first.cache)


@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
def test_outside_a_policy_a_cache_is_right_or_says_so(model: Model, shape: str) -> None:
    ids = token_ids(40)
    with apply(policy("keynorm", **shapes(model)[shape]), model) as run:
        streamed_logits(model, ids[:, :30], [30])
    if shape != "uniform":
        with pytest.raises(InputError, match=r"outside kvlens\.apply"):
            streamed_logits(model, ids[:, 30:], [10], run.cache)
        return
    found = streamed_logits(model, ids[:, 30:], [4, 1, 5], run.cache)[0]
    expected = masked_logits(model, ids[0], run.events(), step_of_each([30, 10]))[30:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


# Rows


@pytest.mark.parametrize("scorer", ["epikv", "surprise_fast", "h2o", "snapkv", "lagkv", "fitted"])
@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
def test_rows_move_with_positions_and_state(model: Model, shape: str, scorer: str) -> None:
    ids, own, _ = padded([22, 9, 17], 20)
    chunks, order = [22, *[1] * 8], torch.tensor([2, 0, 0])
    with apply(policy(scorer, **settled(scorer, shapes(model)[shape])), model) as run:
        streamed_logits(model, ids[:, :30], chunks, own=own[:, :30])
        plain, moved = copy.deepcopy(run.cache), copy.deepcopy(run.cache)
        moved.reorder_cache(order)
        more = {"own": own[:, :42]}

        def go_on(cache: Any, rows: torch.Tensor) -> torch.Tensor:
            outs = []
            for at in range(30, 42):
                with torch.no_grad():
                    out = model.decoder(
                        input_ids=ids[rows][:, at : at + 1],
                        attention_mask=more["own"][rows][:, : at + 1],
                        position_ids=(own[rows].cumsum(-1) - 1)[:, at : at + 1],
                        use_cache=True,
                        **{cache_keyword(model): cache},
                    )
                outs.append(out.last_hidden_state)
            return torch.cat(outs, 1)

        expected = go_on(plain, torch.arange(3))
        kept = run.report().kept
        torch.testing.assert_close(go_on(moved, order), expected[order], atol=1e-4, rtol=0)
        assert run.report().kept == {layer: [rows[i] for i in order] for layer, rows in kept.items()}


# The disk


@pytest.mark.parametrize("scorer", TABLE)
@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_evicted_cache_comes_back_whole(name: str, shape: str, scorer: str, tmp_path: Path) -> None:
    model = models.wrap(FAMILIES[name]())
    if refuses(model, scorer):
        pytest.skip("this model has sliding layers, which this scorer reads")
    ids, file = token_ids(50), tmp_path / "cache.safetensors"
    chosen = policy(scorer, **settled(scorer, shapes(model)[shape]))
    with apply(chosen, model) as run:
        cache = DynamicCache(config=model.decoder.config)
        begun = streamed_logits(model, ids[:, :30], [20, *[1] * 10], cache)
        run.save(file)
        expected = streamed_logits(model, ids[:, 30:], [*[1] * 10, 10], cache)
    with apply(chosen, model) as again:
        found = streamed_logits(model, ids[:, 30:], [*[1] * 10, 10], again.load(file))
    assert torch.equal(found, expected)
    assert begun.isfinite().all()
    assert again.report().kept == run.report().kept


def test_a_file_of_another_model_or_scorer_is_refused(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    with apply(policy("epikv"), model) as run:
        streamed_logits(model, token_ids(30), [30])
        run.save(file)
    with pytest.raises(InputError, match="whose scorer is"), apply(policy("keynorm"), model) as run:
        run.load(file)
    with (
        pytest.raises(InputError, match="whose model is"),
        apply(policy("epikv"), models.wrap(FAMILIES["gpt2"]())) as run,
    ):
        run.load(file)


@pytest.mark.parametrize(
    "damage", ["no file", "no safetensors", "no header", "a list", "a tensor gone", "a row too few", "far ends"]
)
def test_a_damaged_file_is_refused(model: Model, damage: str, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    chosen = policy("epikv", storage="ragged", **uneven(model))
    with apply(chosen, model) as run:
        streamed_logits(model, token_ids(30), [30])
        run.save(file)
        with safe_open(file, "pt") as opened:
            meta = json.loads(opened.metadata()["kvlens"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if damage == "no file":
            file.unlink()
        elif damage == "no safetensors":
            file.write_bytes(b"PK" + bytes(100))
        elif damage == "no header":
            save_file(tensors, file)
        elif damage == "a list":
            save_file(tensors, file, metadata={"kvlens": "[1]"})
        elif damage == "a tensor gone":
            del tensors["1.values"]
            save_file(tensors, file, metadata={"kvlens": json.dumps(meta)})
        elif damage == "a row too few":
            tensors["positions.0"] = tensors["positions.0"][..., 1:].contiguous()
            save_file(tensors, file, metadata={"kvlens": json.dumps(meta)})
        else:
            meta["layers"][0]["lengths"][0] = 10**9
            save_file(tensors, file, metadata={"kvlens": json.dumps(meta)})
        with pytest.raises(InputError):
            run.load(file)


DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows gone": lambda part: part[:1].clone(),
    "rows twice": lambda part: torch.cat([part, part]),
    "an axis more": lambda part: part[None].contiguous(),
}


@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
@pytest.mark.parametrize("damage", [*DAMAGES, "gone", "another dtype"])
def test_no_part_of_a_file_is_replaced_unnoticed(model: Model, shape: str, damage: str, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    with apply(policy("h2o", **shapes(model)[shape]), model) as run:
        streamed_logits(model, token_ids(30, batch=2), [29, 1])
        run.save(file)
        with safe_open(file, "pt") as opened:
            meta, whole = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for name, part in whole.items():
            changed = dict(whole)
            if damage == "gone":
                del changed[name]
            elif damage == "another dtype":  # whole numbers of another width do no harm, nor do counts in float64
                if not part.is_floating_point() or name.startswith("state"):
                    continue
                changed[name] = part.to(torch.float16)
            else:
                changed[name] = DAMAGES[damage](part)
            save_file(changed, file, metadata=meta)
            with pytest.raises(InputError):
                run.load(file)
