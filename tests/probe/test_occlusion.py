"""The fast engine against one full masked forward pass per window, on every family."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, N_VOCAB, as_tokens, gemma3, llama, mistral, token_ids
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model, wrap
from kvlens.probe.occlusion import (
    Counterfactual,
    Intervention,
    Occluder,
    filler_ids,
    make_batches,
    prefill,
    total_tokens,
    windows_of,
)
from kvlens.records import Tokens

TOLERANCE = 5e-6  # nats; models in float64, whose logits are rounded to float32
N_TARGET = 4
TOKENS = as_tokens(token_ids(26), N_TARGET)
LAST = TOKENS.n_context - 1
N_INPUTS = TOKENS.n_tokens - 1
INTERVENTIONS = {
    "evict": Intervention("evict"),
    "knockout": Intervention("knockout"),
    **{f"lag {k}": Intervention("evict", lag=k) for k in (0, 1, 5, 99)},
}


@cache
def model_of(family: str) -> Model:
    return wrap(FAMILIES[family]().double())


def cut_of(how: Intervention, window: tuple[int, int]) -> int:
    """From which position on queries miss the window, straight from the definitions."""
    if how.kind == "knockout":
        return window[1]
    return LAST if how.lag is None else min(window[1] + how.lag, LAST)


def log_probs(model: Model, how: Intervention, windows: list[tuple[int, int]], tokens: Tokens = TOKENS) -> Tensor:
    """Measured in the batches that a run would use."""
    engine = Occluder(model, tokens, how)
    all_of_them = [engine.counterfactual(window) for window in windows]
    found = torch.zeros(len(windows), tokens.n_target, dtype=torch.float64)
    for batch in make_batches([c.first for c in all_of_them], tokens.n_tokens - 1, rows=64):
        found[batch] = engine.run([all_of_them[i] for i in batch]).log_probs
    return found


def assert_close(ours: Tensor, truth: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, truth, atol=tolerance, rtol=0)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_hiding_against_a_full_pass(family: str, width: int) -> None:
    model, windows = model_of(family), windows_of(TOKENS, width, 3)
    for name, how in INTERVENTIONS.items():
        truth = [oracles.masked_log_probs(model, TOKENS, window, cut_of(how, window)) for window in windows]
        ours = log_probs(model, how, windows)
        assert_close(ours, torch.stack(truth))
        full = oracles.of_target(oracles.target_rows(model, TOKENS), TOKENS)
        assert (ours - full).abs().max() > 0.1, name


@pytest.mark.parametrize("family", FAMILIES)
def test_hiding_in_cells_against_a_full_pass(family: str) -> None:
    model, windows = model_of(family), windows_of(TOKENS, 3, 5)
    cells = np.random.default_rng(5).random((model.n_layers, model.n_heads)) < 0.4
    for how in (
        Intervention("evict", cells=cells),
        Intervention("knockout", cells=cells),
        Intervention("evict", lag=2, cells=cells),
    ):
        truth = [oracles.masked_log_probs(model, TOKENS, window, cut_of(how, window), cells) for window in windows]
        assert_close(log_probs(model, how, windows), torch.stack(truth))


@pytest.mark.parametrize("family", FAMILIES)
def test_substitute_against_a_full_pass(family: str) -> None:
    model = model_of(family)
    for width, how in ((1, Intervention("substitute")), (3, Intervention("substitute", filler="random", seed=4))):
        windows = windows_of(TOKENS, width, 3)
        fillers = [filler_ids(how, end - start, start, model) for start, end in windows]
        truth = [
            oracles.substituted_log_probs(model, TOKENS, window, ids)
            for window, ids in zip(windows, fillers, strict=True)
        ]
        assert_close(log_probs(model, how, windows), torch.stack(truth))


@pytest.mark.parametrize("family", FAMILIES)
def test_kl_and_metric_against_a_full_pass(family: str) -> None:
    def difference(logits: Tensor, targets: Tensor) -> Tensor:
        return logits[:, 0, targets[0]] - logits[:, 0, targets[1]]

    model, windows = model_of(family), windows_of(TOKENS, 2, 4)
    engine = Occluder(model, TOKENS, Intervention("knockout"), metric=difference)
    full = oracles.target_rows(model, TOKENS)
    found = engine.run([engine.counterfactual(window) for window in windows])
    assert found.metric is not None
    for i, window in enumerate(windows):
        rows = oracles.target_rows(model, TOKENS, range(*window), window[1])
        assert abs(float(found.kl_nats[i]) - oracles.kl_nats(full, rows)) < 2e-5
        one, two = (int(token) for token in TOKENS.ids[TOKENS.n_context :][:2])
        assert abs(float(found.metric[i]) - float(rows[0, one] - rows[0, two])) < TOLERANCE


@given(data=st.data(), family=st.sampled_from(["llama", "gemma3", "mistral", "gpt2"]))
@settings(max_examples=40, deadline=None)
def test_any_batch_of_any_counterfactuals_against_a_full_pass(data: st.DataObject, family: str) -> None:
    model = model_of(family)
    n_context, n_target = data.draw(st.integers(2, 30)), data.draw(st.integers(1, 6))
    seed = data.draw(st.integers(0, 999))
    draw = np.random.default_rng(seed)
    tokens = as_tokens(token_ids(n_context + n_target, seed=seed), n_target)
    n_inputs = tokens.n_tokens - 1
    batch, truth = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        first = data.draw(st.integers(0, n_context - 1))
        cut = data.draw(st.integers(first, n_inputs))
        hidden = draw.random(n_inputs) < draw.random()
        hidden[cut:] = False
        hidden[:: data.draw(st.integers(1, 3))] = False  # with 1 nothing is hidden
        ids = tokens.ids[:n_inputs].copy()
        if data.draw(st.booleans()):
            ids[first:] = draw.integers(3, N_VOCAB, n_inputs - first)
        batch.append(Counterfactual(first, cut, hidden, ids))
        rows = oracles.target_rows(model, tokens, np.flatnonzero(hidden), cut, ids=ids)
        truth.append(oracles.of_target(rows, tokens))
    found = Occluder(model, tokens, Intervention()).run(batch)
    assert_close(found.log_probs, torch.stack(truth), 2e-5)


# What must change nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_hiding_nothing_is_exactly_zero(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        engine = Occluder(wrap(FAMILIES[family]().to(dtype)), TOKENS, Intervention())
        for hidden in (None, np.zeros(N_INPUTS, dtype=bool)):
            found = engine.run([Counterfactual(LAST, LAST, hidden)])
            assert torch.equal(found.log_probs[0], engine.reference.log_probs)
            assert abs(float(found.kl_nats)) < 1e-5


def test_hiding_in_no_cell_is_exactly_zero() -> None:
    how = Intervention("evict", cells=np.zeros((3, 4), dtype=bool))
    engine = Occluder(wrap(llama()), TOKENS, how)
    assert torch.equal(engine.run([engine.counterfactual((3, 9))]).log_probs[0], engine.reference.log_probs)


@pytest.mark.parametrize("family", FAMILIES)
def test_batching_and_order_change_nothing(family: str) -> None:
    model = wrap(FAMILIES[family]())
    for kind in ("evict", "knockout", "substitute"):
        engine = Occluder(model, TOKENS, Intervention(kind))
        rows = [engine.counterfactual(window) for window in windows_of(TOKENS, 2, 2)]
        alone = torch.cat([engine.run([row]).log_probs for row in rows])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        for size in (3, len(rows)):
            shuffled = [engine.run([rows[i] for i in order[lo : lo + size]]) for lo in range(0, len(rows), size)]
            assert_close(torch.cat([part.log_probs for part in shuffled]), alone[order], 5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_knockout_of_everything_before_is_dropping_it(family: str) -> None:
    """Queries from `end` on then see keys from `end` on alone: the rest of the trace run by itself, positions kept."""
    model = model_of(family)
    ids = torch.from_numpy(TOKENS.ids[:N_INPUTS])[None]
    ours = log_probs(model, INTERVENTIONS["knockout"], [(0, end) for end in (1, 9, LAST)])
    for i, end in enumerate((1, 9, LAST)):
        with torch.no_grad():
            rest = models.logits(model, ids[:, end:], positions=torch.arange(end, N_INPUTS), last=N_TARGET)
        assert_close(ours[i], oracles.of_target(rest[0].double().log_softmax(-1), TOKENS))
    # and evicting all of [0, n - 1) leaves as little as knocking it out
    assert_close(log_probs(model, INTERVENTIONS["evict"], [(0, LAST)]), ours[2:])


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks_is_prefill_at_once(family: str) -> None:
    model = model_of(family)
    ids = torch.from_numpy(TOKENS.ids[:LAST])
    with torch.no_grad():
        whole, pieces = prefill(model, ids), prefill(model, ids, chunk=4)
        cache = models.new_cache(model)
        models.logits(model, ids[None], cache=cache)
    for ours, chunked, truth in zip(whole, pieces, models.cache_layers(cache), strict=True):
        for a, b, c in zip(ours, chunked, truth, strict=True):
            torch.testing.assert_close(a, c, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(b, c, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("build", [llama, gemma3, mistral])
def test_bf16_is_as_good_as_plain_bf16(build: Any) -> None:
    """Against the same weights in float64: at most twice the error of plain masked bf16 passes."""
    hf_model = build().to(torch.bfloat16)
    exact, model = wrap(copy.deepcopy(hf_model).double()), wrap(hf_model)
    windows = windows_of(TOKENS, 2, 2)
    truth = torch.stack([oracles.masked_log_probs(exact, TOKENS, window, LAST) for window in windows])
    plain = torch.stack([oracles.masked_log_probs(model, TOKENS, window, LAST) for window in windows])
    ours = log_probs(model, Intervention(), windows)
    assert (ours - truth).abs().mean() < 2 * (plain - truth).abs().mean()
    assert (ours - truth).abs().mean() < 0.3


# What is left behind


def snapshot(model: Model) -> Any:
    configs = {id(m.config): m.config for m in model.hf.modules() if hasattr(m, "config")}
    weights = {name: weight.clone() for name, weight in model.hf.state_dict().items()}
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.hf.modules())
    return [config._attn_implementation for config in configs.values()], sorted(ALL_ATTENTION_FUNCTIONS), hooks, weights


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_left_as_it_was_also_after_an_exception(family: str) -> None:
    model = wrap(FAMILIES[family]())
    ids = token_ids(12)
    before, was = model.hf(input_ids=ids).logits, snapshot(model)
    cells = np.eye(model.n_layers, model.n_heads, dtype=bool)
    for how in (*INTERVENTIONS.values(), Intervention("substitute"), Intervention("knockout", cells=cells)):
        log_probs(model, how, [(2, 4), (7, 9)])
    engine = Occluder(model, TOKENS, Intervention())
    broken = model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("from inside")))
    with pytest.raises(KeyError, match="from inside"):
        engine.run([engine.counterfactual((2, 4))])
    broken.remove()
    now = snapshot(model)
    assert now[:3] == was[:3]
    assert all(torch.equal(now[3][name], weight) for name, weight in was[3].items())
    assert torch.equal(model.hf(input_ids=ids).logits, before)


# Plans and refusals


def test_windows_lie_in_the_context_without_its_last_token() -> None:
    tokens = as_tokens(range(3, 14), 3)  # 8 context tokens
    assert windows_of(tokens, 1, 1) == [(i, i + 1) for i in range(7)]
    assert windows_of(tokens, 3, 2) == [(0, 3), (2, 5), (4, 7)]  # (6, 7) would only repeat the end of (4, 7)
    assert windows_of(tokens, 4, 2) == [(0, 4), (2, 6), (4, 7)]
    for width, stride in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="at least 1"):
            windows_of(tokens, width, stride)
    engine = Occluder(model_of("llama"), TOKENS, Intervention())
    for window in ((LAST, LAST + 1), (4, 4), (-1, 2), (5, LAST + 1)):
        with pytest.raises(InputError, match="is not inside"):
            engine.counterfactual(window)


@given(firsts=st.lists(st.integers(0, 40), min_size=1, max_size=40), rows=st.integers(1, 400), tail=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_batches_hold_every_row_once_and_stay_small(firsts: list[int], rows: int, tail: int) -> None:
    n_inputs = 40 + tail
    batches = make_batches(firsts, n_inputs, rows)
    assert sorted(i for batch in batches for i in batch) == list(range(len(firsts)))
    for batch in batches:
        head, furthest = min(firsts[i] for i in batch), max(firsts[i] for i in batch)
        assert len(batch) == 1 or len(batch) * (n_inputs - head) <= rows
        assert (furthest - head) * 8 <= n_inputs - head
    least = sum(n_inputs - first for first in firsts)
    assert least <= total_tokens(batches, firsts, n_inputs) <= least * 8 / 7 + 1e-9


def test_fillers_are_ordinary_seeded_and_of_their_kind() -> None:
    model = model_of("llama")
    many = filler_ids(Intervention("substitute"), 60, 7, model)
    assert len(set(many.tolist())) == 60
    assert np.array_equal(many, filler_ids(Intervention("substitute"), 60, 7, model))
    assert not np.array_equal(many, filler_ids(Intervention("substitute"), 60, 8, model))
    assert not np.array_equal(many, filler_ids(Intervention("substitute", seed=1), 60, 7, model))
    assert len(set(filler_ids(Intervention("substitute", filler="random"), 60, 7, model).tolist())) == 1
    assert set(filler_ids(Intervention("substitute", filler_id=9), 5, 7, model).tolist()) == {9}
    with pytest.raises(InputError, match="no pad token"):
        filler_ids(Intervention("substitute", filler="pad"), 5, 7, model)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kind": "ablate"}, "ablate"),
        ({"kind": "substitute", "filler": "noise"}, "noise"),
        ({"kind": "substitute", "cells": np.ones((3, 4), dtype=bool)}, "no sense"),
        ({"kind": "substitute", "lag": 3}, "no sense"),
        ({"kind": "knockout", "lag": 3}, "belongs to evict"),
        ({"kind": "evict", "lag": -1}, "lag -1"),
    ],
)
def test_interventions_that_mean_nothing_are_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        Intervention(**fields)
