"""Random keep-masks and their surrogate: are masks what they claim, and does the fit find what was planted?"""

from __future__ import annotations

import importlib.util

import numpy as np
import oracles
import pytest
import tiny
import tiny_runs

from kvlens.errors import EnvironmentLacks
from kvlens.model import wrap
from kvlens.probe.occlusion import Intervention, Occluder
from kvlens.probe.subsets import as_counterfactual, draw_masks, fit_surrogate, require_surrogate
from kvlens.texts import tokenize

TOKENS = tokenize(tiny_runs.as_trace(tiny_runs.BOX), tiny_runs.model().tokenizer)


def test_masks_come_from_seed_and_id_alone() -> None:
    kept = draw_masks(TOKENS, 400, seed=3)
    assert kept.shape == (400, TOKENS.n_context)
    assert np.array_equal(kept, draw_masks(TOKENS, 400, seed=3))
    assert np.array_equal(kept[:20], draw_masks(TOKENS, 20, seed=3))
    assert not np.array_equal(kept, draw_masks(TOKENS, 400, seed=4))
    other = tokenize(tiny_runs.as_trace(tiny_runs.BOX | {"id": "other"}), tiny_runs.model().tokenizer)
    assert not np.array_equal(kept, draw_masks(other, 400, seed=3))


def test_masks_keep_nine_of_ten_and_the_ends_always() -> None:
    kept = draw_masks(TOKENS, 400, seed=0)
    assert kept[:, [0, -1]].all()
    assert abs(kept[:, 1:-1].mean() - 0.9) < 0.01
    assert (np.abs(kept[:, 1:-1].mean(0) - 0.9) < 0.08).all()


def test_a_mask_evicts_exactly_what_it_drops() -> None:
    model = wrap(tiny.llama().double())
    tokens = tiny.as_tokens(tiny.token_ids(24), 4)
    engine = Occluder(model, tokens, Intervention("evict"))
    kept = draw_masks(tokens, 5, seed=1)
    found = engine.run([as_counterfactual(tokens, mask) for mask in kept]).log_probs
    for mask, row in zip(kept, found, strict=True):
        rows = oracles.target_rows(model, tokens, np.flatnonzero(~mask), cut=tokens.n_context - 1)
        assert np.allclose(row.numpy(), oracles.of_target(rows, tokens).numpy(), atol=3e-6)


def planted(n_subsets: int, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks, the effects of known weights, and the weights."""
    random = np.random.default_rng(0)
    kept = random.random((n_subsets, 30)) < 0.9
    kept[:, 0] = kept[:, -1] = True
    weights = random.normal(size=30)
    return kept, (~kept) @ weights + noise * random.normal(size=n_subsets), weights


def test_planted_linear_effects_are_found() -> None:
    kept, effects, weights = planted(400)
    found = fit_surrogate(kept, effects, weights)
    assert found["n_subsets"] == 400
    assert found["r2"] > 0.999
    assert found["rank_agreement"] > 0.99
    assert fit_surrogate(kept, effects, -weights)["rank_agreement"] < -0.99


def test_r2_is_out_of_fold() -> None:
    """With twice as many masks as positions a fit explains its own masks far better than it predicts others."""
    kept, effects, weights = planted(60, noise=1.0)
    dropped = (~kept).astype(float)
    own = effects - dropped @ np.linalg.lstsq(dropped, effects, rcond=None)[0]
    assert 1 - own.var() / effects.var() > 0.75
    assert 0 < fit_surrogate(kept, effects, weights)["r2"] < 0.6


def test_positions_without_a_label_take_no_part_in_the_agreement() -> None:
    kept, effects, weights = planted(400)
    alone = weights.copy()
    alone[5:25] = np.nan
    assert fit_surrogate(kept, effects, alone)["rank_agreement"] > 0.98
    alone[2:] = np.nan
    assert fit_surrogate(kept, effects, alone)["rank_agreement"] is None


@pytest.mark.parametrize("n_subsets", [1, 9])
def test_too_few_masks_say_nothing(n_subsets: int) -> None:
    kept, effects, weights = planted(n_subsets)
    found = fit_surrogate(kept, effects, weights)
    assert found.pop("reason") == f"{n_subsets} sets a trace are too few, 10 are needed"
    assert found == {"n_subsets": n_subsets, "r2": None, "rank_agreement": None, "alpha": None}


def test_effects_that_do_not_vary_say_nothing() -> None:
    kept, _, weights = planted(50)
    assert fit_surrogate(kept, np.full(50, 2.0), weights)["r2"] is None
    assert "do not vary" in fit_surrogate(kept, np.full(50, 2.0), weights)["reason"]
    assert fit_surrogate(np.ones_like(kept), np.arange(50.0), weights)["r2"] is None


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    require_surrogate()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacks, match="scikit-learn"):
        require_surrogate()
