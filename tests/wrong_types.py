"""Calls every verb from Python with values of the wrong type; prints what ended in another error than kvlens' own.

Run by itself, since pytest checks types before kvlens sees them. Argument: a folder to work in.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import made_signals
import tiny_runs

import kvlens
from kvlens.errors import KvlensError

WRONG: list[Any] = [None, 3, b"x", ["x"], {"a": 1}, 1.5, "x" * 300, "a\0b", "", True, object(), [4, "x"]]
LABEL = (
    "intervention window stride units cells lag per_target flips only_correct preset target_tokens filler "
    "random_subsets screen chat metric seed limit beyond_context force"
)
OBSERVE = "signals chat target_tokens device dtype attention seed limit beyond_context force"
CEILINGS = "budgets rows_per_head nulls cross_entropy chat device dtype attention seed limit beyond_context force"
SURPRISE = (
    "variants budget every frozen recent chat target_tokens device dtype attention seed limit beyond_context force"
)
EXPORT = (
    "source bands parameters sinks recent protect_prompt trigger page_size storage allocate reduce budget_tokens "
    "budget_bytes keep_fraction out model"
)
GENERATE = "policy budget_tokens budget_bytes keep_fraction temperature seed chat report events device dtype attention"
AUDIT = (
    "policies scorers presses keep_fraction sinks recent question_last enforce chat target_tokens device dtype "
    "attention seed limit beyond_context force out model traces"
)
TRACES = "max_new_tokens temperature chat grade seed limit force"
FILE = {
    "schema": "kvlens.policy/1",
    "scorer": {"name": "random"},
    "budget": {"tokens": 9},
    "created": "2026-01-02T03:04:05+00:00",
    "kvlens_version": "0.1.0",
}


def by_name(verb: Callable[..., object], option: str, **usual: Any) -> Callable[[Any], object]:
    return lambda value: verb(**(usual | {option: value}))


def of_policies(folder: Path, model: Any) -> dict[str, Callable[[Any], object]]:
    """The same for what makes policies and works under them."""
    found: dict[str, Callable[[Any], object]] = {}
    found["apply policy"] = lambda value: kvlens.apply(value, model).__enter__()
    random = {"scorer": {"name": "random"}, "budget": {"tokens": 9}}
    found["apply model"] = lambda value: kvlens.apply(kvlens.Policy(**random), value).__enter__()
    for option in ("scorer", "budget", "protect", "trigger", "granularity", "reduce", "storage", "allocate"):
        found[f"Policy {option}"] = lambda value, option=option: kvlens.Policy(**random | {option: value})
    for option in EXPORT.split():
        usual = {"scorer": "random", "out": folder / "policy.json", "force": True}
        found[f"export {option}"] = by_name(kvlens.export, option, **usual)
    found["export scorer"] = lambda value: kvlens.export(None, folder / "policy.json", scorer=value)
    for option in GENERATE.split():
        usual = {"prompt": "a = 17", "model": model, "max_new_tokens": 1}
        found[f"generate {option}"] = by_name(kvlens.generate, option, **usual)
    found["generate prompt"] = lambda value: kvlens.generate(value, model, max_new_tokens=1)
    found["generate max_new_tokens"] = lambda value: kvlens.generate("a", model, max_new_tokens=value)
    found["generate model"] = lambda value: kvlens.generate("a", value, max_new_tokens=1)
    found["read_policy"] = kvlens.read_policy
    found["PolicyFile model"] = lambda value: kvlens.PolicyFile(**FILE | {"model": value})
    found["PolicyFile evidence"] = lambda value: kvlens.PolicyFile(**FILE | {"evidence": value})
    return found


def calls(folder: Path) -> dict[str, Callable[[Any], object]]:
    """By name, each verb as a function of one of its arguments."""
    labels, signals = made_signals.planted(folder)
    texts, model = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS], tiny_runs.model()
    run = kvlens.label(texts, model, folder / "lab", window=8)

    found: dict[str, Callable[[Any], object]] = {"control": lambda value: (object(),)[value]}
    pair = {"labels": labels, "signals": signals, "out": folder / "made"}
    for option in (*pair, "signal", "compare", "audit_only", "seed", "force"):
        found[f"bands {option}"] = by_name(kvlens.bands, option, **pair)
    for option in (*pair, "audit_only", "seed", "force"):
        found[f"signals {option}"] = by_name(kvlens.signals, option, **pair | {"out": folder / "ranked"})
    for option in ("a", "b", "out", "seed"):
        both = {"a": labels, "b": run, "out": folder / "compared"}
        found[f"compare-labels {option}"] = by_name(kvlens.compare_labels, option, **both)
    for option in (*LABEL.split(), "out", "model", "traces"):
        usual = {"traces": texts, "model": model, "out": folder / "labelled"}
        found[f"label {option}"] = by_name(kvlens.label, option, **usual)
    for option in (*OBSERVE.split(), "out", "model", "traces"):
        usual = {"traces": texts, "model": model, "out": folder / "observed"}
        found[f"observe {option}"] = by_name(kvlens.observe, option, **usual)
    for option in (*CEILINGS.split(), "out", "model", "traces"):
        usual = {"traces": texts, "model": model, "out": folder / "ceilings", "budgets": [2], "rows_per_head": 2}
        found[f"ceilings {option}"] = by_name(kvlens.ceilings, option, **usual)
    for option in (*SURPRISE.split(), "out", "model", "traces"):
        usual = {"traces": texts, "model": model, "out": folder / "surprise", "variants": "fast"}
        usual |= {"budget": 24} if option in ("every", "frozen", "recent") else {}
        found[f"surprise {option}"] = by_name(kvlens.surprise, option, **usual)
    for option in AUDIT.split():
        usual = {"traces": texts, "model": model, "out": folder / "audit", "scorers": ["random"], "keep_fraction": 0.9}
        found[f"audit {option}"] = by_name(kvlens.audit, option, **usual)
    for option in (*TRACES.split(), "out", "prompts"):
        usual = {"prompts": texts, "model": model, "out": folder / "own.jsonl", "max_new_tokens": 2}
        found[f"traces {option}"] = by_name(kvlens.traces, option, **usual)
    scores = kvlens.surprise(texts, model, folder / "scores", variants="fast", budget=24)
    found |= of_policies(folder, model)
    for option in ("html", "trace", "n"):
        found[f"inspect {option}"] = by_name(partial(kvlens.inspect, run), option)
        found[f"inspect surprise {option}"] = by_name(partial(kvlens.inspect, scores), option)
    for option in ("trace_id", "variant"):
        found[f"kept_tokens {option}"] = by_name(partial(kvlens.plots.kept_tokens, scores), option)
    found |= {"kept_tokens run": kvlens.plots.kept_tokens, "score_staleness run": kvlens.plots.score_staleness}
    found |= {"show": partial(kvlens.show, run), "show surprise": partial(kvlens.show, scores)}
    return found | {"inspect run": kvlens.inspect, "load": kvlens.load}


def main() -> None:
    folder = Path(sys.argv[1])
    raw, refused = [], 0
    os.chdir(folder)
    for name, call in calls(folder).items():
        for value in WRONG:
            try:
                call(value)
            except KvlensError:
                refused += 1
            except Exception as error:
                raw.append(f"{name} = {value!r:.20}: {type(error).__name__}: {error!s:.80}")
    sys.stdout.write(json.dumps({"refused": refused, "raw": raw}) + "\n")


if __name__ == "__main__":
    main()
