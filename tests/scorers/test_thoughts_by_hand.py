"""`thinkv`, `raas`: traces solved by hand, and the medoids of `thinkv` against a plain search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from attended import medoids_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.errors import InputError
from kvlens.runtime.evict import choose
from kvlens.scorers import table
from kvlens.scorers.interface import Facts, Kept, Seen, Views, select
from kvlens.scorers.medoids import medoids

ONE = Facts(n_layers=1, n_heads=1, n_kv_heads=1, d_head=1, layers=(0,))


class Told:
    """A scorer of one layer with one head that is told keys (numbers), what slots received, and spreads."""

    def __init__(self, name: str, **parameters: Any) -> None:
        self.scorer = table.make(name, parameters)
        self.state = self.scorer.init(ONE)
        self.held: list[int] = []
        self.keys: dict[int, float] = {}

    def tell(
        self,
        keys: Sequence[float],
        spread: Sequence[float] = (),
        received: Sequence[float] | None = None,
    ) -> None:
        first = max([-1, *self.keys]) + 1
        new = list(range(first, first + len(keys)))
        self.keys |= dict(zip(new, keys, strict=True))
        self.held += new
        received = [0.0] * len(self.held) if received is None else received
        found = torch.tensor([spread or [0.0] * len(keys)] * 2)[None]  # sparsity and entropy alike
        seen = Seen(torch.tensor([new]), first == 0, received={0: torch.tensor([[received]])}, spread={0: found})
        self.state = self.scorer.observe(self.state, seen)

    def scores(self) -> list[float]:
        positions = torch.tensor([[self.held]]).int()
        keys = torch.tensor([self.keys[p] for p in self.held])[None, None, :, None]
        return self.scorer.score(self.state, Views(0, positions, keys, keys))[0, 0].tolist()

    def keep(self, budget: int) -> list[int]:
        positions = torch.tensor([[self.held]]).int()
        scores = torch.tensor([[self.scores()]], dtype=torch.float64)
        none = torch.zeros(positions.shape, dtype=torch.bool)
        choice = choose(scores, positions, torch.tensor([[budget]]), none)
        self.state = select(self.state, Kept([choice.positions], [choice.index], [scores]))
        self.held = choice.positions[0, 0].tolist()
        return self.held


def test_raas_by_hand() -> None:
    """Three tokens may stay, after a prompt of two; each line: what the newest token looks at, and what is stamped."""
    told = Told("raas")
    told.tell([0.0, 0.0], received=[0.3, 0.7])
    assert told.scores() == [0, 1]  # the prompt's last query renews one of two: itself, at 1
    told.tell([0.0], received=[0.5, 0.2, 0.3])  # three slots: two are the top half, 0 and 2
    assert told.scores() == [2, 1, 2]
    assert told.keep(3) == [0, 1, 2]
    told.tell([0.0], received=[0.1, 0.6, 0.1, 0.2])  # of four two: 1 and 3
    assert told.scores() == [2, 3, 2, 3]
    assert told.keep(3) == [0, 1, 3]  # 0 and 2 are the oldest alike: the lower position stays
    told.tell([0.0], received=[0.1, 0.2, 0.4, 0.3])  # 3 and 4
    assert told.scores() == [2, 3, 4, 4]
    assert told.keep(3) == [1, 3, 4]
    told.tell([0.0], received=[0.05, 0.05, 0.5, 0.4])  # 4 and 5
    assert told.scores() == [3, 4, 5, 5]
    assert told.keep(3) == [3, 4, 5]


def test_raas_takes_another_share() -> None:
    told = Told("raas", share=0.25)
    told.tell([0.0] * 5, received=[0.3, 0.1, 0.4, 0.15, 0.05])  # of five two, since a part of a slot counts as one
    assert told.scores() == [4, 1, 4, 3, 4]


def test_thinkv_by_hand() -> None:
    """Segments A (R), B (T), C (E), D (T) of four tokens whose keys are points on a line; nine tokens may stay.

    A: 0 1 10 13, B: 0 1 2 9, C: 5 5.5 6 0, D: 3 4 5 6; steps: whole, 2, 1.
    Medoids of two: A 0 and 10 (the first of each pair), B 1 and 9, C 5.5 and 0, D 4 and 6. Of those one: the first.
    """
    told = Told("thinkv", size=4, steps=[2, 1], thresholds=[0.4, 0.6])
    told.tell([0.0, 1.0, 10.0, 13.0], [0.5, 0.6, 0.4, 0.5])
    told.tell([0.0, 1.0, 2.0, 9.0], [0.9] * 4)
    told.tell([5.0, 5.5, 6.0, 0.0], [0.1] * 4)
    told.tell([3.0], [0.8])
    # B's end brought A down to 2; B and C are whole. Steps that each token survives, the present one and two more:
    #   A 3 0 1 0 (two of it now, then one, and one again), B 1 3 1 2, C 1 3 1 2; position 12 is under way
    survived = [3, 0, 1, 0, 1, 3, 1, 2, 1, 3, 1, 2]
    kinds = [2] * 4 + [0] * 4 + [1] * 4
    ages = [1 / 2] * 4 + [1 / 3] * 4 + [1 / 4] * 4
    scores = told.scores()
    assert scores[:12] == pytest.approx([3 * s + k - a for s, k, a in zip(survived, kinds, ages, strict=True)])
    assert math.isnan(scores[12])
    # four leave: A's 1 and 3, whose step is over, then those of the transition that survive this step alone: 4 and 6
    assert told.keep(9) == [0, 2, 5, 7, 8, 9, 10, 11, 12]
    told.tell([4.0, 5.0, 6.0], [0.8] * 3)
    told.tell([7.0], [0.2])
    # D's end: A down to 1, B and C to 2. A 3 0, B 3 1, C 0 3 0 1, D 1 3 1 2
    survived = [3, 0, 3, 1, 0, 3, 0, 1, 1, 3, 1, 2]
    kinds = [2] * 2 + [0] * 2 + [1] * 4 + [0] * 4
    ages = [1 / 2] * 2 + [1 / 3] * 2 + [1 / 4] * 4 + [1 / 5] * 4
    assert told.scores()[:12] == pytest.approx([3 * s + k - a for s, k, a in zip(survived, kinds, ages, strict=True)])
    # four leave: 2, 8 and 10, whose step is over, then of what survives it alone the older transition's: 7
    assert told.keep(9) == [0, 5, 9, 11, 12, 13, 14, 15, 16]


def test_thinkv_as_epikv_adapted_it_by_hand() -> None:
    """Entropies 1, 2 and .5: the first alone is R, the second the higher of two (E), the third the lowest of three (T).

    Budgets 3, 2 and 1; within a segment what has received most stays.
    """
    told = Told("thinkv", parity=True, size=4, budgets=[3, 2, 1])
    mass = [0.4, 0.1, 0.3, 0.2, 0.9, 0.8, 0.7, 0.6, 0.1, 0.1, 0.2, 0.1, 0.5]
    told.tell([0.0] * 13, [1.0] * 4 + [2.0] * 4 + [0.5] * 4 + [9.0], mass)
    ranks = [1, 4, 2, 3, 1, 2, 3, 4, 2, 3, 1, 4]
    budgets = [3] * 4 + [2] * 4 + [1] * 4
    scores = told.scores()
    assert scores[:12] == pytest.approx([-r / b for r, b in zip(ranks, budgets, strict=True)])
    assert math.isnan(scores[12])
    assert told.keep(7) == [0, 2, 3, 4, 5, 10, 12]


def test_a_segment_keeps_its_type_whatever_comes_later() -> None:
    told = Told("thinkv", size=2, steps=[1])
    values = [0.3, 0.1, 0.9, 0.2, 0.5, 0.8, 0.05]
    seen: list[list[int]] = []
    for value in values:
        told.tell([0.0, 0.0], [value, value])
        seen.append(told.state.segments.types()[0].tolist())
    assert all(later[: len(seen[i])] == seen[i] for i, later in enumerate(seen[1:]))
    # the place of each among itself and those before, ties at half: .5 .25 .83 .375 .7 .75 .07
    assert seen[-1] == [2, 1, 0, 2, 0, 0, 1]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"steps": [64, 64]}, "do not fall"),
        ({"size": 32}, "do not fall"),
        ({"steps": []}, "do not fall"),
        ({"thresholds": [0.6, 0.4]}, "do not rise"),
        ({"thresholds": [0.6]}, "thresholds"),
        ({"budgets": [1, 2]}, "budgets"),
    ],
)
def test_thinkv_refuses_steps_that_do_not_fall(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        table.make("thinkv", parameters)


# Medoids


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_medoids_are_those_of_a_plain_search(data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 9))
    widest = data.draw(st.sampled_from([6, 100]))  # with many ties, or few
    points = data.draw(st.lists(st.integers(0, widest), min_size=2 * n, max_size=2 * n))
    points = torch.tensor(points).view(2, n).float()
    there = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * n, max_size=2 * n))).view(2, n)
    distances = (points[:, :, None] - points[:, None]).abs()
    found = medoids(distances, there, torch.tensor([k, k]))
    for row in range(2):
        own = there[row].nonzero()[:, 0].tolist()
        expected = medoids_by_hand(distances[row].tolist(), own, k)
        assert set(found[row].nonzero()[:, 0].tolist()) == expected
        assert len(expected) == min(k, len(own))


def test_medoids_of_clear_clusters_are_the_best_there_are() -> None:
    points = torch.tensor([0.0, 0.2, 0.3, 5.0, 5.1, 5.4, 9.0, 9.1, 9.5])
    distances = (points[:, None] - points).abs()
    found = medoids(distances, torch.ones(9, dtype=torch.bool), torch.tensor(3)).nonzero()[:, 0].tolist()
    best = min(combinations(range(9), 3), key=lambda chosen: float(distances[:, list(chosen)].amin(1).sum()))
    assert found == list(best) == [1, 4, 7]
