"""Tokens, bytes and fractions become one number, exactly."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from eviction import policy, streamed_logits
from hypothesis import given
from hypothesis import strategies as st
from tiny import llama, token_ids

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.runtime import budget
from kvlens.runtime.apply import apply

ONE = 3 * 2 * 2 * 8 * 4  # layers, KV heads, keys and values, d_head, bytes of float32


@given(st.integers(1, 999), st.integers(1, 5000))
def test_pitfall_08_a_fraction_is_the_decimal_that_was_written(thousandths: int, n: int) -> None:
    assert budget.fraction_tokens(thousandths / 1000, n) == max(1, Fraction(thousandths, 1000) * n // 1)


def test_pitfall_08_where_floats_go_wrong() -> None:
    assert int(100 * (1 - 0.9)) == 9  # the common way
    assert budget.fraction_tokens(0.1, 100) == 10
    assert int(0.29 * 100) == 28
    assert budget.fraction_tokens(0.29, 100) == 29


@pytest.mark.parametrize(("given_bytes", "tokens"), [(12 * ONE, 12), (13 * ONE - 1, 12), (5 * ONE, 5)])
def test_bytes_hold_what_they_say(given_bytes: int, tokens: int) -> None:
    model = models.wrap(llama())
    chosen = policy("keynorm", budget={"bytes": given_bytes})
    with apply(chosen, model) as run:
        model.hf.generate(token_ids(30), max_new_tokens=5, pad_token_id=0, eos_token_id=None, do_sample=False)
    report = run.report()
    assert report.most_held == tokens
    assert report.held_bytes == report.claimed_bytes == tokens * ONE <= given_bytes


def test_bytes_that_hold_less_than_what_is_protected_are_refused() -> None:
    with (
        pytest.raises(InputError, match="holds 4 tokens") as caught,
        apply(policy(budget={"bytes": 5 * ONE - 1}), models.wrap(llama())),
    ):
        pass
    assert f"{5 * ONE:,}" in caught.value.hint


def test_a_fraction_is_of_each_rows_own_prompt() -> None:
    chosen = policy(budget={"keep_fraction": 0.29}, protect={"sinks": 1})
    found = budget.nominal(chosen, None, torch.tensor([100, 3, 51]), (0, 2))
    assert found.tolist() == [29, 1, 14]


def test_a_prompt_that_is_protected_must_fit() -> None:
    model = models.wrap(llama())
    chosen = policy("epikv", protect={"sinks": 0, "prompt": True, "recent": 0})
    with pytest.raises(InputError, match="30 tokens are protected"), apply(chosen, model):
        model.hf.generate(token_ids(30), max_new_tokens=2, pad_token_id=0)
    with apply(chosen, model) as run:
        model.hf.generate(token_ids(9), max_new_tokens=9, pad_token_id=0, eos_token_id=None, do_sample=False)
    kept = run.report().kept[0][0][0]
    assert kept[:9] == list(range(9))
    assert len(kept) == 12


@pytest.mark.parametrize("chunks", [[9, 8], [17]])
@pytest.mark.parametrize("shared", [{}, {"reduce": "head", "allocate": {"name": "ada"}}])
def test_a_prompt_that_is_protected_must_fit_before_the_first_token_is_chosen(
    chunks: list[int], shared: dict[str, Any]
) -> None:
    chosen = policy("keynorm", protect={"sinks": 0, "prompt": True}, trigger="every:100", **shared)
    model = models.wrap(llama())
    says = "the prompt of 17 tokens is protected, more than the budget of 12"
    with pytest.raises(InputError, match=says), apply(chosen, model):
        streamed_logits(model, token_ids(17), chunks)
    with apply(chosen, model):  # what comes after the prompt has time until an eviction is due
        streamed_logits(model, token_ids(20), [12, *[1] * 8])


@pytest.mark.parametrize(("n_prompt", "n_new", "fits"), [(8, 9, True), (9, 3, True), (9, 4, False), (12, 0, True)])
def test_a_prompt_and_the_recent_tokens_to_come_must_fit(n_prompt: int, n_new: int, fits: bool) -> None:
    chosen = policy("epikv", protect={"sinks": 0, "prompt": True, "recent": 4})
    says = f"{n_prompt} tokens and 4 recent tokens are protected"
    for rows in ([n_prompt], [1, n_prompt]):
        with nullcontext() if fits else pytest.raises(InputError, match=says):
            budget.check_prompt(chosen, 12, torch.tensor(rows), (0, 1, 2), n_new)


def test_a_table_of_another_model_is_refused() -> None:
    chosen = policy(reduce="head", allocate={"name": "table", "table": [[9, 9]] * 2})
    with pytest.raises(InputError, match="3 layers of 2 KV heads"), apply(chosen, models.wrap(llama())):
        pass


@pytest.mark.parametrize("storage", ["ragged", "padded"])
def test_a_head_never_waits_for_a_wider_one_to_be_full(storage: str) -> None:
    model = models.wrap(llama())
    budgets = [[6, 40], [40, 6], [40, 40]]  # nothing holds 40, so one head of two layers alone asks for an eviction
    chosen = policy("keynorm", reduce="head", storage=storage, allocate={"name": "table", "table": budgets})
    with apply(chosen, model) as run:
        model.hf.generate(token_ids(9), max_new_tokens=9, pad_token_id=0, eos_token_id=None, do_sample=False)
    held = [[len(head) for head in run.report().kept[layer][0]] for layer in range(3)]
    assert held == [[min(budget, 17) for budget in row] for row in budgets]
