"""Every scorer on every family, whatever it computes: one matrix, driven by the table of scorers.

A new scorer is in it by its row in `kvlens/scorers/table.py`; what it needs of parameters on short texts stands in
`eviction.PARAMETERS`, and here what it claims beyond what all must keep (CAUSAL, UNJUDGED), and what not (GROWS).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attended import held_and_scores
from eviction import (
    CAUSAL,
    MANAGED,
    PARAMETERS,
    TOGETHER,
    padded,
    policy,
    refuses,
    settled,
    streamed_logits,
    uneven,
)
from tiny import FAMILIES, llama, token_ids

from kvlens import model as models
from kvlens.auditing.bytes import storage_bytes
from kvlens.errors import ModelRefused
from kvlens.model import Model
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.cache import ledger_of
from kvlens.scorers.interface import EMPTY, Facts, tensors
from kvlens.scorers.table import TABLE, make

# How many of the last of 30 tokens have no score yet; every other token but the first has one.
UNJUDGED = {
    "surprise": 1,
    "surprise_fast": 1,
    "lagkv": 6,
    "snapkv": 4,
    "tova": 1,
    "rkv": 4,
    "thinkv": 2,
    "segment_hidden": 2,
}
# What a state keeps of every token seen, in bytes a token, and why; all other states grow with what is held alone.
GROWS = {
    "kvzip": (4, "it repeats the whole text, so it keeps every id"),
    "thinkv": (3, "a segment is typed by the tertiles of all before it: 12 bytes, here for 4 tokens"),
    "segment_hidden": (3, "the same segments"),
}
PARITY = {
    "thinkv": {"size": 4, "parity": True, "budgets": [3, 2, 1]}
}  # beside the defaults, where the state is another
# How budgets are handed out: every way is tried with every scorer. A new allocator is one row here.
ALLOCATIONS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "uniform": lambda _: {"reduce": "head"},
    "table, padded": uneven,
    "table, ragged": lambda model: {"storage": "ragged", **uneven(model)},
}
FACTS = Facts(n_layers=3, n_heads=4, n_kv_heads=2, d_head=8, layers=(0, 1, 2))
CHUNKS = [8, 14, *[1] * 4]


@functools.cache
def family(name: str) -> Model:
    return models.wrap(FAMILIES[name]())


def ran(model: Model, scorer: str, **settings: Any) -> tuple[Run, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """A run over two rows, of 26 and 15 tokens, and what it holds and says of it in the end."""
    ids, own, _ = padded([22, 11], 4)
    with apply(policy(scorer, **settled(scorer, settings)), model) as run:
        streamed_logits(model, ids, CHUNKS, own=own)
    return run, held_and_scores(run)


@pytest.mark.parametrize("scorer", TABLE)
@pytest.mark.parametrize("name", MANAGED)
def test_shape_budget_protection_and_determinism(name: str, scorer: str) -> None:
    model = family(name)
    if refuses(model, scorer):
        with pytest.raises(ModelRefused, match="which slides"), apply(policy(scorer), model):
            pass
        return
    run, found = ran(model, scorer, reduce="head")
    again, same = ran(model, scorer, reduce="head")
    assert set(found) == {layer for layer, window in enumerate(model.sliding) if window is None}
    for layer, (held, scores) in found.items():
        assert scores.dtype in (torch.float32, torch.float64)
        assert scores.shape[0] == 2
        assert scores.shape[1] in (1, model.n_kv_heads)
        assert scores.shape[2] == 12
        torch.testing.assert_close(scores, same[layer][1], atol=0, rtol=0, equal_nan=True)
        assert not scores[held != EMPTY].isinf().any()
    for rows in run.report().kept.values():
        for n_own, heads in zip((26, 15), rows, strict=True):
            for kept in heads:
                assert len(kept) == 12
                assert kept == sorted(set(kept))
                assert kept[:2] == [0, 1]
                assert kept[-3:] == list(range(n_own - 3, n_own))
    assert run.report().kept == again.report().kept


@pytest.mark.parametrize("scorer", [scorer for scorer in TABLE if scorer not in TOGETHER])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_every_head_keeps_its_budget(allocation: str, scorer: str) -> None:
    model = family("llama_6_over_3")
    settings = ALLOCATIONS[allocation](model)
    run, _ = ran(model, scorer, **settings)
    table = settings.get("allocate", {}).get("table", [[12] * model.n_kv_heads] * model.n_layers)
    for layer, rows in run.report().kept.items():
        for n_own, heads in zip((26, 15), rows, strict=True):
            assert [len(kept) for kept in heads] == table[layer]
            assert all({0, 1, n_own - 3, n_own - 2, n_own - 1} <= set(kept) for kept in heads)


def of(run: Run) -> dict[int, torch.Tensor]:
    """By layer, what the run's scorer says of every slot."""
    return {layer: scores for layer, (_, scores) in held_and_scores(run).items()}


def alone_in(scorer: str, n: int) -> list[int]:
    """The passes in which a row of `n` tokens comes alone: one, or for `raas` those in which it came padded."""
    first = 34 - n  # padding
    ends = [end - first for end in (8, 16, 22, *range(23, 35)) if end > first]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)] if scorer == "raas" else [n]


@pytest.mark.parametrize("name", TABLE)
def test_pitfalls_16_27_scores_of_a_padded_row_are_its_own(name: str) -> None:
    """And of a text that came in pieces, those of a text in one; `raas` looks at the last query of every piece."""
    model = family("llama")
    ids, own, rows = padded([22, 9, 17], 12)
    with apply(policy(name, tokens=100), model) as run:
        streamed_logits(model, ids, [8, 8, 6, *[1] * 12], own=own)
    together = of(run)
    for row, tokens in enumerate(rows):
        with apply(policy(name, tokens=100), model) as run:
            streamed_logits(model, tokens[None], alone_in(name, len(tokens)))
        for layer, alone in of(run).items():
            found = together[layer][row][:, -len(tokens) :]
            torch.testing.assert_close(found, alone[0], atol=1e-3, rtol=1e-3, equal_nan=True)


def regrouped(model: Model) -> Model:
    """The same model with the query heads of every group in the opposite order."""
    hf = FAMILIES["llama_6_over_3"]()
    group = model.n_heads // model.n_kv_heads
    order = torch.arange(model.n_heads).view(-1, group).flip(1).flatten()
    channels = (order[:, None] * model.d_head + torch.arange(model.d_head)).flatten()
    with torch.no_grad():
        for layer in models.wrap(hf).layers:
            layer.q_proj.weight.copy_(layer.q_proj.weight[channels])
            layer.o_proj.weight.copy_(layer.o_proj.weight[:, channels])
    return models.wrap(hf)


@pytest.mark.parametrize("scorer", TABLE)
def test_pitfall_19_the_heads_of_a_group_have_no_order(scorer: str) -> None:
    model, ids = family("llama_6_over_3"), token_ids(30)
    found = []
    for either in (model, regrouped(model)):
        with apply(policy(scorer, tokens=100), either) as run:
            streamed_logits(either, ids, [20, *[1] * 3, 7])
        found.append(held_and_scores(run))
    for layer, (_, scores) in found[0].items():
        torch.testing.assert_close(scores, found[1][layer][1], atol=1e-3, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("scorer", CAUSAL)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_pitfalls_20_21_what_comes_later_changes_no_causal_score(name: str, scorer: str) -> None:
    model, ids = family(name), token_ids(30)
    other = torch.cat([ids[:, :20], token_ids(10, seed=5)], 1)
    found = []
    for text in (ids, other):
        with apply(policy(scorer, tokens=100), model) as run:
            streamed_logits(model, text, [30])
        found.append(held_and_scores(run))
    for layer, (_, scores) in found[0].items():
        torch.testing.assert_close(scores[..., :20], found[1][layer][1][..., :20], atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pitfall_10_massive_activations_overflow_no_score(name: str, dtype: torch.dtype) -> None:
    model = models.wrap(llama().to(dtype))
    with torch.no_grad():
        for layer in model.layers:
            layer.k_proj.weight.mul_(300)
            layer.v_proj.weight.mul_(30)
    with apply(policy(name, tokens=100), model) as run:
        streamed_logits(model, token_ids(30), [20, *[1] * 10])
    n_judged = 30 - UNJUDGED.get(name, 0)
    for found in of(run).values():
        assert found.dtype in (torch.float32, torch.float64)
        assert found[..., 1:n_judged].isfinite().all()
        assert found[..., n_judged:].isnan().all()


def state_bytes(scorer: str, n: int, parameters: dict[str, Any], **settings: Any) -> int:
    """Bytes of a scorer's state when this many tokens have come, 20 in a pass, and every second pass evicted."""
    model = family("llama_6_over_3")
    changes = settled(scorer, {"parameters": parameters, "trigger": "every:40", **settings})
    with apply(policy(scorer, **changes), model) as run:
        streamed_logits(model, token_ids(n), [20] * (n // 20))
    ledger = ledger_of(run.cache)
    assert ledger is not None
    return storage_bytes(tensor for _, tensor in tensors(ledger.state))


@pytest.mark.parametrize(
    ("scorer", "parameters"),
    [*((name, PARAMETERS.get(name, {})) for name in TABLE), *PARITY.items()],
    ids=[*TABLE, *(f"{name}-parity" for name in PARITY)],
)
def test_a_state_grows_with_what_is_held_and_not_with_what_was_seen(scorer: str, parameters: dict[str, Any]) -> None:
    """Two texts of 260 and 340 tokens, both longer than any window, of which 12 are held, the same ones in all heads.

    Where each head holds its own 12, a state of every token that any of them holds is no larger than where all hold
    the same ones, as many as the heads' together.
    """
    short, long = (state_bytes(scorer, n, parameters, reduce="all") for n in (260, 340))
    assert long - short == 80 * GROWS.get(scorer, (0, ""))[0]
    model = family("llama_6_over_3")
    together = state_bytes(scorer, 340, parameters, reduce="all", tokens=12 * model.n_layers * model.n_kv_heads)
    assert state_bytes(scorer, 340, parameters, reduce="head") <= together


@pytest.mark.parametrize("name", TABLE)
def test_scorers_are_values(name: str) -> None:
    scorer, again = (make(name, PARAMETERS.get(name, {})) for _ in range(2))
    assert scorer == again
    assert hash(scorer) == hash(again)
    assert not [name for name, _ in tensors(scorer.init(FACTS))]
