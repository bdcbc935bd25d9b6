"""What do many keys matter together? Random keep-masks, and a linear surrogate fitted to their effects.

Leave-one-out misses redundancy: two copies of a fact each score 0. So:

1. draw K keep-masks over the context, each position kept with probability .9; the attention sink at position 0 and
   the last context token are always kept (the sink alone would drown everything else);
2. measure the effect of evicting what each mask drops, exactly, at the end of the context;
3. fit effect = sum of weights over dropped positions by ridge regression; report cross-validated R2 and the rank
   agreement of the weights with leave-one-out effects.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvlens.errors import EnvironmentLacks
from kvlens.probe.occlusion import Counterfactual
from kvlens.records import Tokens
from kvlens.wording import extra

KEEP_PROBABILITY = 0.9
LEAST_SUBSETS = 10  # for five folds of two


def draw_masks(tokens: Tokens, n_subsets: int, seed: int) -> Bool[np.ndarray, "subset pos"]:
    """Random keep-masks (True = kept) over the context positions, seeded by (seed, trace id)."""
    entropy = (seed, *tokens.trace.id.encode())
    kept = np.random.default_rng(entropy).random((n_subsets, tokens.n_context)) < KEEP_PROBABILITY
    kept[:, 0] = kept[:, -1] = True
    return kept


def as_counterfactual(tokens: Tokens, kept: Bool[np.ndarray, " pos"]) -> Counterfactual:
    """The counterfactual that evicts what a mask drops, at the end of the context."""
    hidden = np.zeros(tokens.n_tokens - 1, dtype=bool)
    hidden[: tokens.n_context] = ~kept
    last = tokens.n_context - 1
    return Counterfactual(first=last, cut=last, hidden=hidden)


def require_surrogate() -> None:
    """Nothing; raises EnvironmentLacks where the package that fits the surrogate is missing."""
    if importlib.util.find_spec("sklearn") is None:
        raise EnvironmentLacks("the surrogate of --random-subsets needs scikit-learn", extra("lens"))


def fit_surrogate(
    kept: Bool[np.ndarray, "subset pos"],
    effects: Float[np.ndarray, " subset"],
    token_effects: Float[np.ndarray, " pos"],
) -> dict[str, Any]:
    """R2 (5-fold, out of fold), rank agreement with leave-one-out, and the ridge's strength.

    `token_effects` may hold NaN where no window covers a position. Null values where there is too little to say, and
    the `reason`: too few masks, or effects that do not vary.
    """
    from scipy.stats import spearmanr
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import KFold, cross_val_predict

    empty = {"n_subsets": len(effects), "r2": None, "rank_agreement": None, "alpha": None}
    if len(effects) < LEAST_SUBSETS:
        return empty | {"reason": f"{len(effects)} sets a trace are too few, {LEAST_SUBSETS} are needed"}
    dropped = (~kept).astype(float)
    varied = dropped.std(0) > 0
    if not varied.any() or float(np.std(effects)) == 0.0:
        return empty | {"reason": "the sets or their effects do not vary"}
    ridge = RidgeCV(alphas=np.logspace(-2, 5, 15))
    folds = KFold(5, shuffle=True, random_state=0)
    predicted = cross_val_predict(ridge, dropped, effects, cv=folds)
    r2 = 1 - float(((effects - predicted) ** 2).sum() / ((effects - effects.mean()) ** 2).sum())
    weights = ridge.fit(dropped, effects).coef_
    known = varied & np.isfinite(token_effects)
    agreement = None
    if known.sum() >= 3 and np.ptp(token_effects[known]) > 0:
        agreement = float(spearmanr(weights[known], token_effects[known]).statistic)
    return empty | {"r2": r2, "rank_agreement": agreement, "alpha": float(ridge.alpha_)}
