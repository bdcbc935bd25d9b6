"""`expected_attention` against mean, covariance and rotations written out token by token, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from asking_oracles import MADE, Asking, held_and_scores
from eviction import padded, policy, step_of_each, streamed_logits, uneven, visibility
from tiny import token_ids

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import ledger_of
from kvlens.scorers.interface import EMPTY, tensors

CHUNKS = [[40], [12, 10, *[1] * 8, 10], [1, 39]]
NAMES = [name for name in MADE if name != "mistral"]  # every layer of that one slides


def by_hand(asking: Asking, layer: int, head: int, held: list[int], values: torch.Tensor, **how: int) -> list[float]:
    """What one KV head's held positions are worth; NaN for those left out."""
    model, n = asking.model, asking.asked[layer][0].shape[1]
    group, (plain, _), keys = model.n_heads // model.n_kv_heads, asking.plain[layer], asking.asked[layer][1][head]
    ahead = torch.arange(n, n + how["future"])
    turns = [asking.turn(layer, torch.eye(model.d_head).double()[None], p.repeat(model.d_head))[0].T for p in ahead]
    turn = sum(turns) / len(turns)
    judged = [p for p in held if p >= how["sinks"]]
    total = dict.fromkeys(judged, 0.0)
    for member in range(head * group, (head + 1) * group):
        queries = plain[member][how["sinks"] :]
        mean = queries.sum(0) / len(queries)
        covariance = sum(torch.outer(q - mean, q - mean) for q in queries) / len(queries)
        mean, covariance = turn @ mean, turn @ covariance @ turn.T
        c = float(getattr(model.layers[layer], "scaling", model.d_head**-0.5))
        exponents = {p: float(c * keys[p] @ mean + c * c / 2 * keys[p] @ covariance @ keys[p]) for p in judged}
        most = max(exponents.values())
        weights = {p: math.exp(e - most) for p, e in exponents.items()}
        for p in judged:
            total[p] += weights[p] / sum(weights.values()) / group
    return [total[p] * float(values[p].norm()) if p in total else math.nan for p in held]


def values_of(model: Model, ids: torch.Tensor, masks: Any) -> list[torch.Tensor]:
    cache = models.new_cache(model)
    with torch.no_grad(), models.layer_masks(model, masks or {}):
        models.logits(model, ids[None], cache=cache)
    return [values[0].double() for _, values in models.cache_layers(cache)]


def check(run: Any, asking: Asking, values: list[torch.Tensor], **how: int) -> None:
    for layer, (held, scores) in held_and_scores(run).items():
        for head in range(asking.model.n_kv_heads):
            real = held[0, head] != EMPTY
            wanted = by_hand(asking, layer, head, held[0, head, real].tolist(), values[layer][head], **how)
            found = scores[0, head, real].double()
            torch.testing.assert_close(found, torch.tensor(wanted).double(), atol=1e-5, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", NAMES)
def test_pitfalls_19_21_26_it_is_what_the_formula_says(
    name: str, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, how = models.wrap(MADE[name]()), token_ids(40), {"sinks": 3, "future": 9}
    with apply(policy("expected_attention", tokens=100, parameters=how), model) as run:
        streamed_logits(model, ids, chunks)
    check(run, Asking(model, ids[0], None, monkeypatch), values_of(model, ids[0], None), **how)


@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
@pytest.mark.parametrize("name", ["llama_6_over_3", "gemma3"])
def test_it_goes_on_over_what_is_held(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, chunks = models.wrap(MADE[name]()), token_ids(36), [14, 12, 9, 1]
    how = {"sinks": 2, "future": 5}
    more: dict[str, Any] = {"ragged": {"storage": "ragged", **uneven(model)}, "padded": uneven(model)}.get(shape, {})
    with apply(policy("expected_attention", parameters=how, **more), model) as run:
        streamed_logits(model, ids, chunks)
    masks = visibility(model, run.events(), step_of_each(chunks))
    check(run, Asking(model, ids[0], masks, monkeypatch), values_of(model, ids[0], masks), **how)


def test_pitfall_03_its_state_is_the_same_after_any_number_of_tokens() -> None:
    model, sizes = models.wrap(MADE["llama"]()), []
    for n in (20, 60):
        ids, own, _ = padded([n, n - 9], 6)
        with apply(policy("expected_attention"), model) as run:
            streamed_logits(model, ids, [n, *[1] * 6], own=own)
        state = ledger_of(run.cache).state
        assert state.count.tolist() == [n + 5, n - 4]  # one left out
        assert state.n_seen.tolist() == [n + 6, n - 3]
        sizes.append(sum(tensor.nbytes for _, tensor in tensors(state)))
    assert sizes[0] == sizes[1] < 2 * 3 * 4 * (8 * 8 + 8) * 4 + 100


def test_large_means_do_not_eat_the_spread() -> None:
    """Queries far from 0, as Qwen's biases make them: a sum of squares in float32 would lose the covariance."""
    model = models.wrap(MADE["qwen2"]())
    with torch.no_grad():
        for layer in model.layers:
            layer.q_proj.bias.add_(3000.0)
    found = []
    for chunks in ([40], [10, *[1] * 30]):
        with apply(policy("expected_attention", tokens=100), model) as run:
            streamed_logits(model, token_ids(40), chunks)
        found.append(ledger_of(run.cache).state.spread)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=0.1)
    assert (found[0].diagonal(dim1=-2, dim2=-1) > 0).all()


def test_a_text_of_sinks_alone_judges_nothing() -> None:
    model = models.wrap(MADE["llama"]())
    with apply(policy("expected_attention", tokens=100, parameters={"sinks": 8}), model) as run:
        streamed_logits(model, token_ids(8), [5, 1, 2])
    assert all(scores.isnan().all() for _, scores in held_and_scores(run).values())


@pytest.mark.parametrize("parameters", [{"future": 0}, {"sinks": -1}, {"future": 2.5}])
def test_wrong_parameters_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"future|sinks"):
        policy("expected_attention", parameters=parameters)
