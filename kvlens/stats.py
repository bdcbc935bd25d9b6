"""What do many traces say together? Rank correlations inside a trace, and inference over traces.

1. Inside a trace: average-tie ranks; Spearman of every layer with one label; the same once position is partialled out,
   that is, with what a polynomial of degree 4 in the rank of the position explains taken out of both rankings (a line
   leaves the shared curvature of two trends behind, and that looks like a correlation; a cubic leaves that of a steep
   hump: experiments/02_band_power.py); AUC with ties.
2. Over traces: tokens inside a trace are not independent, so the trace is the unit. Intervals come from resampling
   whole traces, tests from flipping the sign of whole traces.

A correlation without meaning (something is constant, or position explains all of it) is NaN inside a trace, and left
out, never spread, over traces.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.errors import EnvironmentLacks
from kvlens.wording import extra

POSITION_DEGREE = 4
LEVEL = 0.05
N_DRAWS = 4096
NOTHING_LEFT = 1e-9  # of the variance of ranks: below it, only rounding is left
LEAST_VARIANCE = 1e-12  # of a mean correlation: traces that agree to the last digit give a large t, not an infinite one
SAME = 1 - 1e-9  # a mirrored pattern of signs gives the same |t| but for rounding


class OverTraces(NamedTuple):
    """A mean over traces with its 95 % interval (NaN under two traces), and how many traces are in it."""

    mean: Float[np.ndarray, "..."]
    low: Float[np.ndarray, "..."]
    high: Float[np.ndarray, "..."]
    n: Int[np.ndarray, "..."]


def require_scipy() -> Any:
    """The module scipy.stats. Raises: EnvironmentLacks without it."""
    try:
        import scipy.stats
    except ImportError as error:
        raise EnvironmentLacks("rank statistics need scipy", extra("lens")) from error
    return scipy.stats


def ranks(values: Float[np.ndarray, "pos ..."]) -> Float[np.ndarray, "pos ..."]:
    """The ranks, from 1, along the first axis; ties share their mean rank."""
    return np.asarray(require_scipy().rankdata(values, axis=0), dtype=float)


def spearman(signal: Float[np.ndarray, "pos layer"], label: Float[np.ndarray, " pos"]) -> Float[np.ndarray, " layer"]:
    """Spearman's rho of each layer with the label; NaN where either is constant."""
    return correlation(_centred(ranks(signal)), _centred(ranks(label)[:, None]))


def partial_spearman(
    signal: Float[np.ndarray, "pos layer"],
    label: Float[np.ndarray, " pos"],
    positions: Int[np.ndarray, " pos"],
    degree: int = POSITION_DEGREE,
    controls: Float[np.ndarray, "pos control"] | None = None,
) -> Float[np.ndarray, " layer"]:
    """Spearman's rho of each layer with the label once position is partialled out; NaN where nothing is left.

    The ranks of each of `controls`, such as token frequency, are partialled out as well. With `degree` 1 and none of
    them this is the textbook partial rank correlation.
    """
    of_label = beyond_position(label[:, None], positions, degree, controls)
    return correlation(beyond_position(signal, positions, degree, controls), of_label)


def beyond_position(
    values: Float[np.ndarray, "pos column"],
    positions: Int[np.ndarray, " pos"],
    degree: int = POSITION_DEGREE,
    controls: Float[np.ndarray, "pos control"] | None = None,
) -> Float[np.ndarray, "pos column"]:
    """The ranks of each column without what a polynomial in the position's rank explains; NaN if nothing is left.

    Nor what the ranks of `controls` explain, where there are any.
    """
    found = _centred(ranks(values))
    place = ranks(positions.astype(float))
    curve = np.polynomial.legendre.legvander(2 * (place - 1) / max(len(place) - 1, 1) - 1, degree)
    basis = np.linalg.qr(curve)[0]
    if (
        controls is not None
    ):  # no more than they add: of a constant or a repeated one QR would make a direction of noise
        added = _centred(ranks(controls))
        directions, sizes, _ = np.linalg.svd(added - basis @ (basis.T @ added), full_matrices=False)
        basis = np.concatenate([basis, directions[:, sizes**2 > NOTHING_LEFT * len(place) ** 3]], 1)
    found = found - basis @ (basis.T @ found)
    left = (found**2).sum(0)
    return np.where(left > NOTHING_LEFT * len(place) ** 3, found, np.nan)


def correlation(
    columns: Float[np.ndarray, "pos column"], label: Float[np.ndarray, "pos 1"]
) -> Float[np.ndarray, " column"]:
    """The cosine of each centred column with the centred label; NaN where one of them is 0 or NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (columns * label).sum(0) / np.sqrt((columns**2).sum(0) * (label**2).sum(0))
    return np.asarray(np.clip(found, -1.0, 1.0))


def top_chance(values: Float[np.ndarray, " pos"], share: float) -> Float[np.ndarray, " pos"]:
    """The chance of each value to be in the top `share` (at least one value) where ties are broken at random."""
    n_top = max(1, round(share * len(values)))
    edge = np.sort(values)[::-1][n_top - 1]
    above, tied = values > edge, values == edge
    return np.where(above, 1.0, np.where(tied, (n_top - above.sum()) / tied.sum(), 0.0))


def top_share(values: Float[np.ndarray, " pos"], share: float) -> Bool[np.ndarray, " pos"]:
    """True for the top `share`; equal values (tokens of one window) are in it together, where half of them have room.

    The largest value is always in; none is where all are equal: nothing then tells the top from the rest.
    """
    largest = values == values.max()
    return np.asarray((top_chance(values, share) >= 0.5) | largest) & (not largest.all())


def auc(scores: Float[np.ndarray, "pos layer"], truth: Bool[np.ndarray, " pos"]) -> Float[np.ndarray, " layer"]:
    """The chance that a true token scores above a false one, ties counting half; NaN without both kinds."""
    n_true, n_false = int(truth.sum()), int((~truth).sum())
    if not n_true or not n_false:
        return np.full(scores.shape[1], np.nan)
    known = np.isfinite(scores).all(0)
    above = ranks(np.where(known, scores, 0.0))[truth].sum(0) - n_true * (n_true + 1) / 2
    return np.where(known, above / (n_true * n_false), np.nan)


def resampled(n_traces: int, n_draws: int, seed: int) -> Float[np.ndarray, "draw trace"]:
    """How often each trace is in each bootstrap sample of whole traces; the first row is the sample itself."""
    if not n_traces:
        return np.zeros((n_draws, 0))
    draws = np.random.default_rng(seed).multinomial(n_traces, np.full(n_traces, 1 / n_traces), size=n_draws)
    draws[0] = 1
    return draws.astype(float)


def over_traces(values: Float[np.ndarray, "trace ..."], *, seed: int, n_draws: int = N_DRAWS) -> OverTraces:
    """The mean over traces and its 95 % percentile interval; NaN values are left out, column by column."""
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    known = np.isfinite(flat)
    weights = resampled(len(values), n_draws, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (weights @ np.where(known, flat, 0.0)) / (weights @ known)
    n = known.sum(0)
    low, high = np.full(flat.shape[1], np.nan), np.full(flat.shape[1], np.nan)
    for column in np.flatnonzero(n >= 2):
        found = means[1:, column]
        low[column], high[column] = np.quantile(found[np.isfinite(found)], [LEVEL / 2, 1 - LEVEL / 2])
    shape = values.shape[1:]
    return OverTraces(means[0].reshape(shape), low.reshape(shape), high.reshape(shape), n.reshape(shape))


def auc_over_traces(
    scores: Float[np.ndarray, "row column"],
    truth: Bool[np.ndarray, " row"],
    trace: Int[np.ndarray, " row"],
    *,
    seed: int,
    stratum: Int[np.ndarray, " row"] | None = None,
    n_draws: int = N_DRAWS,
) -> OverTraces:
    """The AUC of each column over all rows, and its 95 % percentile interval from resampling whole traces.

    With `stratum` only rows of the same stratum are compared. `n` counts the traces; NaN where a column has a NaN or
    there are not both kinds of rows, no interval under two traces.

    Pairs are counted once by the traces they come from; a bootstrap sample then weights those counts, which is exact.
    """
    names, code = np.unique(trace, return_inverse=True)
    strata = np.zeros(len(truth), dtype=int) if stratum is None else np.unique(stratum, return_inverse=True)[1]
    shape = (scores.shape[1], len(names), len(names))
    above, pairs = np.zeros(shape), np.zeros(shape[1:])
    for rows in np.split(np.argsort(strata, kind="stable"), np.cumsum(np.bincount(strata))[:-1]):
        yes, no = rows[truth[rows]], rows[~truth[rows]]
        n_yes, n_no = (np.bincount(code[kind], minlength=len(names)) for kind in (yes, no))
        pairs += np.outer(n_yes, n_no)
        for other in np.flatnonzero(n_no).tolist():
            rivals = np.sort(scores[no[code[no] == other]], axis=0)
            for column, score in enumerate(scores[yes].T):
                below = np.searchsorted(rivals[:, column], score, "left")
                wins = (below + np.searchsorted(rivals[:, column], score, "right")) / 2
                above[column, :, other] += np.bincount(code[yes], weights=wins, minlength=len(names))
    weights = resampled(len(names), n_draws, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.einsum("da,cab,db->dc", weights, above, weights, optimize=True)
        found = found / np.einsum("da,ab,db->d", weights, pairs, weights, optimize=True)[:, None]
    found[:, ~np.isfinite(scores).all(0)] = np.nan
    low, high = np.full(shape[0], np.nan), np.full(shape[0], np.nan)
    for column in np.flatnonzero(np.isfinite(found[0]) & (len(names) >= 2)).tolist():
        draws = found[1:, column]
        low[column], high[column] = np.quantile(draws[np.isfinite(draws)], [LEVEL / 2, 1 - LEVEL / 2])
    return OverTraces(found[0], low, high, np.full(shape[0], len(names)))


def median_over_traces(
    values: Float[np.ndarray, " row"], trace: Int[np.ndarray, " row"], *, seed: int, n_draws: int = 1024
) -> OverTraces:
    """The median over all rows (in `mean`), and its 95 % percentile interval from resampling whole traces.

    NaN values are left out; `n` counts the traces that have others. The lower of the two middle values is taken.
    """
    known = ~np.isnan(values)
    order = np.argsort(values[known], kind="stable")
    names, code = np.unique(trace[known][order], return_inverse=True)
    if not len(order):
        nothing = np.array(np.nan)
        return OverTraces(nothing, nothing, nothing, np.array(0))
    ranked = values[known][order]
    medians = np.empty(n_draws)
    for draw, weights in enumerate(resampled(len(names), n_draws, seed)):
        total = np.cumsum(weights[code])
        medians[draw] = ranked[np.searchsorted(total, total[-1] / 2)]
    ends = (
        np.quantile(medians[1:], [LEVEL / 2, 1 - LEVEL / 2], method="inverted_cdf")
        if len(names) > 1
        else (np.nan, np.nan)
    )
    return OverTraces(np.array(medians[0]), np.array(ends[0]), np.array(ends[1]), np.array(len(names)))


def sign_flips(n_traces: int, seed: int, n_draws: int = N_DRAWS) -> Float[np.ndarray, "flip trace"]:
    """Signs of whole traces, +1 or -1: every pattern where `n_draws` rows hold them all, else drawn ones.

    The first row flips nothing, so that a share of rows is a p-value that cannot be 0.
    """
    if 2**n_traces <= n_draws:
        patterns = (np.arange(2**n_traces)[:, None] >> np.arange(n_traces)) & 1
        return 1.0 - 2.0 * patterns.astype(float)
    flips = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n_draws, n_traces))
    flips[0] = 1.0
    return flips


def t_statistics(
    values: Float[np.ndarray, "trace layer"], weights: Float[np.ndarray, "draw trace"]
) -> Float[np.ndarray, "draw layer"]:
    """The t of the mean over traces under each row of `weights`; 0 with fewer than two values.

    `weights` are signs (`sign_flips`) or counts (`resampled`); NaN values are left out.
    """
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0)
    size = np.abs(weights)
    n = size @ known
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (weights @ filled) / n
        variance = ((size @ filled**2) / n - mean**2) / (n - 1)
        t = mean / np.sqrt(np.maximum(variance, LEAST_VARIANCE))
    return np.where(n >= 2, t, 0.0)


def sign_flip_p(values: Float[np.ndarray, "trace layer"], seed: int) -> Float[np.ndarray, " layer"]:
    """Two-sided p of each layer's mean over traces being 0, by sign flips; NaN under two values."""
    t = np.abs(t_statistics(values, sign_flips(len(values), seed)))
    p = (t >= t[0] * SAME).mean(0)
    return np.asarray(np.where(np.isfinite(values).sum(0) >= 2, p, np.nan))


def _centred(values: Float[np.ndarray, "pos column"]) -> Float[np.ndarray, "pos column"]:
    return np.asarray(values - values.mean(0))
