"""Does counter-causal surprise say which cached tokens matter, and does it measure what its name says?

The paper (Back from the Future): evicting what the future predicts best keeps accuracy above a sliding window. An
independent replication found the accuracy, but hardly any backward predictability: rank correlation .097, and .039 once
token frequency is controlled. Prediction: here too the score goes with frequency and position more than with what the
future says; no variant is far above its mirror, the same score from the past.

1. Which tokens matter: per trace, Spearman of each variant with occlusion labels (evict, windows of one token) of
   prompt and reasoning; raw, with position partialled out, with position and log-frequency; AUC for the tenth of the
   largest |effect|; and the share of all positive effects that half of the tokens keeps, chosen by score. Beside the
   variants: their mirrors from the past, full against fast, sliding window, key norm, hidden-state change, H2O's mass.
2. Is it the future: minus log p of a token given its own text's future, and given another text's at the same
   positions; the same from the past.
3. Repetition: a sentence that comes again verbatim later, against one that does not, over seeds.
4. Staleness: order of the tokens held at one refresh and at later ones, in a cache that really shrinks; and which kinds
   of tokens stay in it.

Run: python experiments/04_surprise.py [--try]     Writes data/results/04_surprise.json and the folder 04_surprise.
Half an hour on two cores; label and surprise runs are kept in runs/ and continued.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import RESULTS, ROOT, TRACES, described, machine, over_traces, write

import kvlens
from kvlens import model as models
from kvlens.linear import fast_linear, kernel
from kvlens.loading import Run
from kvlens.model import Model
from kvlens.observables.surprise import State, Surprise
from kvlens.observables.surprise_variant import read_variant
from kvlens.records import Tokens, Trace
from kvlens.stats import auc, partial_spearman, spearman, top_share
from kvlens.surprise_facts import staleness
from kvlens.texts import read_traces
from kvlens.tokenising import tokenize

RUNS = ROOT / "runs" / "surprise"
VARIANTS = (
    "full", "fast", "layers=1", "layers=4", "layers=15",
    "full,logprob", "fast,logprob",
    "full,no_self", "fast,no_self", "full,logprob,no_self", "fast,logprob,no_self",
    "full,gap=4", "fast,gap=4", "full,gap=32", "fast,gap=32",
    "full,sentence", "fast,sentence", "full,clause", "fast,clause",
    "full,past", "fast,past", "full,logprob,no_self,past", "fast,logprob,no_self,past",
)  # fmt: skip
MIRRORS = {
    "full": "full,past",
    "fast": "fast,past",
    "full,logprob,no_self": "full,logprob,no_self,past",
    "fast,logprob,no_self": "fast,logprob,no_self,past",
}
COMPARED = (("full", "fast"), ("full,logprob", "fast,logprob"), ("full", "full,past"), ("fast", "fast,past"))
SIGNALS = ("key_norm", "hidden_change", "hidden_change_z", "attention_mass", "log_frequency", "age")
BUDGET, EVERY = 64, 16
N_SEEDS = 60
tell = partial(print, file=sys.stderr, flush=True)


# Which tokens matter


def sources(model: Model) -> dict[str, list[Trace]]:
    """The traces of 02_bands, by source."""
    found = importlib.import_module("02_bands").sources(model)
    return {name: traces() for name, traces in found.items()}


def measured(name: str, traces: Sequence[Trace], model: Model, *, chat: bool) -> dict[str, Run]:
    """Labels, signals and surprise of one source, over the same tokens."""
    return {
        "labels": kvlens.label(traces, model, RUNS / f"{name}-labels", window=1, chat=chat or None, note=tell),
        "signals": kvlens.observe(traces, model, RUNS / f"{name}-signals", signals=SIGNALS, chat=chat, note=tell),
        "surprise": kvlens.surprise(
            traces, model, RUNS / f"{name}-surprise", variants=VARIANTS, chat=chat, note=tell
        ),
        "cycles": kvlens.surprise(
            traces, model, RUNS / f"{name}-cycles", variants=("full", "fast"), budget=BUDGET, every=EVERY, chat=chat,
            note=tell,
        ),
    }  # fmt: skip


def rules(runs: Mapping[str, Run], trace_id: str) -> pd.DataFrame:
    """A column for each rule (higher: keep), a row for each position of the context."""
    scores = runs["surprise"].scores
    table = scores[scores.trace_id == trace_id].pivot(index="pos", columns="variant", values="score")[list(VARIANTS)]
    signals = runs["signals"].signals
    rows = signals[signals.trace_id == trace_id].sort_values("pos")
    layers = {name: np.stack(rows[name].to_numpy()).astype(float) for name in SIGNALS[:4]}
    table["sliding window"] = -rows.age.to_numpy(dtype=float)
    table["key norm"] = -layers["key_norm"].mean(1)
    table["hidden change"] = layers["hidden_change"].mean(1)
    table["hidden change z"] = layers["hidden_change_z"].mean(1)
    table["attention mass"] = layers["attention_mass"].mean(1)
    table["log-frequency"] = -rows.log_frequency.to_numpy(dtype=float)
    return table


def numbers(table: pd.DataFrame, effects: np.ndarray) -> dict[str, dict[str, float]]:
    """What each rule says of one trace's labels; position 0, a sink, and unlabelled tokens left out."""
    known = np.isfinite(effects) & (np.arange(len(effects)) > 0)
    tokenwise = [name for name in VARIANTS if not {"past", "sentence", "clause"} & set(name.split(","))]
    common = known & table[tokenwise].notna().all(axis=1).to_numpy()  # units lack their last one besides
    frequency = table["log-frequency"].to_numpy(dtype=float)
    found = {}
    for name in table:
        values = table[name].to_numpy(dtype=float)
        rows = common & np.isfinite(values)
        label, score, at = effects[rows], values[rows, None], np.flatnonzero(rows)
        top = top_share(np.abs(label), 0.1)
        kept = values[rows] >= np.median(values[rows])
        gains = np.maximum(label, 0.0)
        found[str(name)] = {
            "rho": float(spearman(score, label)[0]),
            "rho_position": float(partial_spearman(score, label, at)[0]),
            "rho_position_frequency": float(partial_spearman(score, label, at, controls=frequency[rows, None])[0]),
            "rho_size": float(partial_spearman(score, np.abs(label), at, controls=frequency[rows, None])[0]),
            "auc_size": float(auc(score, top)[0]),
            "kept_half": float(gains[kept].sum() / gains.sum() * (0.5 / kept.mean())),
        }
    return found


def table_of(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Every rule's numbers over the traces of one source, with intervals, and what sets variants apart."""
    labels, columns = runs["labels"].tokens, defaultdict(lambda: defaultdict(list))
    pairs: dict[str, list[float]] = defaultdict(list)
    for trace_id in runs["surprise"].traces.trace_id:
        table = rules(runs, trace_id)
        rows = labels[labels.trace_id == trace_id].sort_values("pos")
        found = numbers(table, rows.effect_nats.to_numpy(dtype=float)[: len(table)])
        for name, values in found.items():
            for key, value in values.items():
                columns[name][key].append(value)
        for name, mirror in MIRRORS.items():
            key = f"{name} above its mirror"
            pairs[key].append(found[name]["rho_position_frequency"] - found[mirror]["rho_position_frequency"])
        pairs |= {key: pairs[key] + [value] for key, value in agreements(table).items()}
    return {
        "n_traces": len(runs["surprise"].traces),
        "n_tokens": int(labels.effect_nats.notna().sum()),
        "rules": {name: {key: over_traces(v) for key, v in values.items()} for name, values in columns.items()},
        "pairs": {key: over_traces(values) for key, values in pairs.items()},
    }


def agreements(table: pd.DataFrame) -> dict[str, float]:
    """How far full and fast agree, and how far each goes with frequency and position, in one trace."""
    frequency, found = table["log-frequency"].to_numpy(dtype=float), {}
    for one, other in (
        ("full", "fast"),
        ("full,logprob", "fast,logprob"),
        ("full", "full,past"),
        ("fast", "fast,past"),
    ):
        rows = table[[one, other]].notna().all(axis=1).to_numpy()
        a, b = (table[name].to_numpy(dtype=float)[rows] for name in (one, other))
        at = np.flatnonzero(rows)
        found[f"{one} ~ {other}"] = float(spearman(a[:, None], b)[0])
        controls = frequency[rows, None]
        found[f"{one} ~ {other}, controlled"] = float(partial_spearman(a[:, None], b, at, controls=controls)[0])
    for name in ("full", "fast", "full,logprob,no_self", "fast,logprob,no_self"):
        rows = table[name].notna().to_numpy()
        values = table[name].to_numpy(dtype=float)[rows]
        found[f"{name} ~ rarity"] = float(spearman(values[:, None], frequency[rows])[0])
        found[f"{name} ~ position"] = float(spearman(values[:, None], np.flatnonzero(rows).astype(float))[0])
    return found


# Is it the future


@torch.inference_mode()
def cache_of(model: Model, ids: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """Keys and values of every layer, and the states that enter the last block."""
    kept: dict[int, torch.Tensor] = {}
    cache = models.new_cache(model)
    with models.watch_blocks(model, kept.__setitem__), fast_linear():
        models.hidden(model, ids[None], cache=cache)
    return models.cache_layers(cache), kept[model.n_layers - 2]


INFORMATION = ("full,logprob", "full,logprob,no_self", "fast,logprob", "fast,logprob,no_self")


def information(model: Model, everything: Sequence[Tokens]) -> dict[str, Any]:
    """Minus log p of the tokens under their own text's rows and under the next text's rows at the same positions."""
    passes = {
        f"{words}{turn}": Surprise(model, read_variant(words + turn)) for words in INFORMATION for turn in ("", ",past")
    }
    found: dict[str, list[float]] = defaultdict(list)
    ids = [torch.from_numpy(tokens.ids[: tokens.n_context]) for tokens in everything]
    caches = [cache_of(model, one) for one in ids]
    for number, (own, (layers, states)) in enumerate(zip(ids, caches, strict=True)):
        other = caches[(number + 1) % len(ids)][0]
        n = min(len(own), other[0][0].shape[2])
        for name, surprise in passes.items():
            state = State(own[None, :n], torch.arange(n)[None], states[:, :n] if surprise.start else None)
            mine, theirs = (
                surprise.scores(state, [(k[:, :, :n], v[:, :, :n]) for k, v in rows]) for rows in (layers, other)
            )
            known = mine.known
            found[f"{name}: own"].append(float(mine.values[known].mean()))
            found[f"{name}: another text's"].append(float(theirs.values[known].mean()))
            found[f"{name}: gain"].append(float((theirs.values - mine.values)[known].mean()))
    return {name: over_traces(values) for name, values in found.items()}


# Repetition


def repetition(model: Model, sentences: Sequence[str]) -> dict[str, Any]:
    """By variant, the score of a sentence that comes again later minus that of the same one followed by another."""
    words = ("full", "fast", "full,logprob", "fast,logprob", "full,logprob,no_self", "fast,logprob,no_self")
    passes = {text: Surprise(model, read_variant(text)) for text in words}
    found: dict[str, list[float]] = defaultdict(list)
    for seed in range(N_SEEDS):
        drawn = random.Random(seed).sample(list(sentences), 10)
        subject, other, around = drawn[0], drawn[1], drawn[2:]
        once, again = (" ".join([*around[:2], subject, *around[2:6], later, *around[6:]]) for later in (other, subject))
        before = len(model.tokenizer(" ".join(around[:2])).input_ids)
        n_subject = len(model.tokenizer(" " + subject).input_ids)
        place = slice(before, before + n_subject)
        for text, surprise in passes.items():
            scores = []
            for whole in (once, again):
                ids = torch.tensor(model.tokenizer(whole).input_ids)
                layers, states = cache_of(model, ids)
                state = State(ids[None], torch.arange(len(ids))[None], states if surprise.start else None)
                scores.append(surprise.scores(state, layers).values[0, place])
            found[text].append(float((scores[1] - scores[0]).mean()))
    return {name: over_traces(values) for name, values in found.items()}


def sentences_of(texts: Sequence[Trace]) -> list[str]:
    """Sentences of 8 to 30 words from the project's documents."""
    parts = [part.strip() for trace in texts for part in (trace.text or "").replace("\n", " ").split(". ")]
    return sorted({f"{part.rstrip('.')}." for part in parts if 8 <= len(part.split()) <= 30})


# Staleness


def stale(run: Run) -> dict[str, Any]:
    """By variant and number of refreshes between, the mean rank correlation over traces."""
    found: dict[str, Any] = {}
    for variant in run.meta["config"]["variants"]:
        rows = staleness(run, variant)
        at = {
            int(apart): over_traces(part.rho.tolist()) for apart, part in rows.groupby("apart") if apart in (1, 2, 4, 8)
        }
        found[variant] = at
    return found


def kind(token: str) -> str:
    """What a token is made of."""
    text = token.strip()
    if not text:
        return "white space"
    return "number" if any(c.isdigit() for c in text) else "word" if any(c.isalpha() for c in text) else "punctuation"


def what_stays(run: Run) -> dict[str, Any]:
    """By variant and kind of token, the share of those that had gone in which the last refresh leaves, over traces."""
    kinds = run.tokens.assign(kind=run.tokens.token.map(kind))
    found: dict[str, Any] = {}
    for variant, steps in run.refreshes.groupby("variant"):
        shares: dict[str, list[float]] = defaultdict(list)
        for trace_id, rows in steps.groupby("trace_id"):
            last = rows[rows.refresh == rows.refresh.max()]
            seen = kinds[(kinds.trace_id == trace_id) & (kinds.pos < last.n_seen.iloc[0])]
            stays = seen.pos.isin(last.pos[last.kept])
            for name, part in stays.groupby(seen.kind):
                shares[str(name)].append(float(part.mean()))
            shares["all"].append(float(stays.mean()))
        found[str(variant)] = {name: over_traces(values) for name, values in shares.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="trial", action="store_true", help="two traces a source, print, write nothing")
    trial = parser.parse_args().trial
    model = models.load("smollm2-135m", device="cpu", dtype="float32")
    results: dict[str, Any] = {**described(model), "machine": machine(), "linear_kernel": kernel(), "sources": {}}
    results |= {"budget": BUDGET, "every": EVERY, "n_seeds": N_SEEDS}
    for name, found in sources(model).items():
        tell(name)
        traces, is_own = found[:2] if trial else found, name == "own"
        runs = measured(f"try-{name}" if trial else name, traces, model, chat=is_own)
        everything = [tokenize(trace, model.tokenizer, chat=is_own) for trace in traces]
        results["sources"][name] = table_of(runs) | {
            "staleness": stale(runs["cycles"]),
            "what_stays": what_stays(runs["cycles"]),
            "information": information(model, everything),
        }
    results["repetition"] = repetition(model, sentences_of(read_traces(TRACES / "documents.jsonl")))
    if trial:
        print(json.dumps(results, indent=1))
        return
    write("04_surprise", results)
    one = sources(model)["project"][:1]  # what the figure shows of a cache
    kvlens.surprise(one, model, RUNS / "one", variants=("full", "fast"), budget=BUDGET, every=EVERY)
    shutil.rmtree(RESULTS / "04_surprise", ignore_errors=True)
    shutil.copytree(RUNS / "one", RESULTS / "04_surprise", ignore=shutil.ignore_patterns(".*"))


if __name__ == "__main__":
    main()
