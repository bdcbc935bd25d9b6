"""`thinkv`, `segment_hidden`, `raas` of whole runs, against loops over the model's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import signal_oracles
import torch
from attended import eager_weights, held_and_scores, made, medoids_by_hand
from eviction import policy, step_of_each, streamed_logits, uneven, visibility
from tiny import token_ids

from kvlens import model as models
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.ragged import RaggedLayer
from kvlens.scorers.interface import EMPTY

CHUNKS = [14, 12, 9, 1]
SHAPES = ["whole", "uniform", "padded", "ragged"]


def numbers_of(weights: dict[int, torch.Tensor], query: int) -> tuple[float, float]:
    """Sparsity and entropy of a query, mean over the heads of a layer, then over the layers."""
    shares, entropies = [], []
    for rows in weights.values():
        for row in rows[:, query].double().tolist():
            seen = [w for w in row if w > 0]
            shares.append(sum(w < 0.01 * max(seen) for w in seen) / len(seen))
            entropies.append(-sum(w * math.log(w) for w in seen))
    return sum(shares) / len(shares), sum(entropies) / len(entropies)


def means_by_hand(values: list[float], size: int) -> list[float]:
    return [sum(values[i : i + size]) / size for i in range(0, len(values) - size + 1, size)]


def types_by_hand(values: list[float], size: int, lines: list[float] | None = None) -> list[int]:
    """R 2, E 1, T 0 of every whole segment, from how sparse its tokens are; `lines` part the three."""
    means, found = means_by_hand(values, size), []
    if lines:
        return [1 if mean < lines[0] else 0 if mean >= lines[1] else 2 for mean in means]
    for i, mean in enumerate(means):
        place = (sum(m < mean for m in means[: i + 1]) + sum(m == mean for m in means[: i + 1]) / 2) / (i + 1)
        found.append(1 if place < 1 / 3 else 0 if place >= 2 / 3 else 2)
    return found


def run_of(scorer: str, name: str, shape: str, **parameters: Any) -> tuple[Any, Run, dict[int, torch.Tensor]]:
    model, ids = made(name), token_ids(36)
    more: dict[str, Any] = {"whole": {"tokens": 100}, "uniform": {}, "padded": uneven(model)}.get(shape, {})
    more |= {"storage": "ragged", **uneven(model)} if shape == "ragged" else {}
    with apply(policy(scorer, parameters=parameters, trigger="every:13", **more), model) as run:
        streamed_logits(model, ids, CHUNKS)
    return model, run, eager_weights(model, ids[0], visibility(model, run.events(), step_of_each(CHUNKS)))


def survived_by_hand(keys: dict[int, torch.Tensor], steps: list[int], level: int) -> dict[int, int]:
    """How many steps each position of one segment survives, from the number of tokens left after each."""
    positions = sorted(keys)
    distances = [[float((keys[a] - keys[b]).norm()) for b in positions] for a in positions]
    there, found = list(range(len(positions))), dict.fromkeys(positions, 0)
    for further in range(len(steps)):
        there = sorted(medoids_by_hand(distances, there, steps[min(level + further, len(steps) - 1)]))
        for i in there:
            found[positions[i]] += 1
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "given_lines"), [("llama", True), ("gemma3", False), ("llama_6_over_3", True)])
def test_thinkv_of_a_run(name: str, given_lines: bool, shape: str) -> None:
    """With thresholds between the segments of the plain model, or none where its tertiles are of all three kinds."""
    more, lines = {}, None
    if given_lines:
        plain = eager_weights(made(name), token_ids(36)[0], None)
        means = sorted(means_by_hand([numbers_of(plain, query)[0] for query in range(36)], 5))
        lines = [(means[1] + means[2]) / 2, (means[4] + means[5]) / 2]
        more = {"thresholds": lines}
    model, run, weights = run_of("thinkv", name, shape, size=5, steps=[3, 2, 1], **more)
    kinds = types_by_hand([numbers_of(weights, query)[0] for query in range(36)], 5, lines)
    assert len(set(kinds)) == 3
    for layer, (held, scores) in held_and_scores(run).items():
        for head in range(model.n_kv_heads):
            real = held[0, head] != EMPTY
            layer_held = run.cache.layers[layer]
            ragged = isinstance(layer_held, RaggedLayer)
            keys = layer_held.pair(0, head)[0] if ragged else layer_held.keys[0, head, real]
            own = dict(zip(held[0, head, real].tolist(), keys.double(), strict=True))
            expected = dict.fromkeys(own, math.nan)
            for segment, kind in enumerate(kinds):
                turns = kinds[segment + 1 :].count(0)
                mine = {p: key for p, key in own.items() if p // 5 == segment}
                for p, steps in survived_by_hand(mine, [5, 3, 2, 1], turns).items():
                    expected[p] = 3 * steps + kind - 1 / (segment + 2)
            found = scores[0, head, real].double()
            torch.testing.assert_close(found, torch.tensor(list(expected.values())).double(), equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scorer", ["thinkv", "segment_hidden"])
@pytest.mark.parametrize("name", ["llama", "llama_6_over_3"])
def test_ranks_within_segments_of_a_run(name: str, scorer: str, shape: str) -> None:
    given_parameters: dict[str, Any] = {"size": 5, "budgets": [3, 2, 1]}
    given_parameters |= {"parity": True} if scorer == "thinkv" else {}
    model, run, weights = run_of(scorer, name, shape, **given_parameters)
    kinds = types_by_hand([-numbers_of(weights, query)[1] for query in range(36)], 5)
    group = model.n_heads // model.n_kv_heads
    if scorer == "segment_hidden":
        parts: dict[int, list[torch.Tensor]] = {}
        with (
            apply(run.policy, model),
            models.watch_blocks(model, lambda layer, out: parts.setdefault(layer, []).append(out[0])),
        ):
            streamed_logits(model, token_ids(36), CHUNKS)
        change = [signal_oracles.hidden_change(torch.cat(parts[block]).double().numpy()) for block in (1, 2)]
        z = signal_oracles.zscore(change[0]) - signal_oracles.zscore(change[1])
    for layer, (held, scores) in held_and_scores(run).items():
        for head in range(scores.shape[1]):
            real = held[0, head] != EMPTY
            positions = held[0, head, real].tolist()
            mass = weights[layer][head * group : (head + 1) * group].double().sum((0, 1))
            worth = {p: float(mass[p]) if scorer == "thinkv" else float(z[p]) for p in positions}
            worth = {p: math.inf if math.isnan(w) else w for p, w in worth.items()}
            expected = []
            for p in positions:
                if p // 5 >= len(kinds):
                    expected.append(math.nan)
                    continue
                mates = sorted((q for q in positions if q // 5 == p // 5), key=lambda q: (-worth[q], q))
                expected.append(-(mates.index(p) + 1) / [1, 2, 3][kinds[p // 5]])
            found = scores[0, head, real].double()
            torch.testing.assert_close(found, torch.tensor(expected).double(), equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama_6_over_3"])
def test_raas_of_a_run(name: str, shape: str) -> None:
    model, run, weights = run_of("raas", name, shape)
    group, events = model.n_heads // model.n_kv_heads, run.events()
    asking = [13, 25, 34, 35]  # the last query of every pass
    for layer, (held, scores) in held_and_scores(run).items():
        for head in range(model.n_kv_heads):
            mine = events[events.layer.isin([-1, layer]) & events.kv_head.isin([-1, head])]
            left = dict(zip(mine.pos.tolist(), mine.step.tolist(), strict=True))
            stamps = {p: p for p in range(36)}
            for number, query in enumerate(asking):
                there = [p for p in range(query + 1) if left.get(p, 99) >= number]
                mean = weights[layer][head * group : (head + 1) * group, query].double().mean(0)
                top = sorted(there, key=lambda p: -float(mean[p]))[: math.ceil(len(there) / 2)]
                stamps |= dict.fromkeys(top, query)
            real = held[0, head] != EMPTY
            assert scores[0, head, real].tolist() == [stamps[p] for p in held[0, head, real].tolist()]
