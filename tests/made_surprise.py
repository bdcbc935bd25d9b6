"""Runs of surprise made without a model: known tokens, scores and refreshes, written through the store like any other.

`APPLES` is small enough to be solved by hand: twelve tokens, two variants, refreshes after eight and after twelve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made_runs
import numpy as np

from kvlens.schemas import SURPRISE

NAN = float("nan")
CYCLE = {"budget": 4, "every": 4, "frozen": 1, "recent": 0}
Step = tuple[
    int, Sequence[int], Sequence[float], Sequence[int]
]  # n_seen, positions held, their scores, those that stay


@dataclass(frozen=True)
class Made:
    """One trace: its tokens, how many of them are prompt, by variant its scores and its refreshes."""

    tokens: Sequence[str]
    n_prompt: int
    scores: Mapping[str, Sequence[float]]
    steps: Mapping[str, Sequence[Step]] = field(default_factory=dict)


APPLES = Made(
    ["<s>", "Ann", " has", " two", " apples", ".\n", "She", " eats", " one", ",", " so", " one"],
    6,
    {"full": [-1, 3, 2, 5, 4, 0, -2, 1, 7, 6, -3, NAN], "fast": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, NAN]},
    {
        "full": [
            (8, range(8), [-1, 3, 2, 5, 4, 0, -2, NAN], [0, 1, 3, 4, 7]),
            (12, [0, 1, 3, 4, 7, 8, 9, 10, 11], [-2, 0.5, 5, 1, 3, 7, 6, -3, NAN], [0, 3, 8, 9, 11]),
        ],
        "fast": [
            (8, range(8), [0, 1, 2, 3, 4, 5, 6, NAN], [0, 4, 5, 6, 7]),
            (12, [0, 4, 5, 6, 7, 8, 9, 10, 11], [0, 4, 5, 6, 7, 8, 9, 10, NAN], [0, 8, 9, 10, 11]),
        ],
    },
)
HOSTILE = Made(
    ["<s>", '<script>alert("x")</script>', " & <b>", "\u202e", "\x1b[31m", "</main></style>", "'\"", "\r\n", "é", "\t"],
    7,
    {name: [1, 9, 8, 7, 6, 5, 4, 3, 2, NAN] for name in ("full", "fast")},
    {name: [(8, range(8), [1, 9, 8, 7, 6, 5, 4, NAN], [0, 2, 5, 6, 7])] for name in ("full", "fast")},
)


def long(seed: int, n: int = 60, budget: int = 20, every: int = 10, frozen: int = 2) -> Made:
    """A trace with scores drawn at random, some of them equal, and refreshes that follow them."""
    random, steps, scores = np.random.default_rng(seed), {}, {}
    for name in ("full", "fast"):
        base = np.round(random.normal(size=n), 1)
        scores[name] = [*base[:-1].tolist(), NAN]
        held: list[int] = []
        steps[name] = []
        for n_seen in range(every, n + 1, every):
            held += range(n_seen - every, n_seen)
            if len(held) <= budget + frozen:
                continue
            values = np.round(base[held] + random.normal(size=len(held)), 1)
            values[-1] = NAN
            order = sorted(range(len(held)), key=lambda row: (row >= frozen and row < len(held) - 1, -values[row]))
            stays = sorted(held[row] for row in order[: budget + frozen])
            steps[name].append((n_seen, held, values.tolist(), stays))
            held = list(stays)
    return Made([f" w{number}" for number in range(n)], 20, scores, steps)


def write(out: Path, traces: Mapping[str, Made], *, cycle: Mapping[str, int] | None = CYCLE, **changes: Any) -> Path:
    """The finished run of these traces at `out`; without a cycle it has no refreshes."""
    names = list(next(iter(traces.values())).scores)
    config = {"variants": names, "cycle": cycle, "target_tokens": 48, "chat": False, "beyond_context": False}
    tables = ["tokens", "scores", "traces", *(["refreshes"] if cycle else [])]
    with made_runs.start(out, schema=SURPRISE, config=config, device="cpu", attention="sdpa", **changes) as run:
        for trace_id, made in traces.items():
            for table, columns in rows(trace_id, made).items():
                if table in tables:
                    run.write_part(table, trace_id, columns)
        run.finish(
            dict.fromkeys(tables, list(traces)),
            counts={"traces": len(traces), "tokens": sum(len(made.tokens) for made in traces.values())},
            results={"n_bytes_a_token": dict.fromkeys(names, 16)},
        )
    return out


def rows(trace_id: str, made: Made) -> dict[str, dict[str, Any]]:
    """The rows of one trace for every table."""
    n = len(made.tokens)
    held: dict[str, list[Any]] = {name: [] for name in ("variant", "refresh", "n_seen", "pos", "score", "kept")}
    for variant, steps in made.steps.items():
        for number, (n_seen, positions, scores, stays) in enumerate(steps):
            for pos, score in zip(positions, scores, strict=True):
                for name, value in zip(held, (variant, number, n_seen, pos, score, pos in set(stays)), strict=True):
                    held[name].append(value)
    return {
        "tokens": {
            "trace_id": trace_id,
            "pos": np.arange(n),
            "token_id": np.arange(n) + 100,
            "token": list(made.tokens),
            "segment": ["prompt"] * made.n_prompt + ["reasoning"] * (n - made.n_prompt),
        },
        "scores": {
            "trace_id": trace_id,
            "variant": np.repeat(list(made.scores), n).tolist(),
            "pos": np.tile(np.arange(n), len(made.scores)),
            "score": np.concatenate([np.asarray(values, dtype=float) for values in made.scores.values()]),
        },
        "refreshes": {"trace_id": [trace_id] * len(held["pos"])} | held,
        "traces": {"trace_id": [trace_id], "n_tokens": n + 3, "n_prompt": made.n_prompt, "n_context": n},
    }
