"""Planted traces: what they state, what they need, and that nothing but need tells the two kinds of value apart."""

from __future__ import annotations

import re
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, metaspace

from kvlens.errors import InputError
from kvlens.planted import NAMES, PlantedTrace, planted_traces, token_positions
from kvlens.texts import tokenize, units

ASSIGNMENT = re.compile(r"(?:^|\n)(\w) = (?:(\w) \+ )?(\d+)(?= = |\n|$)")


def context(planted: PlantedTrace) -> str:
    return planted.trace.prompt + planted.trace.reasoning


def program(planted: PlantedTrace) -> dict[str, tuple[str, int, int]]:
    """name -> (previous name, value, where the value starts), read from the context by itself."""
    found = ASSIGNMENT.finditer(context(planted))
    return {match[1]: (match[2] or "", int(match[3]), match.start(3)) for match in found}


def solve(assignments: dict[str, tuple[str, int, int]], name: str) -> tuple[int, list[str]]:
    """The value of a variable and the chain of variables that it rests on, first one first."""
    previous, value, _ = assignments[name]
    if not previous:
        return value, [name]
    base, chain = solve(assignments, previous)
    return base + value, [*chain, name]


SIZES = st.tuples(st.integers(1, 8), st.integers(0, 12))


@given(seed=st.integers(0, 10**6), sizes=SIZES, target=st.sampled_from(["steps", "value"]))
def test_the_needed_values_are_the_ones_the_target_rests_on(seed: int, sizes: tuple[int, int], target: str) -> None:
    n_needed, n_distractors = sizes
    (planted,) = planted_traces(1, seed=seed, n_needed=n_needed, n_distractors=n_distractors, target=target)
    assignments = program(planted)
    assert len(assignments) == n_needed + n_distractors
    asked = re.search(r"value of (\w)\.", planted.trace.prompt)
    assert asked
    result, chain = solve(assignments, asked[1])
    assert planted.trace.answer == (str(result),)
    whole = context(planted) + planted.trace.target
    needed, distractors = ([whole[start:end] for start, end in kind] for kind in (planted.needed, planted.distractors))
    assert needed == [str(assignments[name][1]) for name in chain]
    assert {start for start, _ in planted.distractors} == {
        start for name, (_, _, start) in assignments.items() if name not in chain
    }
    assert len({*needed, *distractors}) == n_needed + n_distractors  # every value is stated once
    assert all(end <= len(context(planted)) - 2 for _, end in planted.needed + planted.distractors)
    assert planted.trace.spans == tuple(sorted(planted.needed + planted.distractors))


@given(seed=st.integers(0, 10**6))
def test_the_target_restates_each_needed_step_and_no_distractor(seed: int) -> None:
    (steps,), (value,) = (planted_traces(1, seed=seed, target=target) for target in ("steps", "value"))
    assignments = program(steps)
    result, chain = solve(assignments, re.findall(r"value of (\w)\.", steps.trace.prompt)[0])
    lines = []
    for name in chain:
        previous, added, _ = assignments[name]
        lines.append(
            f"{name} = {previous} + {added} = {solve(assignments, name)[0]}" if previous else f"{name} = {added}"
        )
    assert steps.trace.target.split("\n") == lines
    assert value.trace.target == f" {result}"
    assert context(value).endswith(f"So {chain[-1]} =")
    assert program(value) == assignments
    distractors = {context(steps)[start:end] for start, end in steps.distractors}
    assert not distractors & set(re.findall(r"\d+", steps.trace.target))


def test_distractors_match_the_needed_in_form_and_position() -> None:
    planted = planted_traces(400, seed=0)
    differences, sums, first_needed = [], {True: [], False: []}, []
    for one in planted:
        order = sorted(one.needed + one.distractors)
        ranks = {span: rank for rank, span in enumerate(order)}
        differences.append(mean(ranks[s] for s in one.needed) - mean(ranks[s] for s in one.distractors))
        first_needed.append(order[0] in one.needed)
        for kind, spans in ((True, one.needed), (False, one.distractors)):
            sums[kind] += [context(one)[start - 2] == "+" for start, _ in spans]
    assert abs(mean(differences)) < 3 * stdev(differences) / len(planted) ** 0.5
    assert mean(sums[True]) == mean(sums[False]) == 0.75
    assert 0.25 < mean(first_needed) < 0.42  # a third, as a fair draw of 4 in 12 gives


def test_the_same_seed_gives_the_same_traces() -> None:
    first = planted_traces(5, seed=3)
    assert planted_traces(8, seed=3)[:5] == first
    assert planted_traces(5, seed=4) != first
    assert len({one.trace.id for one in first + planted_traces(5, seed=3, target="value")}) == 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": "sum"},
        {"n": 0},
        {"n_needed": 0},
        {"n_distractors": -1},
        {"n_needed": 4, "n_distractors": len(NAMES) - 3},
    ],
)
def test_what_cannot_be_planted(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        planted_traces(**({"n": 1, "seed": 0} | wrong))
    assert caught.value.hint
    planted_traces(1, seed=0, n_needed=4, n_distractors=len(NAMES) - 4)
    planted_traces(1, seed=0, n_needed=len(NAMES), n_distractors=0)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_level(digits=False), metaspace("first")])
@pytest.mark.parametrize("target", ["steps", "value"])
def test_token_positions_hold_exactly_the_values(tokenizer: Any, target: str) -> None:
    for planted in planted_traces(5, seed=1, target=target):
        tokens = tokenize(planted.trace, tokenizer)
        for spans in (planted.needed, planted.distractors):
            positions = token_positions(tokens, spans)
            text = "".join(tokens.text[slice(*tokens.char_spans[pos])] for pos in positions)
            assert "".join(text.split()) == "".join(tokens.text[start:end] for start, end in spans)
            assert positions == sorted(set(positions))
            assert max(positions) < tokens.n_context - 1
        assert len(units(tokens, "spans")) == len(planted.trace.spans)
        assert not np.intersect1d(
            token_positions(tokens, planted.needed), token_positions(tokens, planted.distractors)
        ).size
