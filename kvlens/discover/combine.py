"""What does a signal add to knowing the position, and what is the best linear score of streaming signals?

1. Features: every signal without layers, and of every per-layer signal its best layer, chosen on the traces that fit.
   A signal that position explains altogether (age), or that lacks too many tokens, is left out with its reason.
2. Two fits, tokens weighted so that each trace counts once: ridge to the rank of the effect within its trace, logistic
   to the top tenth by effect. Both always have a curve of the position, so that no signal is credited with it.
3. Cross-validation over whole traces; means, deviations and the choice of layers come from the traces that fit.
   Add-one: position + signal against position. Drop-one: all streaming signals against all but this. In held-out
   traces: Spearman of the ridge's prediction with the effect, AUC of the logistic's for the top tenth by effect.
4. `fitted.json`: the weights over all traces, of streaming signals alone (what a decoder knows of a token as it comes)
   and without the position's terms: a decoder does not know how far it is through a trace. `held_out.score` is what
   that score is worth, position partialled out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens import __version__
from kvlens.discover.inputs import LEAST_TOKENS, Labelled, Pair
from kvlens.errors import EnvironmentLacks
from kvlens.stats import (
    POSITION_DEGREE,
    OverTraces,
    auc,
    beyond_position,
    correlation,
    over_traces,
    ranks,
    spearman,
    top_share,
)
from kvlens.wording import extra

FITTED = "kvlens.fitted/1"
N_FOLDS = 5
TOP = 0.1
LEAST_KNOWN = 0.8  # of the tokens: a signal that is null in more of them would cost the others their tokens
# causal, and yet nothing that a decoder has at hand for every token
OUT_OF_REACH = {
    "attention_entropy": "needs attention weights, which no decoder under FlashAttention has",
    "surprisal": "needs the logits of every token, which a decoder asks of the last one alone",
}
SCORES = ("score_ridge_rho", "score_ridge_auc", "score_logistic_rho", "score_logistic_auc")
RIDGE, LOGISTIC = "rank of the effect within its trace", "top tenth of the trace's tokens by effect"


class Candidate(NamedTuple):
    """A signal that may be a feature: its values at the tokens that count, in the layers that some fold chooses."""

    name: str
    per_layer: bool
    causal: bool
    layers: list[int]  # the choice without each fold's traces, then the choice over all traces
    columns: dict[int, Float[np.ndarray, " token"]]
    known: Bool[np.ndarray, " token"]
    unfit: str


class Fit(NamedTuple):
    """Weights of both fits: first the position's terms, then one a feature, whose means and deviations these are."""

    layers: list[int]
    mean: Float[np.ndarray, " feature"]
    std: Float[np.ndarray, " feature"]
    ridge: Float[np.ndarray, " term"]
    logistic: Float[np.ndarray, " term"]


@dataclass(frozen=True)
class Combination:
    """By signal, what it adds and what leaving it out costs; and the document with the weights."""

    added: dict[str, dict[str, float]]
    document: dict[str, Any]


def folds_of(trace_ids: Sequence[str], seed: int) -> Int[np.ndarray, " trace"]:
    """The fold of each trace; the order of the traces does not matter."""
    folds = np.zeros(len(trace_ids), dtype=int)
    order = np.argsort(np.array(trace_ids))
    folds[order] = np.random.default_rng(seed).permutation(len(order)) % min(N_FOLDS, len(order))
    return folds


def candidate(
    pair: Pair,
    name: str,
    values: Float[np.ndarray, "row layer"],
    rho: Float[np.ndarray, "trace layer"],
    folds: Int[np.ndarray, " trace"],
) -> Candidate:
    """One signal of a pair of runs as a feature, with its best layer for each fold; `rho` is of each trace."""
    chosen = values[np.concatenate([trace.rows for trace in pair.traces])]
    known = np.isfinite(chosen).all(1)
    layers = [best_layer(rho[folds != fold]) for fold in range(folds.max() + 1)] + [best_layer(rho)]
    unfit = "" if np.isfinite(rho).any() else "constant, missing, or explained by position"
    if not unfit and known.mean() < LEAST_KNOWN:
        unfit = f"known at {known.mean():.0%} of the tokens only"
    columns = {layer: chosen[:, layer].copy() for layer in set(layers)}
    return Candidate(name, pair.per_layer(name), pair.causal(name) is True, layers, columns, known, unfit)


def best_layer(rho: Float[np.ndarray, "trace layer"]) -> int:
    """The layer with the largest |mean rho| over these traces; 0 where none has any."""
    known = np.isfinite(rho)
    mean = np.where(known, rho, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    return int(np.abs(mean).argmax())


def combine(pair: Pair, candidates: Sequence[Candidate], folds: Int[np.ndarray, " trace"], seed: int) -> Combination:
    """What every signal adds beyond position, and the score of streaming ones. Cost: a few fits a signal and fold."""
    table = Table(pair.traces, folds)
    usable = [one for one in candidates if not one.unfit]
    left_out = {one.name: one.unfit for one in candidates if one.unfit}
    added: dict[str, dict[str, float]] = {one.name: {} for one in candidates}
    left_out |= {one.name: reason for one in usable if (reason := _out_of_reach(one))}
    possible = len(pair.traces) > 1
    for one in usable if possible else ():
        without, with_it = (table.held_out(chosen, one.known) for chosen in ([], [one]))
        added[one.name] |= _differences("adds", with_it, without, seed)
    streaming, known = _jointly_known([one for one in usable if one.name not in left_out], len(table.trace), left_out)
    held_out = None
    if streaming and possible:
        everything, nothing = table.held_out(streaming, known), table.held_out([], known)
        for one in streaming:
            rest = table.held_out([other for other in streaming if other is not one], known)
            added[one.name] |= _differences("drops", everything, rest, seed)
        held_out = {
            "position": {name: _interval(nothing[name], seed) for name in ("rho", "auc")},
            "position_and_signals": {name: _interval(everything[name], seed) for name in ("rho", "auc")},
            "beyond_position": {name: _interval(everything[name] - nothing[name], seed) for name in ("rho", "auc")},
            "score": {name.removeprefix("score_"): _interval(everything[name], seed) for name in SCORES},
        }
    document = _document(pair, table, streaming, known)
    return Combination(added, document | {"held_out": held_out, "left_out": left_out, "seed": seed})


def _out_of_reach(one: Candidate) -> str:
    """Why a decoder does not have this signal of a token when it comes."""
    return OUT_OF_REACH.get(one.name, "") if one.causal else "reads tokens that come later, or is not marked causal"


def _jointly_known(
    streaming: Sequence[Candidate], n_tokens: int, left_out: dict[str, str]
) -> tuple[list[Candidate], Bool[np.ndarray, " token"]]:
    """The signals that are known together at enough tokens, and those tokens; the scarcest is left out first."""
    kept = list(streaming)
    while True:
        known = np.all([np.ones(n_tokens, dtype=bool), *(one.known for one in kept)], axis=0)
        if not kept or known.mean() >= LEAST_KNOWN:
            return kept, known
        scarcest = min(range(len(kept)), key=lambda number: int(kept[number].known.sum()))
        left_out[kept.pop(scarcest).name] = f"with it all are known together at {known.mean():.0%} of the tokens only"


class Table:
    """The tokens that count of all traces, one under the other: position's terms, targets, and the trace of each."""

    def __init__(self, traces: Sequence[Labelled], folds: Int[np.ndarray, " trace"]) -> None:
        self.folds = folds
        self.trace = np.repeat(np.arange(len(traces)), [len(trace.pos) for trace in traces])
        self.pos = np.concatenate([trace.pos for trace in traces])
        self.effect = np.concatenate([trace.effect for trace in traces])
        self.position = np.concatenate([_terms(trace.pos) for trace in traces])
        centred = [ranks(trace.effect) - (len(trace.pos) + 1) / 2 for trace in traces]
        self.rank = np.concatenate([rank / rank.std() for rank in centred])
        self.top = np.concatenate([top_share(trace.effect, TOP) for trace in traces])

    def fit(self, features: Sequence[Candidate], which: int, rows: Bool[np.ndarray, " token"]) -> Fit:
        """Both fits on these tokens, each feature in the layer that choice number `which` takes."""
        linear_model = require_sklearn()
        layers = [one.layers[which] for one in features]
        raw = self._raw(features, layers)[rows]
        mean, std = raw.mean(0), raw.std(0)
        std = np.where(std > 0, std, 1.0)
        design = np.hstack([self.position[rows], (raw - mean) / std])
        weight = 1 / np.bincount(self.trace[rows])[self.trace[rows]]
        weight = weight / weight.mean()
        ridge = linear_model.Ridge(alpha=1.0).fit(design, self.rank[rows], sample_weight=weight)
        logistic = linear_model.LogisticRegression(max_iter=1000).fit(design, self.top[rows], sample_weight=weight)
        return Fit(layers, mean, std, np.asarray(ridge.coef_), np.asarray(logistic.coef_)[0])

    def held_out(self, features: Sequence[Candidate], known: Bool[np.ndarray, " token"]) -> dict[str, np.ndarray]:
        """By measure, its value in every trace, by fits on the traces of other folds; NaN where a trace has too little.

        `rho` is of the ridge with the effect, `auc` of the logistic for the top tenth; `score_*` are of the features'
        part alone, beyond position.
        """
        found = {name: np.full(len(self.folds), np.nan) for name in ("rho", "auc", *SCORES)}
        n_terms = self.position.shape[1]
        for fold in range(self.folds.max() + 1):
            training = known & (self.folds != fold)[self.trace]
            if len(np.unique(self.top[training])) < 2:
                continue
            fit = self.fit(features, fold, training)
            standard = (self._raw(features, fit.layers) - fit.mean) / fit.std
            for trace in np.flatnonzero(self.folds == fold):
                rows = np.flatnonzero(known & (self.trace == trace))
                if len(rows) < LEAST_TOKENS:
                    continue
                effect, top, pos = self.effect[rows], self.top[rows], self.pos[rows]
                design = np.hstack([self.position[rows], standard[rows]])
                found["rho"][trace] = spearman((design @ fit.ridge)[:, None], effect)[0]
                found["auc"][trace] = auc((design @ fit.logistic)[:, None], top)[0]
                scores = np.stack([standard[rows] @ weights[n_terms:] for weights in (fit.ridge, fit.logistic)], 1)
                beyond = beyond_position(scores, pos)
                rho, area = correlation(beyond, beyond_position(effect[:, None], pos)), auc(beyond, top)
                for column, kind in enumerate(("ridge", "logistic")):
                    found[f"score_{kind}_rho"][trace] = rho[column]
                    found[f"score_{kind}_auc"][trace] = area[column]
        return found

    def _raw(self, features: Sequence[Candidate], layers: Sequence[int]) -> Float[np.ndarray, "token feature"]:
        columns = [one.columns[layer] for one, layer in zip(features, layers, strict=True)]
        return np.stack(columns, 1) if columns else np.zeros((len(self.trace), 0))


def require_sklearn() -> Any:
    """The module sklearn.linear_model. Raises: EnvironmentLacks without it."""
    try:
        import sklearn.linear_model
    except ImportError as error:
        raise EnvironmentLacks("combining signals needs scikit-learn", extra("lens")) from error
    return sklearn.linear_model


def _terms(pos: Int[np.ndarray, " pos"]) -> Float[np.ndarray, "pos term"]:
    """The position of each token within its trace, as the polynomials that `stats` partials out."""
    place = ranks(pos.astype(float))
    return np.polynomial.legendre.legvander(2 * (place - 1) / max(len(pos) - 1, 1) - 1, POSITION_DEGREE)[:, 1:]


def _document(
    pair: Pair, table: Table, features: Sequence[Candidate], known: Bool[np.ndarray, " token"]
) -> dict[str, Any]:
    """The weights over all traces, and what is needed to compute the features elsewhere."""
    labels, n_layers = pair.labels.meta, pair.n_layers()
    fit = table.fit(features, -1, known)
    n_terms = table.position.shape[1]
    rows = [
        {
            "signal": one.name,
            "layer": layer if one.per_layer else None,
            "depth": layer / n_layers if one.per_layer and n_layers else None,
            "mean": mean,
            "std": std,
            "ridge": ridge,
            "logistic": logistic,
        }
        for one, layer, mean, std, ridge, logistic in zip(
            features, fit.layers, fit.mean, fit.std, fit.ridge[n_terms:], fit.logistic[n_terms:], strict=True
        )
    ]
    return {
        "schema": FITTED,
        "kvlens_version": __version__,
        "score": "sum over the features of weight * (value - mean) / std; higher = keep",
        "targets": {"ridge": RIDGE, "logistic": LOGISTIC},
        "features": rows,
        "model": {**labels["model"], "n_layers": n_layers},
        "intervention": ", ".join(sorted(pair.labels.windows.intervention.unique())),
        "labels_config": labels["config"],
        "signals_config": pair.signals_meta["config"],
        "n_traces": len(pair.traces),
        "n_tokens": int(known.sum()),
        "input_hash": pair.input_hash(),
    }


def _differences(word: str, one: dict[str, np.ndarray], other: dict[str, np.ndarray], seed: int) -> dict[str, float]:
    """The interval of one minus the other, as columns of the ranking."""
    found: dict[str, float] = {}
    for name in ("rho", "auc"):
        interval = over_traces(one[name] - other[name], seed=seed)
        for end, value in (("", interval.mean), ("_low", interval.low), ("_high", interval.high)):
            found[f"{word}_{name}{end}"] = float(value)
    return found


def _interval(values: Float[np.ndarray, " trace"], seed: int) -> dict[str, float]:
    found: OverTraces = over_traces(values, seed=seed)
    return {"mean": float(found.mean), "low": float(found.low), "high": float(found.high), "n_traces": int(found.n)}
