"""Do labels find the values that a target needs, on traces whose needed values are known?

Prediction: under knockout, with a target that restates each needed value, needed values outrank distractors (AUC above
.8). Evict asks what the last tokens still read directly, substitute changes the text: reported beside it without a
threshold, and so is a target that only states the final value, which a small model can hardly compute.

AUC per trace over its value spans (needed against distractors, by effect), mean over traces with a bootstrap interval.
Run: python experiments/01_planted.py     Writes data/results/01_planted.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from common import described, machine, over_traces, write
from sklearn.metrics import roc_auc_score

import kvlens
from kvlens import model as models
from kvlens.planted import planted_traces, token_positions
from kvlens.tokenising import tokenize

INTERVENTIONS = ("knockout", "evict", "substitute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=24, help="traces for each target")
    n = parser.parse_args().n
    model = models.load("smollm2-135m")
    results = {**described(model), "machine": machine(), "n_traces": n, "auc": {}}
    for target in ("steps", "value"):
        planted = planted_traces(n, seed=0, target=target)
        for intervention in INTERVENTIONS:
            with tempfile.TemporaryDirectory() as folder:
                run = kvlens.label(
                    [p.trace for p in planted], model, Path(folder) / "run", intervention=intervention, units="spans"
                )
            values = []
            for p in planted:
                tokens = tokenize(p.trace, model.tokenizer)
                windows = run.windows[run.windows.trace_id == p.trace.id]
                needed = set(token_positions(tokens, p.needed))
                truth = [int(start) in needed for start in windows.window_start]
                values.append(float(roc_auc_score(truth, windows.effect_nats)))
            results["auc"][f"{target} {intervention}"] = over_traces(values)
            print(target, intervention, json.dumps(results["auc"][f"{target} {intervention}"]), flush=True)
    write("01_planted", results)


if __name__ == "__main__":
    main()
