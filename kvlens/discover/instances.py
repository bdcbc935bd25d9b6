"""What is the error of an attention row when only some keys are kept and the others' weight goes to them?

One instance is a query row of one head: weights p over its visible keys (softmax, sum 1), values v, dense output
mu = sum p_j v_j. Forced weights: the kept keys A share all mass in the proportions they have, so that the output is
m_A = sum_A p_j v_j / p(A).

1. Inputs are checked and taken to float64; weights are divided by their sum, which softmax leaves a little off 1.
2. A key's contribution is c_j = p_j (v_j - mu), and then e(A) = ||mu - m_A|| = ||sum_A c_j|| / p(A), for any A.
3. A sink with a learned logit is a key with v = 0 that is always kept and takes no budget; `sink` is its mass, so that
   weights and sink together sum to 1. Its contribution is the pool's `offset`.
4. A* is the set of the `budget` largest weights. The pool is A* and the keys outside it with the largest single-key
   error ||c_j||: as many (at most 24) as keep the number of subsets at or under 131,072, which is 24, 12, 6 and 4 keys
   for budgets 4, 8, 16 and 32. Ties go to the lower position.

Errors below the rounding of mu (32 float64 epsilons of the largest ||v_j||) are 0: only so does a set that balances
exactly have the error 0. A set without mass has no output; its error is infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.errors import InputError

MOST_EXTRA = 24
MOST_SUBSETS = 2**17
OFF_ONE = 1e-3  # what float32 softmax weights over a hundred thousand keys may sum to beside 1
TIED = 1 - 1e-10  # an error that is not below this share of another is no better: the set that came first stays
ROUNDING = 32 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Instances:
    """Checked rows in float64. Weights are 0 at keys that a row does not see.

    `mean` is the dense output mu, `floor` the error below which only rounding is left.
    """

    weights: Float[np.ndarray, "row key"]
    values: Float[np.ndarray, "key d_head"] | Float[np.ndarray, "row key d_head"]
    visible: Bool[np.ndarray, "row key"]
    sink: Float[np.ndarray, " row"]
    mean: Float[np.ndarray, "row d_head"]
    floor: Float[np.ndarray, " row"]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def n_keys(self) -> Int[np.ndarray, " row"]:
        return np.asarray(self.visible.sum(1))

    def values_of(self, row: int) -> Float[np.ndarray, "key d_head"]:
        return self.values if self.values.ndim == 2 else self.values[row]

    def deviations(self) -> Iterator[Float[np.ndarray, "key d_head"]]:
        """Of each row in turn, v_j - mu at every key; 0 at keys it does not see."""
        for row in range(len(self)):
            yield (self.values_of(row) - self.mean[row]) * self.visible[row, :, None]

    def gather(self, keys: Int[np.ndarray, "row kept"]) -> Float[np.ndarray, "row kept d_head"]:
        """The values of some keys of each row."""
        if self.values.ndim == 2:
            return np.asarray(self.values[keys])
        return np.take_along_axis(self.values, keys[:, :, None], 1)

    def along(self, direction: Float[np.ndarray, "row d_head"]) -> Float[np.ndarray, "row key"]:
        """<v_j, direction> of each row."""
        if self.values.ndim == 2:
            return np.asarray(direction @ self.values.T)
        return np.asarray((self.values @ direction[:, :, None])[:, :, 0])

    @cached_property
    def distances(self) -> Float[np.ndarray, "row key"]:
        """||v_j - mu||."""
        found = np.empty_like(self.weights)
        for row, deviation in enumerate(self.deviations()):
            found[row] = np.sqrt((deviation**2).sum(1))
        return found

    @cached_property
    def sigma(self) -> Float[np.ndarray, " row"]:
        """The root of sum p_j ||v_j - mu||^2, a sink counted as the key it is."""
        of_sink = self.sink * (self.mean**2).sum(1)
        return np.asarray(np.sqrt((self.weights * self.distances**2).sum(1) + of_sink))

    @cached_property
    def by_weight(self) -> Int[np.ndarray, "row key"]:
        """Keys by falling weight, those that are not seen last."""
        return np.argsort(np.where(self.visible, -self.weights, np.inf), axis=1, kind="stable")

    @cached_property
    def by_single_error(self) -> Int[np.ndarray, "row key"]:
        """Keys by falling single-key error ||c_j||, those that are not seen last."""
        return np.argsort(np.where(self.visible, -self.weights * self.distances, np.inf), axis=1, kind="stable")

    def take(self, rows: Int[np.ndarray, " chosen"]) -> Instances:
        """Some of the rows."""
        values = self.values if self.values.ndim == 2 else self.values[rows]
        return Instances(
            self.weights[rows], values, self.visible[rows], self.sink[rows], self.mean[rows], self.floor[rows]
        )

    def with_values(self, values: Float[np.ndarray, "row key d_head"]) -> Instances:
        """The same weights over other values."""
        return _instances(self.weights, values, self.visible, self.sink)


def instances(
    weights: Float[np.ndarray, "row key"],
    values: Float[np.ndarray, "*table d_head"],
    *,
    visible: Bool[np.ndarray, "row key"] | None = None,
    sink: Float[np.ndarray, " row"] | None = None,
) -> Instances:
    """Rows that the searches take.

    Args:
        weights: softmax weights; with `sink` they sum to 1 - sink.
        values: [key, d_head], one table for all rows (rows of one trace, layer and KV head), or [row, key, d_head].
        visible: the keys that each row sees; None for all. The rest is padding, with weight 0.
        sink: the mass of a learned sink.

    Raises: InputError for shapes that do not fit, NaN, negative weights, weights that do not sum to 1.
    """
    weights = np.asarray(weights, dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    seen = np.ones(weights.shape, dtype=bool) if visible is None else np.asarray(visible)
    mass = np.zeros(len(weights)) if sink is None else np.asarray(sink, dtype=np.float64)
    _check(weights, values, seen, mass)
    total = weights.sum(1) + mass
    weights, mass = weights / total[:, None], mass / total
    return _instances(weights, values, seen, mass)


def _instances(
    weights: Float[np.ndarray, "row key"],
    values: Float[np.ndarray, "..."],
    visible: Bool[np.ndarray, "row key"],
    sink: Float[np.ndarray, " row"],
) -> Instances:
    """The same from checked arrays: what is left is the dense output."""
    length = np.sqrt((values**2).sum(-1))
    mean = weights @ values if values.ndim == 2 else (weights[:, None] @ values)[:, 0]
    return Instances(weights, values, visible, sink, mean, ROUNDING * np.where(visible, length, 0.0).max(1))


def _check(
    weights: Float[np.ndarray, "row key"],
    values: Float[np.ndarray, "..."],
    visible: Bool[np.ndarray, "..."],
    sink: Float[np.ndarray, "..."],
) -> None:
    """Nothing; raises InputError for rows that have no error to speak of."""
    if visible.dtype != bool:
        raise InputError(f"visible is of {visible.dtype}", "give a mask: True = the row sees the key")
    fits = values.shape[-2:-1] == weights.shape[1:] and (values.ndim == 2 or values.shape[0] == len(weights))
    if not fits or visible.shape != weights.shape or sink.shape != weights.shape[:1]:
        raise InputError(
            f"weights {weights.shape}, values {values.shape}, visible {visible.shape} and sink {sink.shape} do not fit",
            "weights and visible are [row, key], values [key, d_head] or [row, key, d_head], sink [row]",
        )
    for name, array in (("weights", weights), ("values", values), ("sink", sink)):
        if not np.isfinite(array).all():
            raise InputError(f"the {name} hold NaN or infinite numbers", "capture the rows again, in float32")
    if (weights < 0).any() or (sink < 0).any():
        raise InputError(f"a weight is negative: {min(weights.min(), sink.min())}", "give weights after the softmax")
    if (weights[~visible] != 0).any():
        raise InputError("a key that its row does not see has a weight", "set the weights of hidden keys to 0")
    off = np.abs(weights.sum(1) + sink - 1)
    if (off > OFF_ONE).any():
        row = int(off.argmax())
        raise InputError(
            f"the weights of row {row} sum to {weights[row].sum() + sink[row]:.6g}, not to 1",
            "give the softmax over all visible keys, and a learned sink's mass as `sink`",
        )


def forced_weight_error(
    weights: Float[np.ndarray, "row key"],
    values: Float[np.ndarray, "key d_head"] | Float[np.ndarray, "row key d_head"],
    keep: Bool[np.ndarray, "row key"],
    *,
    visible: Bool[np.ndarray, "row key"] | None = None,
    sink: Float[np.ndarray, " row"] | None = None,
) -> Float[np.ndarray, " row"]:
    """e(A) of the keys that each row keeps, in the units of the values; infinite where they have no mass.

    Source: ContourKV (forced weights). Raises: as `instances`.
    """
    return keep_errors(instances(weights, values, visible=visible, sink=sink), keep)


def keep_errors(rows: Instances, keep: Bool[np.ndarray, "row key"]) -> Float[np.ndarray, " row"]:
    """e(A) of the keys that each row keeps; kept keys that it does not see count for nothing."""
    kept = np.where(keep & rows.visible, rows.weights, 0.0)
    total = np.stack([p @ deviation for p, deviation in zip(kept, rows.deviations(), strict=True)])
    return _error(total - rows.sink[:, None] * rows.mean, kept.sum(1) + rows.sink, rows.floor)


def _error(
    total: Float[np.ndarray, "set d_head"], mass: Float[np.ndarray, " set"], floor: Float[np.ndarray, " set"]
) -> Float[np.ndarray, " set"]:
    """||total|| / mass; 0 at or below the floor, infinite without mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt((total**2).sum(1)) / mass
    return np.where(mass > 0, np.where(error <= floor, 0.0, error), np.inf)


class Pool(NamedTuple):
    """The candidates of each row, A* first: their keys, weights and contributions; what is kept in any case."""

    keys: Int[np.ndarray, "row pool"]
    weights: Float[np.ndarray, "row pool"]
    vectors: Float[np.ndarray, "row pool d_head"]
    offset: Float[np.ndarray, "row d_head"]
    offset_weight: Float[np.ndarray, " row"]
    floor: Float[np.ndarray, " row"]

    @property
    def size(self) -> int:
        return int(self.keys.shape[1])

    def take(self, rows: Int[np.ndarray, " chosen"] | Bool[np.ndarray, " row"]) -> Pool:
        """The pools of some rows, by number or mask."""
        return Pool(*(column[rows] for column in self))


def extra_keys(budget: int) -> int:
    """How many keys beyond A* the pool of a budget has."""
    if budget < 1:
        raise InputError(f"a budget of {budget} keys", "keep at least one key")
    return max((n for n in range(MOST_EXTRA + 1) if comb(budget + n, n) <= MOST_SUBSETS), default=0)


def make_pool(rows: Instances, budget: int, n_extra: int | None = None) -> Pool:
    """The pool of every row.

    Args:
        rows: rows that all see more than `budget` keys, and equally many if fewer than the pool has.
        budget: keys kept.
        n_extra: candidates beyond A*; None: `extra_keys`.
    """
    size = budget + (extra_keys(budget) if n_extra is None else n_extra)
    n_keys = np.minimum(rows.n_keys, size)
    if len(rows) and (n_keys.min() != n_keys.max() or n_keys.min() <= budget):
        raise InputError(
            f"rows of {n_keys.min()} to {n_keys.max()} candidates cannot share a pool for a budget of {budget}",
            "take rows with more keys than the budget, and small rows by their number of keys",
        )
    n_extra = (int(n_keys[0]) if len(rows) else size) - budget
    top = rows.by_weight[:, :budget]
    others = rows.by_single_error[:, : budget + n_extra]
    inside = (others[:, :, None] == top[:, None, :]).any(2)
    extra = np.take_along_axis(others, np.argsort(inside, axis=1, kind="stable")[:, :n_extra], 1)
    keys = np.concatenate([top, extra], 1)
    weights = np.take_along_axis(rows.weights, keys, 1)
    vectors = weights[:, :, None] * (rows.gather(keys) - rows.mean[:, None])
    return Pool(keys, weights, vectors, -rows.sink[:, None] * rows.mean, rows.sink, rows.floor)


def set_errors(
    pool: Pool, members: Int[np.ndarray, "set kept"], rows: Int[np.ndarray, " set"] | None = None
) -> Float[np.ndarray, " set"]:
    """e(A) in float64 of sets given by ascending places in a pool: ||sum c_j|| / p(A), summed directly.

    `rows` says whose pool each set is of; None: one set a row.
    """
    rows = np.arange(len(members)) if rows is None else rows
    total = pool.offset[rows] + pool.vectors[rows[:, None], members].sum(1)
    mass = pool.offset_weight[rows] + pool.weights[rows[:, None], members].sum(1)
    return _error(total, mass, pool.floor[rows])
