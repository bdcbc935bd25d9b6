"""`compactor` against leverage and chunks of attention written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from asking_oracles import MADE, Asking, held_and_scores
from eviction import padded, policy, streamed_logits, uneven
from tiny import token_ids

from kvlens import model as models
from kvlens.model import Model
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import ledger_of

CHUNKS = [[40], [12, 10, *[1] * 8, 10], [1, 39], [7] * 5 + [5]]
NAMES = [name for name in MADE if name != "mistral"]


def mass_by_hand(queries: torch.Tensor, keys: torch.Tensor, sinks: int, chunk: int) -> list[list[float]]:
    """[kv_head][position]: what each key got from the queries of its chunk; 0 for sinks."""
    n_kv_heads, n, _ = keys.shape
    group = len(queries) // n_kv_heads
    total = [[0.0] * n for _ in range(n_kv_heads)]
    for head in range(n_kv_heads):
        for member in range(head * group, (head + 1) * group):
            for query in range(sinks, n):
                first = sinks + (query - sinks) // chunk * chunk
                near = range(first, min(first + chunk, n))
                products = [float(queries[member, query] @ keys[head, key]) for key in near]
                weights = [math.exp(product - max(products)) for product in products]
                for key, weight in zip(near, weights, strict=True):
                    total[head][key] += weight / sum(weights) / group
    return total


def by_hand(asking: Asking, layer: int, values: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """[kv_head, position], NaN for sinks."""
    sinks, n = how["sinks"], values.shape[1]
    mass = torch.tensor(mass_by_hand(*asking.asked[layer], sinks, how["chunk"])).double()[:, sinks:]
    mass = mass * values[:, sinks:].norm(dim=-1)
    pooled, half = torch.zeros_like(mass), how["pool"] // 2
    for i in range(n - sinks):
        near = [k for k in range(i - half, i + half + 1) if 0 <= k < n - sinks]
        pooled[:, i] = mass[:, near].sum(1) / how["pool"]
    plain = asking.plain[layer][1][:, sinks:]
    leverage = torch.zeros_like(mass)
    source = torch.Generator().manual_seed(how["seed"] + layer)
    sketch = torch.randn(*plain.shape[::2], how["sketch"], generator=source).double() / how["sketch"] ** 0.5
    for head, keys in enumerate(plain):
        rows = keys - keys.mean(0)
        rows = rows @ sketch[head] if how["sketch"] < keys.shape[1] else rows
        inverse = torch.linalg.inv(rows.T @ rows + 1e-2 * torch.eye(rows.shape[1]))
        leverage[head] = torch.stack([row @ inverse @ row for row in rows])
    parts = [(part - part.mean()) / part.std() for part in (leverage, pooled)]
    nothing = torch.full((len(plain), sinks), math.nan, dtype=torch.float64)
    return torch.cat([nothing, how["blend"] * parts[0] + parts[1]], 1)


def values_of(model: Model, ids: torch.Tensor) -> list[torch.Tensor]:
    cache = models.new_cache(model)
    with torch.no_grad():
        models.logits(model, ids[None], cache=cache)
    return [values[0].double() for _, values in models.cache_layers(cache)]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("name", "sketch"), [*((name, 5) for name in NAMES), ("llama", 48)])
def test_pitfalls_19_21_it_is_what_the_formula_says(
    name: str, sketch: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = models.wrap(MADE[name]()), token_ids(40)
    how = {"sinks": 3, "chunk": 8, "sketch": sketch, "pool": 3, "blend": 0.7, "seed": 11}
    with apply(policy("compactor", tokens=100, parameters=how), model) as run:
        streamed_logits(model, ids, chunks)
    asking, values = Asking(model, ids[0], None, monkeypatch), values_of(model, ids[0])
    for layer, (_, scores) in held_and_scores(run).items():
        wanted = by_hand(asking, layer, values[layer], how)
        torch.testing.assert_close(scores[0].double(), wanted, atol=1e-3, rtol=1e-3, equal_nan=True)


def test_leverage_is_that_of_every_direction_where_the_sketch_has_room() -> None:
    """A key that alone points somewhere has all the leverage, however it is mixed."""
    model = models.wrap(MADE["llama"]())
    found = []
    for seed in (0, 1):
        how = {"sinks": 0, "blend": 1e6, "seed": seed}
        with apply(policy("compactor", tokens=100, parameters=how), model) as run:
            streamed_logits(model, token_ids(30), [30])
        found.append(held_and_scores(run)[0][1])
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
def test_pitfall_03_a_small_cache_carries_no_queries(shape: str) -> None:
    model = models.wrap(MADE["llama"]())
    more: dict[str, Any] = {"ragged": {"storage": "ragged", **uneven(model)}, "padded": uneven(model)}.get(shape, {})
    ids, own, _ = padded([30, 21], 20)
    parameters = {"sinks": 1, "chunk": 8}
    with apply(policy("compactor", parameters=parameters, trigger="prefill", **more), model) as run:
        streamed_logits(model, ids[:, :6], [6], own=own[:, :6])  # no head holds more than its budget yet
        assert ledger_of(run.cache).state.queries.shape[3] == 5
        streamed_logits(model, ids[:, 6:], [24, *[1] * 20], run.cache, own=own)
    state = ledger_of(run.cache).state
    assert state.queries.numel() == state.keys.numel() == 0
    kept = {p for rows in run.report().kept.values() for head in rows[0] for p in head}
    assert set(state.closed.positions[0].tolist()) - {-1} == kept - {0}
    for _, scores in held_and_scores(run).values():
        assert scores.isfinite().any()


def test_after_an_eviction_a_decoded_token_has_the_mean_mass() -> None:
    model = models.wrap(MADE["llama"]())
    with apply(policy("compactor", trigger="prefill", parameters={"sinks": 0, "chunk": 8}), model) as run:
        streamed_logits(model, token_ids(36), [30, *[1] * 6])
    closed = ledger_of(run.cache).state.closed
    late = closed.positions[0] >= 30
    assert int(late.sum()) == 6
    torch.testing.assert_close(closed.numbers[0, ..., late], torch.ones_like(closed.numbers[0, ..., late]))
