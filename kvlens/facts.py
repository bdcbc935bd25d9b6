"""What must a reader know before a number of a label run? In words, and the same as values.

1. Model, intervention, windows, what was left out, precision.
2. How far the numbers can be trusted: the noise floor, and what the audit of a gradient screen found.
3. What was measured beside the effects: answers that flip, random sets of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvlens.findings import nats, sink_effects
from kvlens.loading import Run
from kvlens.wording import counted


def facts(run: Run, trace_id: str | None = None) -> dict[str, str]:
    """What a reader must know before a number of this run, or of one of its traces, in words."""
    meta, config, traces = run.meta, run.meta["config"], _traces(run, trace_id)
    model, found = meta["model"], summary(run, trace_id)
    width = f"width {config.get('window', '?')}, stride {config.get('stride', '?')}, in tokens"
    rows = {
        "model": f"{model['name']}" + (f" ({model['note']})" if model.get("note") else ""),
        "intervention": ", ".join(sorted(run.windows.intervention.unique())) or str(config.get("intervention", "?")),
        "windows": f"units: {config['units']}" if config.get("units") else width,
        "chosen": _screen_words(config.get("screen"), found["screen"]),
        "lag": f"{config['lag']} tokens after a window's end" if config.get("lag") is not None else "",
        "filler": str(config.get("filler")) if config.get("intervention") == "substitute" else "",
        "cells": ", ".join(sorted(run.windows.cells.unique())),
        "prompt": "in the model's chat format" if config.get("chat") else "",
        "left out": _left_out(config),
        "precision": f"{meta['dtype']} on {meta['device']}, attention {meta['attention'] or 'default'}",
        "noise floor": _noise(traces.noise_nats.dropna()),
        "flips": _flip_words(found["flips"]),
        "random sets": _subset_words(found["subsets"]),
        "traces": f"{len(traces):,}{_skip_words(meta['counts']['skipped'])}",
        "position 0": _sink(run, trace_id),
        "made": f"{meta['finished']} with kvlens {meta['versions']['kvlens']}, seed {meta['seed']}",
    }
    return {name: value for name, value in rows.items() if value}


def summary(run: Run, trace_id: str | None = None) -> dict[str, Any]:
    """The same facts as values: of the whole run, or of one of its traces."""
    meta, traces = run.meta, _traces(run, trace_id)
    noise, sinks = traces.noise_nats.dropna(), sink_effects(run)
    sinks = sinks[sinks.index.isin(traces.trace_id)]
    return {
        "path": run.path,
        "schema": run.schema,
        "model": {name: meta["model"].get(name) for name in ("name", "note", "fingerprint")},
        "config": meta["config"],
        "dtype": meta["dtype"],
        "device": meta["device"],
        "attention": meta["attention"],
        "seed": meta["seed"],
        "n_traces": len(traces),
        "n_skipped": len(meta["counts"]["skipped"]),
        "noise_nats": {"median": noise.median(), "max": noise.max()} if len(noise) else None,
        "sink_nats_median": sinks.median() if len(sinks) else None,
        "flips": _flips(run, trace_id),
        "screen": _screen(run, trace_id),
        "subsets": _subsets(run, trace_id),
        "finished": meta["finished"],
        "kvlens_version": meta["versions"]["kvlens"],
    }


def _traces(run: Run, trace_id: str | None) -> pd.DataFrame:
    return run.traces if trace_id is None else run.traces[run.traces.trace_id == trace_id]


def _reports(run: Run, name: str, trace_id: str | None) -> list[Mapping[str, Any]]:
    """What `results` holds under a name for each trace, or for one."""
    by_trace = run.meta.get("results", {}).get(name, {})
    return [found for key, found in by_trace.items() if trace_id in (None, key)]


def _left_out(config: Mapping[str, Any]) -> str:
    what = {"only_correct": "traces without a right answer", "skip_prompt": "windows of the prompt"}
    return ", ".join(words for name, words in what.items() if config.get(name))


def _skip_words(skipped: list[Mapping[str, str]]) -> str:
    """How many traces were skipped, and the first one with its reason."""
    if not skipped:
        return ""
    first = f"{skipped[0]['id']}: {skipped[0]['reason']}"
    return f", {len(skipped):,} skipped ({first}{'; …' if len(skipped) > 1 else ''})"


def _noise(noise: pd.Series) -> str:
    """How far effects move when only the way of computing them changes."""
    if noise.empty:
        return "not measured"
    if noise.max() == 0:
        return "0 nats: windows computed a second way came out bit-equal"
    spread = f"{noise.median():.2g} nats" + (f" (median trace), {noise.max():.2g} (largest)" if len(noise) > 1 else "")
    return f"{spread}, of windows computed a second way"


def _sink(run: Run, trace_id: str | None) -> str:
    """The effect of the window that holds position 0, which is in no ranking and on no scale."""
    effects = sink_effects(run)
    effects = effects if trace_id is None else effects[effects.index == trace_id]
    if effects.empty:
        return ""
    middle = f" (median of {counted(len(effects), 'trace')})" if len(effects) > 1 else ""
    wide = run.windows[run.windows.window_start == 0].window_end.max() > 1
    what = "its whole window, which often holds an attention sink" if wide else "often an attention sink"
    return f"{nats(effects.median())} nats{middle}: {what}, not ranked"


# Answers


def _flips(run: Run, trace_id: str | None) -> dict[str, Any] | None:
    """Windows whose absence changes the answer, of how many, and how many traces were compared in which way."""
    if not run.meta["config"].get("flips"):
        return None
    windows = run.windows if trace_id is None else run.windows[run.windows.trace_id == trace_id]
    known = windows.flipped.dropna()
    ways = pd.Series([report["compared"] for report in _reports(run, "flips", trace_id)], dtype=object)
    return {"n_flipped": int(known.sum()), "n_compared": len(known), "compared": ways.value_counts().to_dict()}


def _flip_words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    ways = found["compared"]
    words = [f"{found['n_flipped']:,} of {counted(found['n_compared'], 'window')} compared change the model's answer"]
    if n_texts := ways.get("texts", 0):
        words.append(f"{counted(n_texts, 'trace')} without a stated answer: whole texts compared")
    if n_nothing := ways.get("nothing", 0):
        words.append(f"{counted(n_nothing, 'trace')} in which the model gives no answer: not compared")
    return "; ".join(words)


# The screen and the random sets


def _screen(run: Run, trace_id: str | None) -> dict[str, Any] | None:
    """How many windows a gradient screen measured, and its recall of the largest tenth as its audit estimates it."""
    reports = _reports(run, "screen", trace_id)
    if not reports:
        return None
    recall = pd.Series([report["recall"] for report in reports])
    return {
        "n_measured": sum(report["n_top"] + report["n_audit"] for report in reports),
        "n_windows": sum(report["n_windows"] for report in reports),
        "recall_median": recall.median(),
        "recall_least": recall.min(),
        "recall_low_median": pd.Series([report["recall_low"] for report in reports]).median(),
    }


def _screen_words(screen: Any, found: Mapping[str, Any] | None) -> str:
    if screen is None:
        return ""
    words = f"by a gradient screen ({screen}), with an audit sample"
    if found is None:
        return words
    least = f", least of a trace {found['recall_least']:.2f}" if found["recall_least"] < found["recall_median"] else ""
    return (
        f"{words}: {found['n_measured']:,} of {counted(found['n_windows'], 'window')} measured; of the largest tenth "
        f"it holds {found['recall_median']:.2f} by the audit (95 %: {found['recall_low_median']:.2f} or more){least}"
    )


def _subsets(run: Run, trace_id: str | None) -> dict[str, Any] | None:
    """What a sum of single tokens' weights explains of evicting random sets, as a median over traces."""
    reports = _reports(run, "subsets", trace_id)
    if not reports:
        return None
    columns = {name: pd.Series([report[name] for report in reports], dtype=float) for name in ("r2", "rank_agreement")}
    median = {name: column.dropna().median() for name, column in columns.items()}  # pandas 2 warns of no values
    reasons = sorted({report["reason"] for report in reports if report.get("reason")})
    n_subsets = sum(report["n_subsets"] for report in reports)
    return {"n_subsets": n_subsets, "n_traces": len(reports), **median, "reasons": reasons}


def _subset_words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    words = f"{found['n_subsets']:,} in {counted(found['n_traces'], 'trace')}"
    if pd.isna(found["r2"]):
        return f"{words}; no sum of tokens fitted: {', '.join(found['reasons']) or 'too little to fit'}"
    agree = "" if pd.isna(found["rank_agreement"]) else f", rank agreement with windows {found['rank_agreement']:.2f}"
    return f"{words}; a sum of tokens' weights explains R² {found['r2']:.2f} of their effects held out (median){agree}"
