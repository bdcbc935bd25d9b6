"""Which windows are worth an exact evaluation, told from one forward and one backward pass, and how many were missed?

Removing the keys of a window W from one attention row with weights p changes the row's output by exactly
`p(W) / (1 - p(W)) * (o - m_W)`, m_W being the weighted mean of W's values. To first order in everything after:

1. run the rows that predict the target over the stored prefix with attention written out, so that it has gradients;
2. on the way back, layer by layer: S_W = sum over heads and queries of
   `p(W) / (1 - p(W)) * <gradient of -log p(target) at o, o - m_W>`, for all windows at once from running sums over
   positions (`layer_scores`); the sum over layers is S (`gradient_scores`), a predicted effect in nats;
3. rank the windows (`screening_rank`), take the top fraction and a seeded random audit sample of the rest (`choose`);
4. once their effects are known, estimate from the audit how much of the top tenth was found (`report`), and go on
   to a larger fraction where that is too little or not yet settled (`widen`).

S is never a label: it decides what is evaluated, nothing else. It is defined for `evict` at the end of the context,
the one intervention whose rows all share one prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, comb
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.probe.gradient import ScreenAttention
from kvlens.probe.occlusion import Occluder

CANCELLED_WEIGHT = 0.5  # of the layers' parts beside the net score, in the ranking
TOP_SHARE = 0.1  # recall is about the tenth of the windows with the largest |effect|
AUDIT_SHARE, LEAST_AUDIT = 0.1, 16
FRACTIONS = (0.1, 0.15, 0.25, 0.4, 0.6, 1.0)  # what `--screen auto` tries, in this order
WANTED_RECALL = 0.95
TAIL = 0.025  # each side of the recall interval


def gradient_scores(occluder: Occluder, windows: Sequence[tuple[int, int]]) -> Float64[np.ndarray, " window"]:
    """S of every window, in nats: the effect predicted to first order, with its sign. Cost: as `layer_scores`."""
    return layer_scores(occluder, windows).sum(0)


def layer_scores(occluder: Occluder, windows: Sequence[tuple[int, int]]) -> Float64[np.ndarray, "layer window"]:
    """What each layer adds to S of every window, in nats; layers and heads outside the run's cells add 0.

    Raises: InputError for anything but `evict` without a lag, and for a window outside [0, n - 1).
    Cost: one forward and one backward pass of the target's rows. Memory: one layer's weights [head, target, pos] at
        a time, linear in the context.
    """
    how, last = occluder.how, occluder.last
    if how.kind != "evict" or how.lag is not None:
        what = how.kind if how.lag is None else f"{how.kind} with lag {how.lag}"
        raise InputError(
            f"{occluder.tokens.trace.id}: the gradient screen predicts evict without a lag, not {what}",
            "leave out --screen: all windows are then evaluated",
        )
    outside = [window for window in windows if not 0 <= window[0] < window[1] <= last]
    if outside:
        raise InputError(f"{occluder.tokens.trace.id}: window [{outside[0][0]}, {outside[0][1]}) is not in [0, {last})")
    # Out of inference mode, whoever calls: tensors made inside it cannot take part in a backward pass.
    with torch.inference_mode(False), torch.enable_grad():
        screen = ScreenAttention(occluder, windows)
        ids, targets = occluder.ids[None, last:].clone(), occluder.targets.clone()
        positions = torch.arange(last, occluder.n_inputs, device=ids.device)
        with models.attention_override(occluder.model, screen):
            cache = models.private_cache(occluder.model, last)
            states = models.hidden(occluder.model, ids, positions=positions, cache=cache)
        log_probs = models.unembed(occluder.model, states)[0].double().log_softmax(-1)
        (-log_probs.gather(-1, targets[:, None]).sum()).backward()
    return screen.by_layer.cpu().numpy()


def screening_rank(by_layer: Float64[np.ndarray, "layer window"]) -> Float64[np.ndarray, " window"]:
    """What windows are ranked by, in nats: |S| plus half the root of the summed squares of the layers' parts of S.

    Parts that cancel leave a small net S just where first order is least to be trusted: such windows move up.
    """
    return np.abs(by_layer.sum(0)) + CANCELLED_WEIGHT * np.sqrt(np.square(by_layer).sum(0))


@dataclass(frozen=True)
class Selection:
    """Which windows are evaluated, as ascending indices; `top` includes those that hold position 0."""

    top: Int64[np.ndarray, " top"]
    audit: Int64[np.ndarray, " audit"]

    @classmethod
    def from_plan(cls, stage: Mapping[str, list[int]]) -> Selection:
        """What a stage of the screen chose, as a run's plan keeps it."""
        return cls(*(np.array(stage[name], dtype=np.int64) for name in ("top", "audit")))


def choose(
    scores: Float64[np.ndarray, " window"],
    fraction: float,
    seed: int,
    windows: Sequence[tuple[int, int]],
    *,
    n_audit: int | None = None,
    previous: Selection | None = None,
) -> Selection:
    """The top `fraction` of windows by |score| and a seeded uniform sample of the rest, to audit the choice.

    Windows that hold position 0, the attention sink, are always in the top and count neither towards the fraction nor
    in `report`. At one seed a window's place in the queue for auditing does not depend on the fraction: audit windows
    of a `previous`, smaller fraction that are still outside the top stay in the audit, which remains uniform.

    Args:
        n_audit: default a tenth of the rest, at least 16.
    """
    if not 0 < fraction <= 1:
        raise InputError(f"screen fraction {fraction} is not in (0, 1]", "give a fraction such as 0.25, or auto")
    if n_audit is not None and n_audit < 1:
        raise InputError(f"an audit of {n_audit} windows", "the screen cannot be judged without one")
    sinks, counted = _sinks_and_counted(windows)
    n_top = ceil(fraction * len(counted))
    order = counted[np.argsort(-np.abs(scores[counted]), kind="stable")]
    rest = order[n_top:]
    queue = np.random.default_rng(seed).permutation(len(windows))
    waiting = queue[np.isin(queue, rest)]
    size = max(LEAST_AUDIT, ceil(AUDIT_SHARE * len(rest))) if n_audit is None else n_audit
    if previous is not None:
        size = max(size, int(np.isin(previous.audit, rest).sum()))
    return Selection(np.sort(np.concatenate([sinks, order[:n_top]])), np.sort(waiting[:size]))


def report(
    scores: Float64[np.ndarray, " window"],
    effects: Mapping[int, float],
    selection: Selection,
    windows: Sequence[tuple[int, int]],
    *,
    previous: Selection | None = None,
) -> dict[str, Any]:
    """How far the screen can be trusted on this trace, as JSON-ready numbers; position 0 is left out.

    - `spearman_audit`, `spearman_evaluated` (all evaluated windows: a biased sample): |score| against |effect|.
    - `recall`: estimated share, in the screen's top, of the tenth of all windows with the largest |effect|; each
      audited window stands for rest / audit windows. [`recall_low`, `recall_high`]: 95 % interval, exact for a random
      audit, so that no miss in a small audit is not read as certainty.
    - `missed`: estimated number of windows of that tenth that were not evaluated at all.
    - `gained`: share of that tenth that is in the top but was not in the top of the `previous`, smaller fraction.

    Args:
        effects: index of the window -> effect in nats, for every window of the selection.
    """
    _, counted = _sinks_and_counted(windows)
    top = selection.top[np.isin(selection.top, counted)]
    evaluated = np.concatenate([top, selection.audit])
    size = np.abs(np.array([effects[int(i)] for i in evaluated], dtype=np.float64))
    found, audited = size[: len(top)], size[len(top) :]
    n_rest, n_wanted = len(counted) - len(top), ceil(TOP_SHARE * len(counted))
    misses = _estimated_misses(found, audited, n_rest, n_wanted)
    low, high = _bounded_misses(found, audited, n_rest, n_wanted)
    wanted = top[np.argsort(-found, kind="stable")][: round(n_wanted - misses)]
    unit = max(1, n_wanted)
    return {
        "n_windows": len(counted),
        "n_top": len(top),
        "n_audit": len(audited),
        "spearman_audit": _spearman(np.abs(scores[selection.audit]), audited),
        "spearman_evaluated": _spearman(np.abs(scores[evaluated]), size),
        "recall": 1 - misses / unit,
        "recall_low": 1 - high / unit,
        "recall_high": 1 - low / unit,
        "missed": misses * (1 - len(audited) / n_rest) if n_rest else 0.0,
        "gained": None if previous is None else float((~np.isin(wanted, previous.top)).sum() / unit),
    }


def widen(fraction: float, found: Mapping[str, Any]) -> float | None:
    """The next fraction for `--screen auto`, or None once recall suffices or everything was tried.

    `found` is the `report` at `fraction`. An audit of a few windows misses misses, so a good estimate alone does not
    end it: the last step must also have brought next to nothing, which is known exactly. So `auto` never stops at the
    first fraction.
    """
    settled = found["gained"] is not None and found["gained"] <= 1 - WANTED_RECALL
    if settled and found["recall"] >= WANTED_RECALL:
        return None
    return next((larger for larger in FRACTIONS if larger > fraction), None)


def _sinks_and_counted(
    windows: Sequence[tuple[int, int]],
) -> tuple[Int64[np.ndarray, " sink"], Int64[np.ndarray, " counted"]]:
    holds = np.array([start == 0 for start, _ in windows], dtype=bool)
    return np.flatnonzero(holds), np.flatnonzero(~holds)


def _estimated_misses(
    found: Float64[np.ndarray, " top"], audited: Float64[np.ndarray, " audit"], n_rest: int, n_wanted: int
) -> float:
    """How many of the `n_wanted` largest lie outside the top: going down by |effect| until the weights reach them."""
    if len(audited) == 0:
        return 0.0
    size = np.concatenate([found, audited])
    weight = np.concatenate([np.ones(len(found)), np.full(len(audited), n_rest / len(audited))])
    order = np.argsort(-size, kind="stable")
    before = np.concatenate([[0.0], weight[order].cumsum()[:-1]])
    counted = np.minimum(weight[order], np.maximum(n_wanted - before, 0))  # the last one may count in part
    return float(counted[order >= len(found)].sum())


def _bounded_misses(
    found: Float64[np.ndarray, " top"], audited: Float64[np.ndarray, " audit"], n_rest: int, n_wanted: int
) -> tuple[int, int]:
    """The fewest and the most misses that the audit does not reject.

    With M misses the wanted ones are the n_wanted - M largest of the top and M of the rest, so the audit holds a
    hypergeometric number of the M: at least those above the smallest wanted of the top, at most those above the
    largest unwanted. Every M is tested against these two counts.
    """
    edges = np.concatenate([[np.inf], np.sort(found)[::-1], [-np.inf]])
    kept = []
    for misses in range(max(0, n_wanted - len(found)), min(n_wanted, n_rest) + 1):
        fewest = int((audited > edges[n_wanted - misses]).sum())
        most = int((audited > edges[n_wanted - misses + 1]).sum())
        at_most = _chance_at_most(most, misses, n_rest, len(audited))
        at_least = 1 - _chance_at_most(fewest - 1, misses, n_rest, len(audited))
        if at_most >= TAIL and at_least >= TAIL:
            kept.append(misses)
    return (kept[0], kept[-1]) if kept else (0, n_wanted)


def _chance_at_most(hits: int, misses: int, n_rest: int, n_audit: int) -> float:
    """P(a sample of `n_audit` of the rest holds at most `hits` of its `misses` windows)."""
    ways = sum(comb(misses, i) * comb(n_rest - misses, n_audit - i) for i in range(min(hits, n_audit) + 1))
    return ways / comb(n_rest, n_audit)


def _spearman(a: Float64[np.ndarray, " n"], b: Float64[np.ndarray, " n"]) -> float | None:
    """Spearman's rank correlation, ties averaged; None where a side is constant or has under three values."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    ranks = []
    for values in (a, b):
        _, group, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((count.cumsum() - (count - 1) / 2)[group])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
