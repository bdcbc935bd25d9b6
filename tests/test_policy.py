"""A policy is checked when it is made, and says what is wrong in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvlens.errors import InputError
from kvlens.policy import Budget, Policy, Protect, ScorerChoice

PLAIN: dict[str, Any] = {"scorer": {"name": "random"}, "budget": {"tokens": 64}}


def test_defaults_and_the_two_ways_to_write_one() -> None:
    one = Policy(**PLAIN)
    assert one == Policy(scorer=ScorerChoice(name="random"), budget=Budget(tokens=64), protect=Protect(sinks=4))
    assert (one.trigger, one.every, one.reduce, one.positions, one.granularity.unit) == (
        "every:128",
        128,
        "all",
        "absolute",
        "token",
    )
    assert Policy.model_validate_json(one.model_dump_json()) == one
    uneven = Policy(**PLAIN, reduce="head", allocate={"name": "table", "table": [[9, 8], [7, 6]]})
    assert Policy.model_validate_json(uneven.model_dump_json()) == uneven


@pytest.mark.parametrize(("trigger", "every"), [("prefill", None), ("step", 1), ("every:1", 1), ("every:256", 256)])
def test_triggers(trigger: str, every: int | None) -> None:
    assert Policy(**PLAIN, trigger=trigger).every == every


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scorer": {"name": "nobody"}}, "no scorer 'nobody'"),
        ({"scorer": {"name": "epikv", "parameters": {"window": 0}}}, "window is 0"),
        ({"scorer": {}}, "scorer.name|name: Field required"),
        ({"scorer": "random"}, "scorer"),
        ({"budget": {}}, "one of tokens, bytes and keep_fraction"),
        ({"budget": {"tokens": 9, "bytes": 9}}, "one of tokens, bytes and keep_fraction"),
        ({"budget": {"tokens": 0}}, "greater than or equal to 1"),
        ({"budget": {"tokens": -5}}, "greater than or equal to 1"),
        ({"budget": {"tokens": 10**30}}, "less than or equal"),
        ({"budget": {"tokens": 9.0}}, "valid integer"),
        ({"budget": {"tokens": True}}, "valid integer"),
        ({"budget": {"keep_fraction": 0.0}}, "greater than 0"),
        ({"budget": {"keep_fraction": 1.1}}, "less than or equal to 1"),
        ({"budget": {"keep_fraction": math.nan}}, "finite|less than|greater than"),
        ({"budget": {"tokens": 6}, "protect": {"sinks": 4, "recent": 3}}, "do not fit into 6 tokens"),
        ({"protect": {"sinks": -1}}, "greater than or equal to 0"),
        ({"protect": {"skins": 4}}, "skins"),
        ({"trigger": "every:0"}, "none of prefill, step, every:H"),
        ({"trigger": "every:+8"}, "none of prefill, step, every:H"),
        ({"trigger": "stepp"}, "none of prefill, step, every:H"),
        ({"trigger": 5}, "valid string"),
        ({"positions": "compact"}, "absolute"),
        ({"storage": "sparse"}, "ragged"),
        ({"colour": "red"}, "colour"),
        ({"allocate": {"name": "table"}}, "needs its table of budgets"),
        ({"allocate": {"name": "table", "table": [[9]]}}, "every head keeps the same tokens"),
        ({"reduce": "layer", "allocate": {"name": "table", "table": [[9, 8]]}}, "heads of a layer keep the same"),
        ({"reduce": "head", "allocate": {"name": "table", "table": [[9, 3]]}}, "do not fit into 3 tokens"),
        ({"reduce": "head", "allocate": {"name": "table", "table": []}}, "do not fit into 0 tokens"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        Policy(**PLAIN | changes)
    assert "\n" not in caught.value.message


def test_sinks_and_recent_tokens_may_fill_the_budget() -> None:
    assert Policy(scorer={"name": "random"}, budget={"tokens": 7}, protect={"sinks": 4, "recent": 3}).budget.tokens == 7


def test_a_policy_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Policy(**PLAIN).trigger = "step"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tokens", "protect", "fits"),
    [
        (16, {"sinks": 0}, True),  # one page
        (15, {"sinks": 0}, False),
        (16, {"sinks": 16}, True),
        (31, {"sinks": 17}, False),  # two pages of sinks
        (32, {"sinks": 17}, True),
        (24, {"sinks": 0, "recent": 9}, True),  # 9 recent tokens, and 15 before them on the first one's page
        (23, {"sinks": 0, "recent": 9}, False),
        (40, {"sinks": 1, "recent": 9}, True),
    ],
)
def test_whole_pages_of_protected_tokens_must_fit(tokens: int, protect: dict[str, int], fits: bool) -> None:
    pages = {"granularity": {"unit": "page", "page_size": 16}, "protect": protect, "budget": {"tokens": tokens}}
    if fits:
        Policy(**PLAIN | pages)
    else:
        with pytest.raises(InputError, match="on whole pages of 16"):
            Policy(**PLAIN | pages)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"scorer": {"name": "snapkv", "window": 3}}, "scorer of a policy has no field 'window'"),
        ({"window": 3}, "a policy has no field 'window'"),
        ({"budget": {"tokens": -1}}, "field budget.tokens: -1"),
        ({"protect": {"sinks": "a"}}, "field protect.sinks: 'a'"),
        ({"granularity": {"page_size": 0}}, "field granularity.page_size: 0"),
        ({"allocate": {"name": "table", "table": [[0]]}}, "field allocate.table.0.0: 0"),
    ],
)
def test_a_refusal_names_the_place(part: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Policy(**{"scorer": {"name": "snapkv"}, "budget": {"tokens": 40}} | part)
    assert says in caught.value.message
    assert "scorer.parameters" in caught.value.hint or "window" not in says
