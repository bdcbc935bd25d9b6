"""Scores: what they are, that streaming and batching change none of them, and that states stay small and movable."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from eviction import policy, streamed_logits, uneven
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import llama, token_ids

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.observables import hidden_change, rolling
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.cache import ledger_of, storage_bytes
from kvlens.runtime.refresh import of_layer
from kvlens.scorers import table
from kvlens.scorers.frozen import Frozen
from kvlens.scorers.interface import (
    HIDDEN,
    KEYS,
    QUERIES,
    VALUES,
    Facts,
    Kept,
    Plain,
    Seen,
    Views,
    mapped,
    rows_of,
    tensors,
)


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def scores_of(run: Run) -> dict[int, torch.Tensor]:
    """By layer, what the run's scorer says now of every slot, [batch, heads, slots]."""
    ledger = ledger_of(run.cache)
    found = {}
    for index in run.layers:
        found[index] = of_layer(run.cache, ledger, index, ledger.set_of(index), run.means)
    return found


def states(model: Model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keys, values [layer, kv_head, pos, d_head], the stream after every block [layer, pos, d_model], in one pass."""
    cache, hidden = models.new_cache(model), {}
    with torch.no_grad(), models.watch_blocks(model, lambda layer, out: hidden.__setitem__(layer, out[0])):
        models.logits(model, ids, cache=cache)
    layers = models.cache_layers(cache)
    return {
        "keys": torch.stack([keys[0] for keys, _ in layers]),
        "values": torch.stack([values[0] for _, values in layers]),
        "hidden": torch.stack([hidden[layer] for layer in range(model.n_layers)]),
    }


def by_the_observables(name: str, model: Model, ids: torch.Tensor) -> torch.Tensor:
    """What the signal functions that `kvlens observe` uses say of a whole text, [pos]."""
    seen = states(model, ids)
    if name in ("key_var", "value_var"):
        per_layer = torch.stack([part.double().var(-1, correction=0).mean(0) for part in seen[name[:-4] + "s"]])
        return rolling.mean(rolling.init(), per_layer.mean(0))[1]
    _, change = hidden_change.step(hidden_change.init(), seen["hidden"][[1, 2]])
    step = rolling.mean if name == "hidden_change" else rolling.zscore
    values = step(rolling.init(), change)[1]
    return values[0] - values[1]


@pytest.mark.parametrize("chunks", [[70], [30, *[1] * 40], [7] * 10])
@pytest.mark.parametrize("name", ["hidden_change", "epikv", "key_var", "value_var"])
def test_pitfall_21_streamed_scores_are_those_of_the_whole_text(model: Model, name: str, chunks: list[int]) -> None:
    ids = token_ids(70)
    with apply(policy(name, tokens=100), model) as run:
        streamed_logits(model, ids, chunks)
    expected = by_the_observables(name, model, ids)
    for found in scores_of(run).values():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found[0, 0].double(), expected, atol=1e-3, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", ["hidden_change", "epikv", "key_var", "value_var"])
def test_a_number_is_frozen_when_its_token_is_made(model: Model, name: str) -> None:
    ids = token_ids(60)
    with apply(policy(name, tokens=100), model) as run:
        streamed_logits(model, ids[:, :30], [30])
        before = scores_of(run)[0]
        streamed_logits(model, ids[:, 30:], [*[1] * 30], run.cache)
        assert torch.equal(scores_of(run)[0][..., :30].nan_to_num(9.0), before.nan_to_num(9.0))


@pytest.mark.parametrize("name", ["hidden_change", "epikv", "key_var"])
def test_pitfall_03_what_is_remembered_goes_with_its_tokens(model: Model, name: str) -> None:
    for shape in ({}, uneven(model)):
        sizes = []
        with apply(policy(name, **shape), model) as run:
            for n in (40, 80):
                streamed_logits(model, token_ids(n), [n])
                ledger = ledger_of(run.cache)
                sizes.append(sum(tensor.nbytes for _, tensor in tensors(ledger.state)))
                kept = {p for rows in run.report().kept.values() for head in rows[0] for p in head}
                assert set(ledger.state.frozen.positions[0].tolist()) == kept
        assert sizes[0] == sizes[1]


def test_epikv_leaves_the_prompt_out_where_asked(model: Model) -> None:
    ids = token_ids(60)
    chosen = policy("epikv", tokens=100, parameters={"score_prompt": False}, protect={"sinks": 0, "prompt": True})
    with apply(chosen, model) as run:
        streamed_logits(model, ids, [40, *[1] * 20])
    found = scores_of(run)[0][0, 0]
    assert found[:40].isnan().all()
    change = hidden_change.step(hidden_change.init(), states(model, ids)["hidden"][[1, 2]])[1][:, 40:]
    values = rolling.zscore(rolling.init(), change)[1]  # the first change is taken against the last prompt token
    torch.testing.assert_close(found[40:].double(), values[0] - values[1], atol=1e-3, rtol=1e-3)
    with pytest.raises(InputError, match=r"needs protect\.prompt"):
        policy("epikv", parameters={"score_prompt": False})


@pytest.mark.parametrize(
    ("n_layers", "expected"), [(32, (10, 21)), (30, (9, 20)), (3, (1, 2)), (1, (0, 0)), (28, (9, 18))]
)
def test_blocks_are_those_at_the_papers_depths(n_layers: int, expected: tuple[int, int]) -> None:
    assert table.make("epikv", {}).hidden_layers(Facts(n_layers, 4, 2, 8, tuple(range(n_layers)))) == expected


# The plain ones


def views(n: int = 50, layer: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Views:
    keys, values = torch.randn(2, 1, 2, n, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Views(layer, torch.arange(n, dtype=torch.int32).view(1, 1, n), keys, values, **more)


def test_random_is_uniform_and_hangs_on_seed_layer_head_and_position_alone() -> None:
    scorer = table.make("random", {"seed": 5})
    first = scorer.score(None, views(20_000))
    assert abs(float(first.mean()) - 0.5) < 0.01
    assert abs(float(first.var()) - 1 / 12) < 0.003
    assert float(torch.corrcoef(first[0])[0, 1].abs()) < 0.03
    assert torch.equal(first, scorer.score(None, views(20_000, seed=9)))
    for other in (
        table.make("random", {"seed": 6}).score(None, views(20_000)),
        scorer.score(None, views(20_000, layer=1)),
    ):
        pair = torch.stack([first[0, 0], other[0, 0]])
        assert float(torch.corrcoef(pair)[0, 1].abs()) < 0.03
    one = views(20_000)
    part = Views(
        0, one.positions[..., 100:200], one.keys[:, 1:, 100:200], one.values[:, 1:, 100:200], kv_heads=slice(1, 2)
    )
    assert torch.equal(scorer.score(None, part), first[:, 1:, 100:200])


@pytest.mark.parametrize("seed", [0, 2**31, 2**40, 2**63 - 1])
def test_random_takes_any_seed(seed: int) -> None:
    found = table.make("random", {"seed": seed}).score(None, views())
    assert ((found >= 0) & (found < 1)).all()


def test_sliding_window_is_the_position_beyond_float32() -> None:
    positions = torch.tensor([[[2**24, 2**24 + 1, 2**24 + 2]]], dtype=torch.int32)
    found = table.make("sliding_window", {}).score(
        None, Views(0, positions, torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    )
    assert found.diff().tolist() == [[[1, 1]]]


def test_keynorm_by_hand() -> None:
    keys = torch.tensor([[[[3.0, 4.0], [0.0, 1.0]]]])
    found = table.make("keynorm", {}).score(None, Views(0, torch.tensor([[[0, 1]]]), keys, keys))
    assert found.tolist() == [[[-5.0, -1.0]]]


def test_pitfall_09_norms_of_half_precision_do_not_tie() -> None:
    found = table.make("keynorm", {}).score(None, views(2000, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert found[0, 0].unique().numel() > 1900
    assert torch.linalg.vector_norm(views(2000, dtype=torch.bfloat16).keys, dim=-1)[0, 0].unique().numel() < 500


# The table


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("epikvv", {}, "no scorer 'epikvv'"),
        ("epikv", {"windw": 3}, "no parameter 'windw'"),
        ("epikv", {"window": 0}, "greater than or equal to 1"),
        ("epikv", {"window": "64"}, "valid integer"),
        ("epikv", {"window": True}, "valid integer"),
        ("epikv", {"depth_a": math.nan}, "finite"),
        ("epikv", {"depth_b": 1.5}, "less than or equal to 1"),
        ("random", {"seed": 2**70}, "less than"),
        ("random", {"seed": -1}, "greater than or equal"),
        ("keynorm", {"x": 1}, "no parameter"),
    ],
)
def test_wrong_parameters_are_refused_by_name(name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        table.make(name, parameters)


# What an observer is shown


@dataclass(frozen=True)
class Noted:
    """What came, pass by pass."""

    passes: tuple[Any, ...] = ()
    slots: tuple[Any, ...] = ()

    def select(self, kept: Kept) -> Noted:
        return Noted(self.passes, (*self.slots, *kept.index))


@dataclass(frozen=True)
class Notes(Plain):
    """A scorer that keeps the recent ones and notes all it is shown."""

    needs = frozenset({KEYS, VALUES, HIDDEN, QUERIES})
    n_queries = 3

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        return (1,)

    def init(self, facts: Facts) -> Noted:
        return Noted()

    def observe(self, state: Noted, seen: Seen) -> Noted:
        return Noted((*state.passes, (seen.keys[2], seen.values[0], seen.hidden[1], seen.queries[2])), state.slots)

    def score(self, state: Noted, views: Views) -> torch.Tensor:
        return views.positions.float()


@pytest.mark.parametrize("shape", ["uniform", "ragged"])
def test_an_observer_is_shown_what_it_needs(model: Model, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    monkeypatch.setitem(table.TABLE, "notes", Notes)
    ids, asked = token_ids(30), []
    chunks = [12, 8, *[1] * 10]
    more = {"storage": "ragged", **uneven(model)} if shape == "ragged" else {}
    with apply(policy("notes", tokens=15, **more), model) as run:
        found = streamed_logits(model, ids, chunks)
    state = ledger_of(run.cache).state
    keys, values, hidden, queries = zip(*state.passes, strict=True)
    assert [part.shape[2] for part in queries] == [3, 3, *[1] * 10]
    assert torch.cat(keys, 2).shape == torch.cat(values, 2).shape == (1, 2, 30, 8)
    assert torch.cat(hidden, 1).shape == (1, 30, 32)
    assert len(state.slots) > 0
    assert storage_bytes(tensors(state)) > 30 * 32 * 4  # a tuple's tensors count too

    def note(layer: int, own: Any, query: torch.Tensor, *_: Any) -> torch.Tensor:
        if layer == 2:
            asked.append(query)
        return own()

    # the first two passes saw all there was, so the plain model asks the same
    with torch.no_grad(), models.around_attention(model, note):
        plain = models.logits(model, ids[:, :12])
    torch.testing.assert_close(found[:, :12], plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(queries[0], asked[0][:, :, 9:12], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(keys[0], states(model, ids[:, :12])["keys"][None, 2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden[0], states(model, ids[:, :12])["hidden"][None, 1], atol=1e-4, rtol=1e-4)


# States


@dataclass(frozen=True)
class Outer:
    number: int
    frozen: Frozen = field(default_factory=Frozen)
    rows: torch.Tensor | None = None


def test_a_state_is_walked_whatever_its_class() -> None:
    state = Outer(3, Frozen(torch.tensor([[0], [1]]), torch.tensor([[2.0], [3.0]])), torch.tensor([5, 6]))
    assert [name for name, _ in tensors(state)] == ["state.frozen.positions", "state.frozen.numbers", "state.rows"]
    moved = rows_of(state, torch.tensor([1, 1, 0]))
    assert moved.frozen.numbers.tolist() == [[3.0], [3.0], [2.0]]
    assert (moved.number, moved.rows.tolist()) == (3, [6, 6, 5])
    by_name = dict(tensors(state))
    again = mapped(Outer(3), by_name.get)
    assert again.frozen.positions is state.frozen.positions
    assert again.number == 3


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_frozen_numbers_are_found_and_dropped_like_in_a_dict(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    rows: list[dict[int, float]] = [{} for _ in range(batch)]
    state, n_own = Frozen(), [0] * batch
    for _ in range(data.draw(st.integers(1, 4))):
        new = data.draw(st.integers(1, 4))
        positions = torch.full((batch, new), -1)
        numbers = torch.from_numpy(np.random.default_rng(len(rows[0])).normal(size=(batch, new)))
        for row in range(batch):
            for column in range(new):
                if data.draw(st.booleans()) or n_own[row]:  # padding on the left
                    positions[row, column] = n_own[row]
                    rows[row][n_own[row]] = float(numbers[row, column].float())
                    n_own[row] += 1
        state = state.append(positions, numbers)
        wide = max(1, *n_own)
        asked = torch.tensor(
            [[data.draw(st.lists(st.integers(-1, wide), min_size=wide, max_size=wide)) for _ in range(2)] for _ in rows]
        )
        empty = torch.zeros(batch, 2, wide, 1)
        found = state.look_up(Views(0, asked.int(), empty, empty))
        for row in range(batch):
            for head in range(2):
                for position, number in zip(asked[row, head].tolist(), found[row, head].tolist(), strict=True):
                    assert number == rows[row][position] if position in rows[row] else math.isnan(number)
        state = state.select(Kept([asked[:, :1].int(), asked[:, 1:].int()]))
        rows = [{p: v for p, v in known.items() if p in asked[row]} for row, known in enumerate(rows)]
        held = [[p for p in row if p >= 0] for row in state.positions.tolist()]
        assert held == [sorted(known) for known in rows]
