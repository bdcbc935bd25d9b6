"""How well does one gradient pass tell which windows matter, and what does `--screen` miss?

Prediction: |S| ranks windows like |effect| (Spearman .93 to .97) and the top quarter by the screen holds .95 of the
true top tenth on the median trace, .85 on the worst. Every window of every trace is measured (evict, window 1), so
recall is exact here, not estimated from an audit; position 0, the attention sink, is left out.

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
    by_layer = screen.layer_scores(engine, windows)[:, 1:]
    effects = np.abs(all_effects(engine, windows)[1:])
    n_top = max(1, round(len(effects) * screen.TOP_SHARE))
    top = set(np.argsort(-effects, kind="stable")[:n_top].tolist())
    found: dict[str, Any] = {"id": tokens.trace.id, "n_windows": len(effects)}
    for name, rule in RULES.items():
        order = np.argsort(-rule(by_layer), kind="stable")
        found[name] = {
            "spearman": float(spearmanr(rule(by_layer), effects).statistic),
            "recall": {f"{f:g}": len(top & set(order[: round(f * len(order))].tolist())) / n_top for f in FRACTIONS},
        }
    return found


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
        chosen = traces[:: max(1, len(traces) // limit)][:limit]
        rows = []
        for trace in chosen:
            rows.append(one_trace(model, tokenize(trace, model.tokenizer)))
            print(source, json.dumps(rows[-1]), flush=True)
        results["sources"][source] = {"n_traces": len(rows), **{rule: summary(rows, rule) for rule in RULES}}
    write("01_screen", results)


def summary(rows: list[dict[str, Any]], rule: str) -> dict[str, Any]:
    ranks = [row[rule]["spearman"] for row in rows]
    found: dict[str, Any] = {"spearman": {"median": statistics.median(ranks), "least": min(ranks)}, "recall": {}}
    for fraction in rows[0][rule]["recall"]:
        values = [row[rule]["recall"][fraction] for row in rows]
        found["recall"][fraction] = {"median": statistics.median(values), "least": min(values)}
    return found


if __name__ == "__main__":
    main()
