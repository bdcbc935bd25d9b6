"""`snapkv` and `h2o` against attention written out one query and one key at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from attended import eager_weights, held_and_scores, made, over_held
from eviction import MANAGED, padded, policy, step_of_each, streamed_logits, uneven, visibility
from tiny import FAMILIES, token_ids

from kvlens import model as models
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import ledger_of
from kvlens.scorers import table
from kvlens.scorers.interface import EMPTY, Facts, Seen

# qwen3, olmo2: queries and keys are normalised; gemma3: that, and scaling that is not 1/sqrt(d_head)
FAMILIES_ASKED = ["gemma2", "gpt_oss", *MANAGED]
CHUNKS = [[30], [12, 10, *[1] * 8], [*[5] * 4, *[1] * 10]]


def h2o_by_hand(weights: torch.Tensor, n_kv_heads: int) -> list[list[float]]:
    """[kv_head][key]: what each key has received from every query."""
    n_heads, n, _ = weights.shape
    group = n_heads // n_kv_heads
    rows = weights.double().tolist()
    return [
        [
            sum(rows[head][query][key] for head in range(kv * group, (kv + 1) * group) for query in range(n)) / group
            for key in range(n)
        ]
        for kv in range(n_kv_heads)
    ]


def snapkv_by_hand(
    weights: torch.Tensor, held: list[int], head: int, group: int, window: int, pool: int
) -> list[float]:
    """What each held position is worth to the last `window` queries, NaN for their own."""
    n = weights.shape[1]
    first = max(0, n - window)
    rows = weights.double().tolist()
    judged = [p for p in held if p < first]
    means = []
    for p in judged:
        asked = [rows[h][query][p] for h in range(head * group, (head + 1) * group) for query in range(first, n)]
        means.append(sum(asked) / len(asked))
    pooled = []
    for place in range(len(judged)):
        near = [means[k] for k in range(place - pool // 2, place + pool // 2 + 1) if 0 <= k < len(judged)]
        pooled.append(sum(near) / pool)
    worth = dict(zip(judged, pooled, strict=True))
    return [worth.get(p, math.nan) for p in held]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", FAMILIES_ASKED)
def test_pitfalls_20_26_h2o_adds_up_what_the_models_own_attention_gave(name: str, chunks: list[int]) -> None:
    model, ids = made(name), token_ids(30)
    with apply(policy("h2o", tokens=100), model) as run:
        streamed_logits(model, ids, chunks)
    weights = eager_weights(model, ids[0], None)
    for layer, (_, scores) in held_and_scores(run).items():
        expected = torch.tensor(h2o_by_hand(weights[layer], model.n_kv_heads))
        torch.testing.assert_close(scores[0].double(), expected.double(), atol=1e-4, rtol=1e-4)
        shares = float(scores[0].sum()) / (30 * model.n_kv_heads)  # every query gave 1 in all, a sink its part
        assert 0.1 < shares < 0.99 if name == "gpt_oss" else abs(shares - 1) < 1e-4


@pytest.mark.parametrize("shape", ["uniform", "ragged", "padded"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_h2o_sums_go_on_over_what_is_held(name: str, shape: str) -> None:
    model, ids, chunks = models.wrap(FAMILIES[name]()), token_ids(36), [14, 8, *[1] * 14]
    more = {"uniform": {}, "ragged": {"storage": "ragged", **uneven(model)}, "padded": uneven(model)}[shape]
    with apply(policy("h2o", **more), model) as run:
        streamed_logits(model, ids, chunks)
    weights = eager_weights(model, ids[0], visibility(model, run.events(), step_of_each(chunks)))
    for layer, (held, scores) in held_and_scores(run).items():
        expected = h2o_by_hand(weights[layer], model.n_kv_heads)
        for head in range(model.n_kv_heads):
            real = held[0, head] != EMPTY
            wanted = torch.tensor([expected[head][p] for p in held[0, head, real].tolist()], dtype=torch.float64)
            torch.testing.assert_close(scores[0, head, real].double(), wanted, atol=1e-4, rtol=1e-4)
            assert scores[0, head, ~real].isnan().all()


@pytest.mark.parametrize("pool", [1, 5])
@pytest.mark.parametrize("shape", ["whole", "uniform", "ragged", "padded"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2", "llama_6_over_3"])
def test_pitfalls_19_26_snapkv_is_what_the_last_queries_gave(name: str, shape: str, pool: int) -> None:
    model, ids, chunks = made(name), token_ids(36), [14, 12, 9, 1]
    if name == "gemma2" and shape == "ragged":
        pytest.skip("ragged heads refuse a soft cap")
    more: dict[str, Any] = {"whole": {"tokens": 100}, "ragged": {"storage": "ragged", **uneven(model)}}.get(shape, {})
    more |= uneven(model) if shape == "padded" else {}
    chosen = policy("snapkv", parameters={"window": 6, "pool": pool}, trigger="every:13", **more)
    with apply(chosen, model) as run:
        streamed_logits(model, ids, chunks)
    masks = visibility(model, run.events(), step_of_each(chunks))
    weights = eager_weights(model, ids[0], masks)
    group = model.n_heads // model.n_kv_heads
    for layer, (held, scores) in held_and_scores(run).items():
        for head in range(model.n_kv_heads):
            real = held[0, head] != EMPTY
            positions = held[0, head, real].tolist()
            wanted = snapkv_by_hand(over_held(weights[layer], positions, 6), positions, head, group, 6, pool)
            found = scores[0, head, real].double()
            torch.testing.assert_close(found, torch.tensor(wanted).double(), atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", FAMILIES_ASKED)
def test_pitfall_26_snapkv_asks_as_the_model_does(name: str) -> None:
    model, ids = made(name), token_ids(30)
    with apply(policy("snapkv", parameters={"window": 6, "pool": 1}, tokens=100), model) as run:
        streamed_logits(model, ids, [20, 8, 1, 1])
    weights = eager_weights(model, ids[0], None)
    for layer, (_, scores) in held_and_scores(run).items():
        for head in range(model.n_kv_heads):
            group = model.n_heads // model.n_kv_heads
            wanted = snapkv_by_hand(weights[layer], list(range(30)), head, group, 6, 1)
            found = scores[0, head].double()
            torch.testing.assert_close(found, torch.tensor(wanted).double(), atol=1e-4, rtol=1e-4, equal_nan=True)


def test_snapkv_of_a_text_within_its_window_judges_nothing() -> None:
    model = models.wrap(FAMILIES["llama"]())
    with apply(policy("snapkv", parameters={"window": 64}, tokens=100), model) as run:
        streamed_logits(model, token_ids(20), [15, *[1] * 5])
    assert all(scores.isnan().all() for _, scores in held_and_scores(run).values())


def test_snapkv_carries_no_more_queries_than_its_window() -> None:
    model, sizes = models.wrap(FAMILIES["llama"]()), defaultdict(int)
    for n in (20, 60):
        ids, own, _ = padded([n, n - 9], 6)
        with apply(policy("snapkv"), model) as run:
            streamed_logits(model, ids, [n, *[1] * 6], own=own)
        state = ledger_of(run.cache).state
        assert state.positions.tolist() == [[n + 2, n + 3, n + 4, n + 5], [n - 7, n - 6, n - 5, n - 4]]
        sizes[n] = state.queries.untyped_storage().nbytes()
    assert sizes[20] == sizes[60] == 2 * 3 * 4 * 4 * 8 * 4  # rows, layers, heads, queries, d_head, bytes


def test_snapkv_carries_each_rows_own_last_queries_where_padding_stands_between() -> None:
    scorer = table.make("snapkv", {"window": 4})
    state, came = (
        scorer.init(Facts(1, 4, 2, 8, (0,))),
        torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0)),
    )
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, EMPTY, 2, 3, EMPTY, EMPTY, 4, EMPTY]])
    for start, stop in ((0, 5), (5, 8), (8, 9)):
        new = slice(max(start, stop - 4), stop)  # as many as it says that it reads
        state = scorer.observe(state, Seen(positions[:, start:stop], True, queries={0: came[:, :, new]}))
    assert state.positions.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert torch.equal(state.queries[0, 0], came[0, :, 5:])
    assert torch.equal(state.queries[1, 0], came[1][:, [1, 3, 4, 7]])


@pytest.mark.parametrize("width", [0, 2, -1])
def test_a_pool_has_a_middle(width: int) -> None:
    from kvlens.errors import InputError

    with pytest.raises(InputError, match="pool"):
        policy("snapkv", parameters={"pool": width})
