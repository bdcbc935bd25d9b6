"""The best kept set out of pools too large to enumerate: proven, or bounded from below where that takes too long.

A node is a choice for the first h keys of the pool, those with the largest contributions first: some are kept, with sum
o and mass b, the others are not, and r more are to be kept of the keys after them. Small contributions come last and
can change little, so a node whose o is far from balanced is hopeless long before its r keys are chosen.

1. Bound of a node. For any unit vector u and a set A of it, ||sum_A c|| >= u . sum_A c. So its error is at least e if
   u . o - e b + (the r smallest u . c_j - e w_j among the keys left) >= 0, which is a sort and no search. u is improved
   a few times: the r keys that u picks give a point, and the nearest point to 0 between that and the last one gives the
   next u (Frank-Wolfe on the convex hull of the node's sets, whose dual these bounds are). What u picks is also a set,
   and the best of them, after swaps, is a set to beat.
2. Every node that could be better than the best set known is split on the next key, level by level.
3. Once that costs more than it saves (few subsets a node left), what is left is enumerated: nodes with the same r are
   rows of `best_subsets`, with o as what is kept in any case.
4. At `max_nodes` nodes: enumerate if at most `max_subsets` are left, else stop. Then the error is the best known, and
   `bound` is the least that the open nodes allow: for the u at hand, the e where step 1 is just met.

Source: ours.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.discover.balancing import Chosen, balance
from kvlens.discover.instances import TIED, Pool, set_errors
from kvlens.discover.subsets import best_subsets
from kvlens.errors import InputError

DIRECTIONS = 6  # tried for each bound
WORTH_SPLITTING = 50_000  # subsets a node: below this enumerating one is as quick as bounding its two halves
AT_ONCE = 512
CONVERGED = 20


class Proven(NamedTuple):
    """Of each row the best set found, and the lower bound of the best error; `exact` where they are the same."""

    error: Float[np.ndarray, " row"]
    bound: Float[np.ndarray, " row"]
    members: Int[np.ndarray, "row kept"]
    exact: Bool[np.ndarray, " row"]
    n_nodes: Int[np.ndarray, " row"]
    n_enumerated: Int[np.ndarray, " row"]


def branch_and_bound(
    pool: Pool,
    budget: int,
    *,
    start: Chosen | None = None,
    max_nodes: int = 100_000,
    max_subsets: int = 5_000_000_000,
    n_threads: int | None = None,
) -> Proven:
    """The best kept set of each row, proven optimal within 1e-10 of its error or with a lower bound.

    Args:
        pool: candidates, from `make_pool` with `n_extra`.
        budget: keys kept, fewer than the pool has.
        start: sets to beat; None: `balance`.
        max_nodes: nodes a row may bound; one takes about 15 microseconds.
        max_subsets: what a row may enumerate (64 over 8 is 4.4e9, one to two seconds); beyond that it is bounded.
        n_threads: as `best_subsets`.

    Raises: InputError where the budget is not below the pool; EnvironmentLacks without numba.
    """
    if not 0 < budget < pool.size:
        raise InputError(f"a budget of {budget} out of {pool.size} candidates", "keep fewer keys than there are")
    first = balance(pool, budget) if start is None else start
    found = [
        _one_row(pool.take(np.array([row])), first.error[row], first.members[row], max_nodes, max_subsets, n_threads)
        for row in range(len(pool.keys))
    ]
    return Proven(*(np.array(column) for column in zip(*found, strict=True)))


class Nodes(NamedTuple):
    """Choices for the first keys: the sum and mass of those kept, which they are, and the direction of the bound."""

    total: Float[np.ndarray, "node d_head"]
    mass: Float[np.ndarray, " node"]
    kept: Bool[np.ndarray, "node pool"]
    direction: Float[np.ndarray, "node d_head"]

    def take(self, which: Bool[np.ndarray, " node"] | Int[np.ndarray, " some"]) -> Nodes:
        return Nodes(*(column[which] for column in self))


def _one_row(
    pool: Pool, error: float, members: np.ndarray, max_nodes: int, max_subsets: int, n_threads: int | None
) -> tuple[float, float, np.ndarray, bool, int, int]:
    """A line of `Proven`."""
    n, budget = pool.size, len(members)
    order = np.argsort(-(pool.vectors[0] ** 2).sum(1), kind="stable")
    row = _Row(pool, order, budget, error, members)
    nodes = Nodes(pool.offset, pool.offset_weight, np.zeros((1, n), dtype=bool), np.zeros_like(pool.offset))
    depth = n_nodes = 0
    left = comb(n, budget) if error > 0 else 0
    while left > WORTH_SPLITTING * len(nodes.mass) and n_nodes < max_nodes:
        nodes = row.split(nodes, depth)
        depth += 1
        n_nodes += len(nodes.mass)
        nodes = row.prune(nodes, depth)
        left = row.n_subsets(nodes, depth)
    if left > max_subsets:
        return row.error, row.lower_bound(nodes, depth), row.members, False, n_nodes, 0
    row.enumerate(nodes, depth, n_threads)
    return row.error, row.error, row.members, True, n_nodes, left


class _Row:
    """One row's candidates by falling contribution, and its best set so far."""

    def __init__(self, pool: Pool, order: np.ndarray, budget: int, error: float, members: np.ndarray) -> None:
        self.pool, self.order, self.budget = pool, order, budget
        self.vectors, self.weights = pool.vectors[0][order], pool.weights[0][order]
        self.error, self.members = float(error), members

    def split(self, nodes: Nodes, depth: int) -> Nodes:
        """Step 2: without and with the next key, where enough keys are left or allowed."""
        n_kept = nodes.kept.sum(1)
        without = nodes.take(self.budget - n_kept < len(self.order) - depth)
        more = nodes.take(n_kept < self.budget)
        kept = more.kept.copy()
        kept[:, depth] = True
        with_it = Nodes(more.total + self.vectors[depth], more.mass + self.weights[depth], kept, more.direction)
        return Nodes(*(np.concatenate(pair) for pair in zip(without, with_it, strict=True)))

    def prune(self, nodes: Nodes, depth: int) -> Nodes:
        """Step 1: the nodes that could be better. Complete ones are evaluated and are none of them."""
        n_left = self.budget - nodes.kept.sum(1)
        stays = np.zeros(len(n_left), dtype=bool)
        self._try(nodes.kept[n_left == 0])
        for r in np.unique(n_left[n_left > 0]):
            same = np.flatnonzero(n_left == r)
            value, direction = self._bounds(nodes.take(same), depth, int(r))
            stays[same] = value < 0
            nodes.direction[same] = direction
        return nodes.take(stays)

    def _bounds(self, nodes: Nodes, depth: int, r: int) -> tuple[np.ndarray, np.ndarray]:
        """The largest value of step 1 over the directions tried, at the error known, and its direction."""
        vectors, weights, e = self.vectors[depth:], self.weights[depth:], self.error * TIED
        best, direction = np.full(len(nodes.mass), -np.inf), np.zeros_like(nodes.total)
        point = nodes.total
        for turn in range(DIRECTIONS):
            length = np.sqrt((point**2).sum(1, keepdims=True))
            u = np.divide(point, length, out=np.zeros_like(point), where=length > 0)
            value, picked = _least(u, nodes, vectors, weights, r, e)
            better = value > best
            best[better], direction[better] = value[better], u[better]
            reached = nodes.total + vectors[picked].sum(1)
            self._try_picked(nodes, depth, picked, reached)
            step = reached - point
            share = -(point * step).sum(1) / np.maximum((step**2).sum(1), np.finfo(float).tiny)
            point = point + (np.clip(share, 0.0, 1.0) if turn else np.ones(len(share)))[:, None] * step
        return best, direction

    def n_subsets(self, nodes: Nodes, depth: int) -> int:
        """How many sets the nodes hold."""
        counts = np.bincount(self.budget - nodes.kept.sum(1), minlength=self.budget + 1)
        return sum(int(count) * comb(len(self.order) - depth, r) for r, count in enumerate(counts))

    def enumerate(self, nodes: Nodes, depth: int, n_threads: int | None) -> None:
        """Step 3."""
        n_left = self.budget - nodes.kept.sum(1)
        rest = len(self.order) - depth
        for r in np.unique(n_left):
            same = np.flatnonzero(n_left == r)
            if r == rest:
                kept = nodes.kept[same].copy()
                kept[:, depth:] = True
                self._try(kept)
                continue
            for begin in range(0, len(same), AT_ONCE):
                self._enumerate(nodes.take(same[begin : begin + AT_ONCE]), depth, int(r), n_threads)

    def _enumerate(self, nodes: Nodes, depth: int, r: int, n_threads: int | None) -> None:
        """The sets of some nodes that all need r more keys; n_threads share them."""
        n_nodes, rest = len(nodes.mass), len(self.order) - depth
        pool = Pool(
            np.broadcast_to(np.arange(depth, len(self.order)), (n_nodes, rest)),
            np.broadcast_to(self.weights[depth:], (n_nodes, rest)),
            np.broadcast_to(self.vectors[depth:], (n_nodes, rest, self.vectors.shape[1])),
            nodes.total,
            nodes.mass,
            np.repeat(self.pool.floor, n_nodes),
        )
        known = Chosen(np.full(n_nodes, self.error), np.full((n_nodes, r), -1))
        found = best_subsets(pool, r, start=known, n_threads=n_threads)
        better = np.flatnonzero(found.members[:, 0] >= 0)
        kept = nodes.kept[better].copy()
        np.put_along_axis(kept, depth + found.members[better], True, 1)
        self._try(kept)

    def _try_picked(self, nodes: Nodes, depth: int, picked: np.ndarray, reached: np.ndarray) -> None:
        """The best of the nodes' sets with the picked keys, after swaps, becomes the row's if it is better."""
        mass = nodes.mass + self.weights[depth:][picked].sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(mass > 0, np.sqrt((reached**2).sum(1)) / mass, np.inf)
        best = int(errors.argmin())
        if errors[best] < self.error * TIED:
            kept = nodes.kept[best].copy()
            kept[depth + picked[best]] = True
            self._try(kept[None])
            swapped = balance(self.pool, self.budget, Chosen(np.array([self.error]), self.members[None]))
            self.error, self.members = float(swapped.error[0]), swapped.members[0]

    def _try(self, kept: Bool[np.ndarray, "set pool"]) -> None:
        """The best of some complete sets becomes the row's, if it is better."""
        if not len(kept):
            return
        members = np.sort(self.order[np.nonzero(kept)[1].reshape(len(kept), self.budget)], axis=1)
        errors = set_errors(self.pool, members, np.zeros(len(kept), dtype=int))
        best = int(errors.argmin())
        if errors[best] < self.error * TIED:
            self.error, self.members = float(errors[best]), members[best]

    def lower_bound(self, nodes: Nodes, depth: int) -> float:
        """Step 4: the least error that the bounds of the open nodes allow, never above the best known."""
        n_left = self.budget - nodes.kept.sum(1)
        least = self.error
        for r in np.unique(n_left):
            some = nodes.take(n_left == r)
            low = np.full(len(some.mass), least)
            for _ in range(CONVERGED):
                value, picked = _least(some.direction, some, self.vectors[depth:], self.weights[depth:], int(r), low)
                if (value >= 0).all():
                    break
                mass = some.mass + self.weights[depth:][picked].sum(1)
                # The e at which the picked keys would just meet the bound; it falls until they stay the same.
                low = np.where(value < 0, low + value / mass, low) * TIED
            else:
                low = np.where(value >= 0, low, 0.0)
            least = min(least, float(low.min(initial=least)))
        return max(least, 0.0)


def _least(
    u: Float[np.ndarray, "node d_head"],
    nodes: Nodes,
    vectors: Float[np.ndarray, "rest d_head"],
    weights: Float[np.ndarray, " rest"],
    r: int,
    e: float | Float[np.ndarray, " node"],
) -> tuple[Float[np.ndarray, " node"], Int[np.ndarray, "node picked"]]:
    """Step 1 for one direction a node: the value, and the r keys that give it."""
    error = np.broadcast_to(e, len(u))
    gains = u @ vectors.T - error[:, None] * weights
    picked = np.argpartition(gains, r - 1, axis=1)[:, :r]
    value = (u * nodes.total).sum(1) - error * nodes.mass + np.take_along_axis(gains, picked, 1).sum(1)
    return value, picked
