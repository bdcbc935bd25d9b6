"""How near can a kept set come to the dense output when its weights are free? The distance from mu to a convex hull.

With w_j = v_j - mu, the nearest point x = sum lambda_j w_j (lambda >= 0, sum 1) of the hull of s atoms to the origin.

1. `hull_distance`: the exact nearest point for a given set, by an active-set method on its Gram matrix: atoms enter
   one at a time (the one with the lowest <x, w_j>), the affine minimiser over the atoms inside is solved for, and
   atoms whose weight would turn negative leave. All rows run together.
2. Its duality gap, in the units of the error: ||x|| - max(0, min_j <x, w_j> / ||x||); what is subtracted is a lower
   bound of the distance to the hull, because the hull lies beyond that plane.
3. `frank_wolfe`: at most s atoms out of all visible keys. The first is the key nearest to mu; then, s - 1 times, the
   key with the lowest <x, w_j> enters and all weights inside are solved for again by 1. EF(s), the least distance over
   all sets of size s, is NP-hard, so this is an upper estimate of it. sigma / sqrt(s) bounds EF(s), not every estimate.

A sink with a learned logit is one more atom, v = 0, that takes no budget.

Source: ContourKV (free weights, Frank-Wolfe); weights solved for at every step and the gap in error units are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.discover.instances import Instances

RIDGE = 1e-14  # of the longest atom's squared length: keeps equal atoms solvable
NEAR = 1e-13  # of the longest atom's squared length: where no atom lies this much nearer, the point is nearest
INSIDE = 1e-6  # of the longest v_j - mu, three times the root of NEAR
MOST_PASSES = 10  # in and out, per atom; the gap says what is left if that is not enough


class Free(NamedTuple):
    """Of each row the distance, its duality gap, the weights of the atoms (the sink's last) and the point itself."""

    error: Float[np.ndarray, " row"]
    gap: Float[np.ndarray, " row"]
    weights: Float[np.ndarray, "row atom"]
    point: Float[np.ndarray, "row d_head"]


def hull_distance(rows: Instances, keys: Int[np.ndarray, "row kept"]) -> Free:
    """The exact distance from mu to the hull of the values of some keys of each row."""
    return _floored(nearest_point(*_atoms(rows, keys)), rows)


def frank_wolfe(rows: Instances, budgets: Sequence[int]) -> tuple[dict[int, Free], Int[np.ndarray, "row kept"]]:
    """By budget, an upper estimate of EF; and the keys in the order they enter, the first again where none is needed.

    Cost: for the largest budget, that many passes over the keys and small solves; smaller ones come on the way.
    """
    keys = np.where(rows.visible, rows.distances, np.inf).argmin(1)[:, None]
    inside = np.ones((len(rows), 1), dtype=bool)
    now = hull_distance(rows, keys)
    found = {1: now}
    for n_kept in range(2, max(budgets) + 1):
        nearest = np.where(rows.visible, rows.along(now.point), np.inf).argmin(1)[:, None]
        new = (keys != nearest).all(1, keepdims=True) & (now.error > 0)[:, None]
        keys = np.concatenate([keys, np.where(new, nearest, keys[:, :1])], 1)
        inside = np.concatenate([inside, new], 1)
        if not new.any():
            now = found[n_kept] = now._replace(weights=np.insert(now.weights, -1, 0.0, axis=1))
            continue
        atoms, usable = _atoms(rows, keys)
        usable[:, :-1] &= inside
        now = found[n_kept] = _floored(nearest_point(atoms, usable, np.insert(now.weights, -1, 0.0, axis=1)), rows)
    return {budget: found[budget] for budget in budgets}, keys


def _atoms(
    rows: Instances, keys: Int[np.ndarray, "row kept"]
) -> tuple[Float[np.ndarray, "row atom d_head"], Bool[np.ndarray, "row atom"]]:
    """v_j - mu of the keys, then of the sink; and which of them there are."""
    atoms = np.concatenate([rows.gather(keys) - rows.mean[:, None], -rows.mean[:, None]], 1)
    usable = np.concatenate([np.take_along_axis(rows.visible, keys, 1), rows.sink[:, None] > 0], 1)
    return atoms, usable


def _floored(found: Free, rows: Instances) -> Free:
    """The same, with what is only rounding set to 0: where nothing is proven above 0, a point as near as solves get."""
    inside = (found.error <= found.gap) & (found.error <= INSIDE * rows.distances.max(1))
    zero = (found.error <= rows.floor) | inside
    return found._replace(error=np.where(zero, 0.0, found.error), gap=np.where(zero, 0.0, found.gap))


def nearest_point(
    atoms: Float[np.ndarray, "row atom d_head"],
    usable: Bool[np.ndarray, "row atom"],
    start: Float[np.ndarray, "row atom"] | None = None,
) -> Free:
    """Step 1, and step 2 evaluated directly: the point of each row's hull that is nearest to the origin.

    Every row has a usable atom. `start` are weights to go on from, the nearest point of some of the atoms.
    """
    n_rows, n_atoms, _ = atoms.shape
    longest = np.maximum(np.where(usable, (atoms**2).sum(2), 0.0).max(1), np.finfo(float).tiny)
    gram = (np.where(usable[:, :, None], atoms, 0.0) @ atoms.mT) / longest[:, None, None]
    diagonal = np.arange(n_atoms)
    if start is None:
        shortest = np.where(usable, gram[:, diagonal, diagonal], np.inf).argmin(1)
        start = (diagonal == shortest[:, None]).astype(float)
    weights, inside = start.copy(), start > 0
    active = np.arange(n_rows)
    for _ in range(MOST_PASSES * n_atoms):
        if not len(active):
            break
        g, within, now = gram[active], inside[active], weights[active]
        moved, full = _towards(now, _affine(g, within), within)
        within &= moved > 0
        along = np.where(usable[active], (g @ moved[:, :, None])[:, :, 0], np.inf)
        enters = along.argmin(1)
        row = np.arange(len(active))
        nearer = (moved * np.where(usable[active], along, 0.0)).sum(1) - along[row, enters] > NEAR
        # An atom that just entered and left again, or that is inside already, would come back for ever.
        more = ~full | (nearer & ~within[row, enters])
        stuck = ~full & (np.abs(moved - now).max(1) == 0)
        within[row[full & more], enters[full & more]] = True
        weights[active], inside[active] = moved, within
        active = active[more & ~stuck]
    point = np.einsum("rk,rkd->rd", weights, atoms)
    error = np.sqrt((point**2).sum(1))
    along = np.where(usable, np.einsum("rkd,rd->rk", atoms, point), np.inf).min(1)
    bound = np.divide(along, error, out=np.zeros(n_rows), where=error > 0)
    return Free(error, error - np.clip(bound, 0.0, error), weights, point)


def _affine(
    gram: Float[np.ndarray, "row atom atom"], inside: Bool[np.ndarray, "row atom"]
) -> Float[np.ndarray, "row atom"]:
    """The weights (sum 1, any sign) of the point nearest to the origin in the affine hull of the atoms inside."""
    pair = inside[:, :, None] & inside[:, None, :]
    matrix = np.where(pair, gram + 1.0, 0.0)
    places = np.arange(gram.shape[1])
    matrix[:, places, places] += np.where(inside, RIDGE, 1.0)
    found = np.linalg.solve(matrix, inside.astype(float)[:, :, None])[:, :, 0]
    return np.asarray(found / found.sum(1, keepdims=True))


def _towards(
    weights: Float[np.ndarray, "row atom"], goal: Float[np.ndarray, "row atom"], inside: Bool[np.ndarray, "row atom"]
) -> tuple[Float[np.ndarray, "row atom"], Bool[np.ndarray, " row"]]:
    """The weights moved to the goal, as far as none turns negative; and whether the goal was reached."""
    leaves = inside & (goal <= 0)
    full = ~leaves.any(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(leaves, weights / (weights - goal), np.inf)
    first = share.argmin(1)
    row = np.arange(len(weights))
    step = np.where(full, 1.0, np.minimum(share[row, first], 1.0))
    moved = np.maximum(weights + step[:, None] * (goal - weights), 0.0) * inside
    moved[row[~full], first[~full]] = 0.0
    return moved / moved.sum(1, keepdims=True), np.asarray(full)
