"""Traces whose important tokens are known: does a label find the values that the target needs?

1. One needed chain of assignments (`a = 17`, `b = a + 24`, ...) and distractor chains of the same form among
   themselves are drawn, with a variable name and a value of its own for every assignment.
2. The chains are interleaved by a random order of all assignments, which keeps the order inside a chain. Every order
   is as likely as any other, so needed values and distractors have the same mean position.
3. The target restates each needed assignment with its result (`b = a + 24 = 41`), or (`value`) states the last result
   alone. Either way it depends on every needed value and on no distractor, and each value is stated once.

Values have two digits: one token each, or one a digit. The spans of a trace are all its values, so that
`--units spans` labels exactly what is to be ranked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvlens.errors import InputError
from kvlens.records import Tokens, Trace
from kvlens.texts import token_ranges

NAMES = "abcdefghjkmnpqrstuvwxyz"  # without i, l and o, which look like digits
VALUES = range(11, 50)
TARGETS = ("steps", "value")


@dataclass(frozen=True, slots=True)
class PlantedTrace:
    """A trace with the character ranges of its needed and its distractor values, end exclusive, in order."""

    trace: Trace
    needed: tuple[tuple[int, int], ...]
    distractors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Assignment:
    """`name = value`, or `name = previous + value`."""

    name: str
    previous: str
    value: int
    needed: bool

    def head(self) -> str:
        return f"{self.name} = {self.previous} + " if self.previous else f"{self.name} = "


def planted_traces(
    n: int, *, seed: int, n_needed: int = 4, n_distractors: int = 8, target: str = "steps"
) -> list[PlantedTrace]:
    """`n` planted traces, the same for the same arguments; the first ones do not depend on `n`.

    Raises:
        InputError: no needed value, more variables than there are names, or an unknown `target`.
    """
    if target not in TARGETS:
        raise InputError(f"cannot plant a target {target!r}: not known", f"use one of {', '.join(TARGETS)}")
    if n < 1 or n_needed < 1 or n_distractors < 0 or n_needed + n_distractors > len(NAMES):
        wanted = f"{n} traces with {n_needed} needed and {n_distractors} irrelevant variables"
        hint = f"ask for at least one trace and one needed variable, and {len(NAMES)} variables at most"
        raise InputError(f"cannot plant {wanted}", hint)
    random_numbers = random.Random(f"{seed} {n_needed} {n_distractors}")  # both targets get the same chains
    return [_planted(f"planted-{seed}-{i}", random_numbers, n_needed, n_distractors, target) for i in range(n)]


def _planted(identifier: str, rng: random.Random, n_needed: int, n_distractors: int, target: str) -> PlantedTrace:
    chains = _chains(rng, n_needed, n_distractors)
    needed = chains[0]
    asked = needed[-1].name
    prompt = f"Find the value of {asked}. Some of these assignments do not matter.\n\n"
    order = [chain for chain in chains for _ in chain]
    rng.shuffle(order)
    left = {id(chain): iter(chain) for chain in chains}
    reasoning = ""
    spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for chain in order:
        assignment = next(left[id(chain)])
        reasoning += assignment.head()
        start = len(prompt + reasoning)
        reasoning += f"{assignment.value}\n"
        spans[assignment.needed].append((start, len(prompt + reasoning) - 1))
    results = list(accumulate(assignment.value for assignment in needed))
    steps = [f"{needed[0].head()}{results[0]}"]
    steps += [f"{step.head()}{step.value} = {result}" for step, result in zip(needed[1:], results[1:], strict=True)]
    reasoning += f"\nOnly what {asked} needs, step by step:\n" if target == "steps" else f"\nSo {asked} ="
    trace = Trace(
        id=f"{identifier}-{target}",
        prompt=prompt,
        reasoning=reasoning,
        target="\n".join(steps) if target == "steps" else f" {results[-1]}",
        answer=(str(results[-1]),),
        spans=tuple(sorted(spans[True] + spans[False])),
    )
    return PlantedTrace(trace, needed=tuple(spans[True]), distractors=tuple(spans[False]))


def _chains(rng: random.Random, n_needed: int, n_distractors: int) -> list[list[_Assignment]]:
    """The needed chain, then distractor chains of the same length (the last may be shorter)."""
    n = n_needed + n_distractors
    names, values = rng.sample(NAMES, n), rng.sample(VALUES, n_needed)
    taken = {*values, *accumulate(values)}  # a distractor must not look like a result either
    values += rng.sample([value for value in VALUES if value not in taken], n_distractors)
    chains = []
    for start in range(0, n, n_needed):
        stop = min(start + n_needed, n)
        previous = ["", *names[start : stop - 1]]
        chains.append(
            [_Assignment(names[i], previous[i - start], values[i], needed=start == 0) for i in range(start, stop)]
        )
    return chains


def token_positions(tokens: Tokens, char_spans: Sequence[tuple[int, int]]) -> list[int]:
    """The positions, ascending and without repeats, of the tokens that hold the visible text of `char_spans`."""
    return sorted({pos for start, end in token_ranges(tokens, char_spans) for pos in range(start, end)})
