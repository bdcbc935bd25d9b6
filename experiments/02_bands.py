"""Which layers' hidden-state change goes with importance, and does the answer survive another label, task and writer?

The paper (EpiKV, DeepSeek-R1-Distill-Llama-8B, labels by substitution, tokens pooled): layer 10 of 32 +.112 and layer
21 -.209 on MATH-500, +.097 and -.085 on AIME-2024; attention mass at most .09 in size; key variance +.380. Prediction:
part of that is the trend over positions, so per-trace, position-partialled correlations are smaller; `evict`, what
eviction really costs, agrees with `substitute` only in part.

Labels: windows of 8 at stride 4, three interventions, fp32. Sources, each apart: traces written for this project; MATH
(hard) and GSM8K (easy) traces of other models, of 200 to 400 tokens, where a user has them; traces the model wrote
itself. Bands per source, intervention and signal; agreement of interventions; a ranking of all signals; whether the
band moves from easy to hard, and from others' traces to the model's own.

Run: python experiments/02_bands.py [--only SOURCE,...]     Writes data/results/02_bands.json and the folder 02_bands
beside it. Takes an hour or two; a killed run continues (run folders in runs/bands).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from common import RESULTS, ROOT, SHARED, TRACES, described, machine, write

import kvlens
from kvlens import model as models
from kvlens.loading import Run
from kvlens.model import Model
from kvlens.records import Trace
from kvlens.texts import read_prompts, read_traces
from kvlens.tokenising import tokenize

RUNS = ROOT / "runs" / "bands"
INTERVENTIONS = ("evict", "knockout", "substitute")
SIGNALS = ("hidden_change_rolling", "hidden_change_z", "key_var", "attention_mass")
FEWEST, MOST = 200, 400  # tokens of a trace that others wrote
OWN_FEWEST, N_EACH = 150, 24
KEPT = {  # run folders of the project's own traces that the figure reads, by their name in data/results/02_bands
    "evict-bands": "project-evict-hidden_change_rolling-bands",
    "substitute-bands": "project-substitute-hidden_change_rolling-bands",
    "evict-ranking": "project-evict-ranking",
    "evict-substitute": "project-evict-substitute",
    "evict-knockout": "project-evict-knockout",
}
PAPER_DEPTHS = {"layer 10 of 32": 10 / 32, "layer 21 of 32": 21 / 32}
MOVES = (("math", "gsm8k"), ("own", "gsm8k"))
tell = partial(print, file=sys.stderr, flush=True)


def of_length(traces: Sequence[Trace], model: Model, fewest: int) -> list[Trace]:
    return [trace for trace in traces if fewest <= tokenize(trace, model.tokenizer).n_tokens <= MOST]


def own_traces(model: Model) -> list[Trace]:
    """What the model itself answers, greedily and in its chat format, to this project's prompts and GSM8K's."""
    prompts = read_prompts(TRACES / "prompts.jsonl")
    if (SHARED / "gsm8k.jsonl").exists():
        prompts += [Trace(t.id, prompt=t.prompt, answer=t.answer) for t in gsm8k_questions()]
    written = kvlens.traces(prompts, model, RUNS / "own.jsonl", max_new_tokens=320, chat=True)
    texts = [Trace(t.id, t.prompt, t.reasoning, t.target, answer=t.answer) for t in written]
    return of_length(texts, model, OWN_FEWEST)[:N_EACH]


def gsm8k_questions() -> list[Trace]:
    rows = [json.loads(line) for line in (SHARED / "gsm8k.jsonl").read_text().splitlines()]
    return [Trace(row["id"], prompt=row["question"], answer=(row["answer"],)) for row in rows[:48]]


def sources(model: Model) -> dict[str, Any]:
    """By name, how to get the traces of each source that is here."""
    found: dict[str, Any] = {"project": lambda: read_traces(TRACES / "traces.jsonl")}
    for name in ("math", "gsm8k"):
        path = SHARED / f"traces_{name}.jsonl"
        if path.exists():
            found[name] = lambda path=path: of_length(read_traces(path), model, FEWEST)[:N_EACH]
    return {**found, "own": lambda: own_traces(model)}


def measured(name: str, traces: list[Trace], model: Model) -> dict[str, Run]:
    """The label run of each intervention and the signals run of one source."""
    chat = name == "own"
    runs = {
        kind: kvlens.label(
            traces, model, RUNS / f"{name}-{kind}", intervention=kind, window=8, stride=4, chat=chat or None, note=tell
        )
        for kind in INTERVENTIONS
    }
    return {**runs, "signals": kvlens.observe(traces, model, RUNS / f"{name}-signals", chat=chat, note=tell)}


def band_rows(name: str, runs: dict[str, Run], kind: str, signal: str) -> dict[str, Any]:
    """The verdict, the bands and the profile over layers of one signal against one intervention's labels."""
    run = kvlens.bands(runs[kind], runs["signals"], RUNS / f"{name}-{kind}-{signal}-bands", signal=signal)
    found = run.documents["bands"]
    layers = found["layers"]
    n_layers = len(layers)
    at = {
        f"{label} (here {round(depth * n_layers)})": layers[round(depth * n_layers)]
        for label, depth in PAPER_DEPTHS.items()
    }
    largest = max(layers, key=lambda row: abs(row["mean_rho"] or 0.0))
    pooled = max(layers, key=lambda row: abs(row["pooled_rho"] or 0.0))
    return {
        **{key: found[key] for key in ("verdict", "reason", "bands", "n_traces", "n_tokens")},
        "at_paper_depths": at,
        "largest": largest,
        "largest_pooled": {key: pooled[key] for key in ("layer", "pooled_rho")},
        "profile": [[round(row[key] or 0.0, 4) for key in ("mean_rho", "low", "high")] for row in layers],
        "trend": {
            of: [round(row["mean_rho"] or 0.0, 4) for row in rows] for of, rows in found["position_trend"].items()
        },
    }


def agreement(name: str, runs: dict[str, Run]) -> dict[str, Any]:
    found = {}
    for a, b in combinations(INTERVENTIONS, 2):
        run = kvlens.compare_labels(runs[a], runs[b], RUNS / f"{name}-{a}-{b}")
        document = run.documents["agreement"]
        found[f"{a} / {b}"] = {key: document[key] for key in document if key not in ("schema", "traces", "model")}
    return found


def ranking(name: str, runs: dict[str, Run], kind: str) -> list[dict[str, Any]]:
    """Every signal at the layer chosen on one half of the traces, its numbers from the other half."""
    run = kvlens.signals(runs[kind], runs["signals"], RUNS / f"{name}-{kind}-ranking")
    rows = run.ranking[run.ranking.choice != "each layer"]
    return [
        {key: (None if isinstance(value, float) and np.isnan(value) else value) for key, value in row.items()}
        for row in rows.to_dict("records")
    ]


def moved(runs: dict[str, dict[str, Run]], kind: str) -> dict[str, Any]:
    """Whether the band moves between two sources."""
    found = {}
    for this, other in MOVES:
        if this in runs and other in runs:
            name = f"{this} against {other}"
            run = kvlens.bands(
                runs[this][kind],
                runs[this]["signals"],
                RUNS / f"{this}-{other}-{kind}-moved",
                compare=RUNS / f"{other}-{kind}-{SIGNALS[0]}-bands",
            )
            found[name] = run.documents["bands"]["compare"]["moves"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="label and observe these sources alone; writes no results")
    only = [name for name in parser.parse_args().only.split(",") if name]
    model = models.load("smollm2-135m")
    here = sources(model)
    runs = {}
    for name in only or here:
        tell(name)
        runs[name] = measured(name, here[name](), model)
    if only:
        return
    results: dict[str, Any] = {**described(model), "machine": machine(), "window": 8, "stride": 4, "sources": {}}
    for name, found in runs.items():
        tell(name, "bands")
        results["sources"][name] = {
            "bands": {
                kind: {signal: band_rows(name, found, kind, signal) for signal in SIGNALS} for kind in INTERVENTIONS
            },
            "agreement": agreement(name, found),
            "ranking": {kind: ranking(name, found, kind) for kind in ("evict", "substitute")},
        }
    results["moved"] = {kind: moved(runs, kind) for kind in INTERVENTIONS}
    write("02_bands", results)
    for kept, name in KEPT.items():
        shutil.rmtree(RESULTS / "02_bands" / kept, ignore_errors=True)
        shutil.copytree(RUNS / name, RESULTS / "02_bands" / kept, ignore=shutil.ignore_patterns(".*"))


if __name__ == "__main__":
    main()
