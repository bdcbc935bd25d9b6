"""The keystone identity: hiding keys by a mask == deleting their rows == masking TransformerLens' attention scores.

The rule for sliding-window layers: a layer sees the last `window` positions and no others. A key that has left that
window is invisible there already, so hiding it changes nothing there; rows are deleted by position, and a mask over
the remaining keys' true positions keeps the window where it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import numpy as np
import oracles
import pytest
import torch
from lenses import require_transformer_lens, tiny_lens
from tiny import FAMILIES, WINDOW, as_tokens, llama, token_ids
from torch import Tensor

from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, wrap
from kvlens.probe.deletion import DeletionOccluder
from kvlens.probe.occlusion import Counterfactual, Intervention, Occluder

# Nats, on log-probs of -1 to -15. Models in float64 leave the rounding of float32 logits; in float32 these models,
# drawn wide, amplify the rounding of every layer.
TOLERANCE = {torch.float64: 3e-6, torch.float32: 2e-5}
N_TARGET = 5
TOKENS = as_tokens(token_ids(30), N_TARGET)
LAST = TOKENS.n_context - 1
WINDOWS = [(0, 1), (4, 5), (6, 9), (LAST - 4, LAST - 1), (LAST - 1, LAST), (0, LAST)]
EVICT = Intervention("evict")


@cache
def model_of(family: str, dtype: torch.dtype = torch.float64) -> Model:
    return wrap(FAMILIES[family]().to(dtype))


def hide(hidden: Sequence[int] | np.ndarray) -> Counterfactual:
    """Evicts these positions at the end of the context."""
    mask = np.zeros(TOKENS.n_tokens - 1, dtype=bool)
    mask[hidden] = True
    return Counterfactual(LAST, LAST, mask)


def some_cells(model: Model) -> dict[str, np.ndarray]:
    cells = np.zeros((4, model.n_layers, model.n_heads), dtype=bool)
    cells[0, 1] = True  # one layer
    cells[1, -2:] = True  # the last two
    cells[2, :, 2] = True  # one head of every layer
    cells[3] = np.random.default_rng(0).random(cells.shape[1:]) < 0.5
    return dict(zip(("layer 1", "last layers", "head 2", "random"), cells, strict=True))


def assert_close(ours: Tensor, truth: Tensor, dtype: torch.dtype = torch.float64) -> None:
    torch.testing.assert_close(ours, truth, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_deletion(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    truth = torch.stack([oracles.masked_log_probs(model, TOKENS, window, LAST) for window in WINDOWS])
    for kind in (Occluder, DeletionOccluder):
        engine = kind(model, TOKENS, EVICT)
        found = engine.run([engine.counterfactual(window) for window in WINDOWS])
        assert_close(found.log_probs, truth, dtype)
        full = oracles.of_target(oracles.target_rows(model, TOKENS), TOKENS)
        assert_close(engine.reference.log_probs, full, dtype)
    assert (truth[-2] - engine.reference.log_probs).abs().max() > 0.1  # the last key moves every family


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_deletion_for_any_set_of_keys(family: str) -> None:
    model = model_of(family)
    kept = np.random.default_rng(1).random((6, LAST)) < np.array([0.1, 0.3, 0.5, 0.5, 0.7, 0.9])[:, None]
    sets = [np.flatnonzero(~row) for row in kept]
    truth = [oracles.of_target(oracles.target_rows(model, TOKENS, hidden, LAST), TOKENS) for hidden in sets]
    for kind in (Occluder, DeletionOccluder):
        found = kind(model, TOKENS, EVICT).run([hide(hidden) for hidden in sets])
        assert_close(found.log_probs, torch.stack(truth))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_hooks(family: str) -> None:
    require_transformer_lens()
    lens = tiny_lens(family)
    for window in WINDOWS:
        truth = oracles.masked_log_probs(lens.model, TOKENS, window, LAST)
        assert_close(torch.from_numpy(lens.evict(TOKENS, window).log_probs), truth, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_the_engine_over_layers_and_heads(family: str) -> None:
    model = model_of(family)
    for cells in some_cells(model).values():
        truth = [oracles.masked_log_probs(model, TOKENS, window, LAST, cells) for window in WINDOWS]
        engine = Occluder(model, TOKENS, Intervention("evict", cells=cells))
        found = engine.run([engine.counterfactual(window) for window in WINDOWS])
        assert_close(found.log_probs, torch.stack(truth))


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_are_the_engine_over_layers_and_heads(family: str) -> None:
    require_transformer_lens()
    lens = tiny_lens(family)
    for cells in some_cells(lens.model).values():
        engine = Occluder(lens.model, TOKENS, Intervention("evict", cells=cells))
        for window in WINDOWS[1::2]:
            ours = engine.run([engine.counterfactual(window)]).log_probs[0]
            by_hooks = lens.evict(TOKENS, window, cells)
            assert_close(ours, torch.from_numpy(by_hooks.log_probs), torch.float32)
            effect = float((engine.reference.log_probs - ours).sum())
            assert abs(effect - by_hooks.effect_nats) < 2 * N_TARGET * TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_the_backend_does_not_matter(family: str, backend: str) -> None:
    hf_model = FAMILIES[family]()
    hf_model.set_attn_implementation(backend)
    model = wrap(hf_model)
    assert model.attention == backend
    truth = torch.stack([oracles.masked_log_probs(model_of(family), TOKENS, window, LAST) for window in WINDOWS])
    for kind in (Occluder, DeletionOccluder):
        engine = kind(model, TOKENS, EVICT)
        found = engine.run([engine.counterfactual(window) for window in WINDOWS])
        assert_close(found.log_probs, truth, torch.float32)


# The rule for sliding windows


def test_a_key_that_left_every_window_is_hidden_already() -> None:
    """Mistral's layers all slide: a key `window` back from the last context token is out of the target's sight."""
    model = model_of("mistral")
    gone, oldest = LAST - WINDOW, LAST - WINDOW + 1
    full = oracles.of_target(oracles.target_rows(model, TOKENS), TOKENS)
    for kind in (Occluder, DeletionOccluder):
        engine = kind(model, TOKENS, EVICT)
        for hidden in ([gone], range(gone + 1)):
            assert_close(engine.run([hide(hidden)]).log_probs[0], full)
        assert (engine.run([hide([oldest])]).log_probs[0] - full).abs().max() > 0.01
    engine = Occluder(model, TOKENS, EVICT)
    assert torch.equal(engine.run([hide([gone])]).log_probs[0], engine.reference.log_probs)
    # knockout also cuts the reads that were made while the key was in sight
    knocked_out = oracles.masked_log_probs(model, TOKENS, (gone, gone + 1), gone + 1)
    assert (knocked_out - full).abs().max() > 0.01


def test_a_key_that_left_the_window_is_hidden_already_by_hooks() -> None:
    require_transformer_lens()
    lens = tiny_lens("mistral")
    gone = LAST - WINDOW
    assert abs(lens.evict(TOKENS, (gone, gone + 1)).effect_nats) < TOLERANCE[torch.float32]
    assert abs(lens.evict(TOKENS, (gone + 1, gone + 2)).effect_nats) > 0.01


def test_sliding_and_full_layers_side_by_side() -> None:
    """Gemma3: a key outside the window matters through the full layers alone."""
    model = model_of("gemma3")
    slides = np.array([window is not None for window in model.sliding])
    key = (LAST - WINDOW, LAST - WINDOW + 1)
    lost = {}
    for name, layers in (("all", slides | ~slides), ("sliding", slides), ("full", ~slides)):
        cells = np.repeat(layers[:, None], model.n_heads, 1)
        engine = Occluder(model, TOKENS, Intervention("evict", cells=cells))
        lost[name] = engine.reference.log_probs - engine.run([engine.counterfactual(key)]).log_probs[0]
    assert torch.equal(lost["sliding"], torch.zeros(N_TARGET, dtype=torch.float64))
    assert_close(lost["full"], lost["all"])
    assert lost["full"].abs().max() > 0.01


# What deletion cannot do


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (Intervention("knockout"), "knockout"),
        (Intervention("evict", lag=2), "a lag"),
        (Intervention("evict", cells=np.ones((3, 4), dtype=bool)), "layers and heads"),
    ],
)
def test_deletion_refuses_what_needs_a_mask(how: Intervention, what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        DeletionOccluder(model_of("llama"), TOKENS, how)
    assert "sdpa" in caught.value.hint


def test_deletion_refuses_keys_that_are_read_before_they_go() -> None:
    engine = DeletionOccluder(model_of("llama"), TOKENS, EVICT)
    mask = hide([LAST - 1]).hidden
    for first, cut in ((LAST - 1, LAST - 1), (LAST - 3, LAST)):
        with pytest.raises(InputError, match="before the first recomputed token"):
            engine.run([Counterfactual(first, cut, mask)])


def test_deletion_passes_no_mask_and_so_runs_where_masks_are_ignored() -> None:
    """A name is enough here: any mask handed to this model would be refused."""
    unmasked = dataclasses.replace(model_of("llama"), attention="flash_attention_2")
    for how in (EVICT, Intervention("substitute")):
        ours, truth = DeletionOccluder(unmasked, TOKENS, how), Occluder(model_of("llama"), TOKENS, how)
        batch = [ours.counterfactual(window) for window in WINDOWS]
        assert_close(ours.run(batch).log_probs, truth.run(batch).log_probs)


def test_sliding_layers_without_masks_are_refused_by_name() -> None:
    unmasked = dataclasses.replace(wrap(FAMILIES["mistral"]().double()), attention="flash_attention_2")
    with pytest.raises(ModelRefused, match=r"sliding-window layers.*flash_attention_2"):
        DeletionOccluder(unmasked, TOKENS, EVICT)
    engine = DeletionOccluder(unmasked, TOKENS, Intervention("substitute"))
    batch = [engine.counterfactual(window) for window in WINDOWS]
    truth = Occluder(model_of("mistral"), TOKENS, Intervention("substitute")).run(batch)
    assert_close(engine.run(batch).log_probs, truth.log_probs)


def test_deletion_copies_rows_and_leaves_the_prefix_alone() -> None:
    engine = DeletionOccluder(wrap(llama().double()), TOKENS, EVICT)
    saved = [(keys.clone(), values.clone()) for keys, values in engine.prefix]
    once = engine.run([engine.counterfactual(window) for window in WINDOWS])
    again = engine.run([engine.counterfactual(window) for window in reversed(WINDOWS)])
    assert_close(again.log_probs.flip(0), once.log_probs)
    assert_close(again.kl_nats.flip(0), once.kl_nats)
    for (keys, values), (old_keys, old_values) in zip(engine.prefix, saved, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


def test_deletion_prefills_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("llama", "gemma3"):
        whole = DeletionOccluder(model_of(family), TOKENS, EVICT)
        monkeypatch.setattr("kvlens.probe.deletion.PREFILL_CHUNK", 7)
        pieces = DeletionOccluder(model_of(family), TOKENS, EVICT)
        monkeypatch.undo()
        for (keys, values), (other_keys, other_values) in zip(whole.prefix, pieces.prefix, strict=True):
            torch.testing.assert_close(keys, other_keys, atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(values, other_values, atol=1e-4, rtol=1e-5)
        assert_close(pieces.reference.log_probs, whole.reference.log_probs)
