"""How well does one gradient pass tell which windows matter, and what does `--screen` miss?

Prediction: |S| ranks windows like |effect| (Spearman .93 to .97) and the top quarter by the screen holds .95 of the
true top tenth on the median trace, .85 on the worst. Every window of every trace is measured (evict, window 1), so
recall is exact here, not estimated from an audit; position 0, the attention sink, is left out.

The ranking's weight was chosen on other traces: those of the public set are taken from its end, a stride apart.

`--screen auto` is then replayed on the measured effects with many seeds, under the rule it uses and under the audit
alone. Prediction: the audit alone stops too early, because a small audit misses the misses.

Run: python experiments/01_screen.py [--limit N]     Writes data/results/01_screen.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np
from common import SHARED, TRACES, described, machine, write
from scipy.stats import spearmanr

from kvlens import model as models
from kvlens.model import Model
from kvlens.probe import screen
from kvlens.probe.occlusion import Intervention, Occluder, windows_of
from kvlens.records import Tokens
from kvlens.texts import read_traces
from kvlens.tokenising import tokenize

SEEDS = 40
FRACTIONS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
RULES = {
    "|S|": lambda by_layer: np.abs(by_layer.sum(0)),
    "|S| + layer norm": screen.screening_rank,
}


def all_effects(engine: Occluder, windows: list[tuple[int, int]]) -> np.ndarray:
    found = []
    for lo in range(0, len(windows), 48):
        effects = engine.run([engine.counterfactual(window) for window in windows[lo : lo + 48]])
        found += (engine.reference.log_probs.sum() - effects.log_probs.sum(-1)).tolist()
    return np.array(found)


def one_trace(model: Model, tokens: Tokens) -> dict[str, Any]:
    engine = Occluder(model, tokens, Intervention("evict"))
    windows = windows_of(tokens, 1, 1)
    everything = screen.layer_scores(engine, windows)
    signed = all_effects(engine, windows)
    by_layer, effects = everything[:, 1:], np.abs(signed[1:])
    n_top = max(1, round(len(effects) * screen.TOP_SHARE))
    top = set(np.argsort(-effects, kind="stable")[:n_top].tolist())
    found: dict[str, Any] = {"id": tokens.trace.id, "n_windows": len(effects)}
    for name, rule in RULES.items():
        order = np.argsort(-rule(by_layer), kind="stable")
        found[name] = {
            "spearman": float(spearmanr(rule(by_layer), effects).statistic),
            "recall": {f"{f:g}": len(top & set(order[: round(f * len(order))].tolist())) / n_top for f in FRACTIONS},
        }
    found["auto"] = {rule: replayed(everything, signed, windows, rule) for rule in ("used", "audit alone")}
    return found


def replayed(
    by_layer: np.ndarray, effects: np.ndarray, windows: list[tuple[int, int]], rule: str
) -> list[dict[str, float]]:
    """Where `--screen auto` stops with each seed: the fraction it chose, and its true recall there."""
    rank, known = screen.screening_rank(by_layer), dict(enumerate(effects.tolist()))
    n_top = max(1, round((len(windows) - 1) * screen.TOP_SHARE))
    top = set((np.argsort(-np.abs(effects[1:]), kind="stable")[:n_top] + 1).tolist())
    stops = []
    for seed in range(SEEDS):
        fraction: float | None = screen.FRACTIONS[0]
        previous = selection = None
        while fraction is not None:
            at = fraction
            previous, selection = selection, screen.choose(rank, fraction, seed, windows, previous=selection)
            report = screen.report(by_layer.sum(0), known, selection, windows, previous=previous)
            if rule == "audit alone" and report["recall"] >= screen.WANTED_RECALL:
                break
            fraction = screen.widen(fraction, report)
        evaluated = {*selection.top.tolist(), *selection.audit.tolist()}
        stops.append({"fraction": at, "recall": len(top & evaluated) / n_top, "share": len(evaluated) / len(windows)})
    return stops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=14, help="traces of each source")
    limit = parser.parse_args().limit
    model = models.load("smollm2-135m")
    results: dict[str, Any] = {**described(model), "machine": machine(), "sources": {}}
    sources = {"project": TRACES / "traces.jsonl", "math": SHARED / "traces_math.jsonl"}
    for source, path in sources.items():
        if not path.exists():
            continue
        traces = read_traces(path)
        chosen = traces[:: -max(1, len(traces) // limit)][:limit]
        rows = []
        for trace in chosen:
            rows.append(one_trace(model, tokenize(trace, model.tokenizer)))
            print(source, json.dumps({k: v for k, v in rows[-1].items() if k != "auto"}), flush=True)
        results["sources"][source] = {"n_traces": len(rows), **{rule: summary(rows, rule) for rule in RULES}}
        results["sources"][source]["auto"] = {rule: stopping(rows, rule) for rule in ("used", "audit alone")}
    write("01_screen", results)


def summary(rows: list[dict[str, Any]], rule: str) -> dict[str, Any]:
    ranks = [row[rule]["spearman"] for row in rows]
    found: dict[str, Any] = {"spearman": {"median": statistics.median(ranks), "least": min(ranks)}, "recall": {}}
    for fraction in rows[0][rule]["recall"]:
        values = [row[rule]["recall"][fraction] for row in rows]
        found["recall"][fraction] = {"median": statistics.median(values), "least": min(values)}
    return found


def stopping(rows: list[dict[str, Any]], rule: str) -> dict[str, Any]:
    """How often a rule stops short of the recall it wants, and what it costs, over traces and seeds."""
    stops = [stop for row in rows for stop in row["auto"][rule]]
    return {
        "n_runs": len(stops),
        "stopped_short": float(np.mean([stop["recall"] < screen.WANTED_RECALL for stop in stops])),
        "median_recall": statistics.median(stop["recall"] for stop in stops),
        "least_recall": min(stop["recall"] for stop in stops),
        "median_share_evaluated": statistics.median(stop["share"] for stop in stops),
    }


if __name__ == "__main__":
    main()
