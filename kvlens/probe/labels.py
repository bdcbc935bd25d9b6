"""Label runs: how important is every window of every trace, in one folder that survives interruption?

1. read and tokenise all traces, load and check the model: whatever is wrong with the input is said before any work;
2. open the run folder: finished, continued, or new; its plan fixes how windows are packed into batches;
3. trace by trace: measure (`measure.py`) and write each batch as a part; a part that is there is never redone;
4. merge the parts into the tables of `kvlens.labels/1`, with the noise floor of the run beside them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvlens.errors import InputError
from kvlens.grading import grade
from kvlens.linear import kernel
from kvlens.loading import Run
from kvlens.model import Model
from kvlens.probe import budget
from kvlens.probe.inputs import Note, Tick, ignore, start, traces_of
from kvlens.probe.measure import TraceMeasurement
from kvlens.probe.readout import Metric
from kvlens.probe.settings import Settings, as_config, fit, make_settings
from kvlens.probe.windows import list_windows
from kvlens.records import Tokens, Trace
from kvlens.schemas import LABELS
from kvlens.store import RunFolder
from kvlens.wording import counted, duration, size

DEFAULT_MODEL = "smollm2-135m"


def label(
    traces: str | Path | Sequence[Trace],
    model: str | Model = DEFAULT_MODEL,
    out: str | Path = "runs/labels",
    *,
    intervention: str | None = None,
    window: int | None = None,
    stride: int | None = None,
    units: str | None = None,
    cells: str | None = None,
    lag: int | None = None,
    per_target: bool | None = None,
    flips: bool | None = None,
    only_correct: bool | None = None,
    preset: str | None = None,
    target_tokens: int | None = None,
    filler: str | None = None,
    random_subsets: int | None = None,
    screen: float | str | None = None,
    chat: bool | None = None,
    metric: Metric | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    seed: int = 0,
    limit: int | None = None,
    beyond_context: bool | None = None,
    force: bool = False,
    progress: Tick | None = None,
    note: Note | None = None,
) -> Run:
    """The finished label run at `out`, in nats: how much log-probability the target loses without each window.

    Args:
        traces: a trace file or dataset (see `read_traces`), or traces at hand.
        model: what `-m` takes, or a loaded `Model` (then device, dtype and attention are its own).
        metric: a function of (logits [row, target, d_vocab], target ids [target]) giving [row]; its loss under
            occlusion fills the column `metric_effect`. It is known by its name: two functions of one name look alike.
        progress: called with (windows done, windows in all); note: told the estimate of time and memory.
        Others: as the options of `kvlens label` (see its --help); None means the preset's value or the default.

    Raises: InputError, EnvironmentLacks, ModelRefused; nothing already written is lost.
    Cost: per window the recomputed tokens of METHODS; memory one prefix cache and one batch of rows.
    Source: `substitute` with flips is EpiKV's label; `evict` and `knockout` are ours.
    """
    found = traces_of(traces, limit)
    asked = {
        "intervention": intervention, "window": window, "stride": stride, "units": units, "cells": cells, "lag": lag,
        "per_target": per_target, "flips": flips, "only_correct": only_correct, "target_tokens": target_tokens,
        "filler": filler, "random_subsets": random_subsets, "screen": screen, "chat": chat,
        "beyond_context": beyond_context, "seed": seed,
    }  # fmt: skip
    settings = make_settings(preset, metric, **asked)
    reading = {name: getattr(settings, name) for name in ("target_tokens", "chat", "beyond_context")}
    ready = start(found, model, out, reading, device=device, dtype=dtype, attention=attention)
    fitted = fit(settings, ready.model)
    skipped = _not_correct(ready.everything) if fitted.only_correct else {}
    chosen = _chosen(ready.everything, skipped, fitted, preset)

    def measure(run: RunFolder) -> None:
        for trace_id, reason in skipped.items():
            run.skip(trace_id, reason)
        Job(run, ready.model, fitted, metric, progress or ignore, note or ignore).do(chosen, skipped)

    return ready.run(out, measure, schema=LABELS, config=as_config(fitted), seed=fitted.seed, force=force, note=note)


def _chosen(
    everything: Sequence[Tokens], skipped: dict[str, str], settings: Settings, preset: str | None
) -> list[Tokens]:
    """The traces that are measured; one without a window to hide joins the skipped, and it is an error if all do."""
    right = [tokens for tokens in everything if tokens.trace.id not in skipped]
    if not right:
        raise InputError(
            f"{counted(len(everything), 'trace')} read, and none is known to be answered right, as was asked for",
            f"give traces with an `answer` that their target states{'' if preset else ', or drop --only-correct'}",
        )
    chosen, without = [], None
    for tokens in right:
        try:
            list_windows(tokens, settings)
        except InputError as error:
            skipped[tokens.trace.id] = error.message.partition(": ")[2]
            without = error
        else:
            chosen.append(tokens)
    if without is not None and not chosen:
        raise without
    return chosen


@dataclass
class Job:
    """What a label run works with while it runs."""

    run: RunFolder
    model: Model
    settings: Settings
    metric: Metric | None
    progress: Tick
    note: Note

    def do(self, chosen: Sequence[Tokens], skipped: Mapping[str, str]) -> None:
        """Nothing; measures what the run lacks of the chosen traces and finishes it."""
        run = self.run
        for trace_id, reason in list(skipped.items())[:1]:
            self.note(f"{counted(len(skipped), 'trace')} skipped, such as {trace_id}: {reason}")
        if run.plan is None:
            longest = max(tokens.n_tokens for tokens in chosen)
            run.save_plan({"rows": budget.choose_rows(self.model, longest), "split": 1, "selected": {}})
        measurements = [TraceMeasurement(run, self.model, t, self.settings, self.metric) for t in chosen]
        if n_finished := sum(m.finished for m in measurements):
            self.note(f"goes on after an interruption: {n_finished:,} of {counted(len(chosen), 'trace')} are done")
        self._estimate([m for m in measurements if not m.finished])
        total = sum(m.n_windows for m in measurements)
        keys: dict[str, list[str]] = {"windows": [], "tokens": [], "traces": []}
        if self.settings.random_subsets:
            keys["subsets"] = []
        done, reports = 0, []
        for measurement in measurements:
            self.progress(done, total)
            reports.append(measurement.measure(partial(self._tick, done, total)))
            done += measurement.n_windows
            self.progress(done, total)
            for table, names in measurement.keys.items():
                keys[table] += names
        run.finish(
            keys,
            counts={"traces": len(chosen), "windows": total},
            peak_bytes=budget.peak_bytes(self.model.device),
            results=_summary(reports),
        )

    def _tick(self, before: int, total: int, n_done: int) -> None:
        """Nothing; tells that `n_done` windows of a trace are done after those of the traces before it."""
        self.progress(before + n_done, total)

    def _estimate(self, ahead: Sequence[TraceMeasurement]) -> None:
        """Nothing; tells how much work lies ahead, from a timed pass over the first trace of it."""
        if not ahead:
            return
        started = time.perf_counter()
        ahead[0].occluder()
        seconds = (time.perf_counter() - started) / ahead[0].tokens.n_tokens
        n_tokens = sum(m.n_compute() for m in ahead)
        longest = max(m.tokens.n_tokens for m in ahead)
        rows = int(self.run.plan["rows"])
        n_bytes = budget.prefix_bytes(self.model, longest) + budget.batch_bytes(self.model, longest, rows)
        n_windows = sum(m.n_windows for m in ahead)
        upper = "at most " if self.settings.screen is not None else "about " if n_tokens * seconds >= 1 else ""
        flips = f", and {counted(n_windows, 'answer')} to let the model write, not in this time"
        self.note(
            f"{counted(n_windows, 'window')} of {counted(len(ahead), 'trace')}: {counted(n_tokens, 'token')} to "
            f"compute, {upper}{duration(n_tokens * seconds)} and {size(n_bytes)} beside the model"
            f"{flips if self.settings.flips else ''}"
        )


def _not_correct(everything: Sequence[Tokens]) -> dict[str, str]:
    """By id, why a trace cannot count as answered right; traces that do are absent."""
    reasons = {tokens.trace.id: _why_not_correct(tokens) for tokens in everything}
    return {trace_id: reason for trace_id, reason in reasons.items() if reason}


def _why_not_correct(tokens: Tokens) -> str:
    """Why a trace cannot count as answered right, or nothing when it does."""
    trace = tokens.trace
    if "correct" in trace.meta:
        return "" if trace.meta["correct"] is True else "its answer is not right (meta.correct is not true)"
    if not trace.answer:
        return "no answer to compare with"
    target = trace.target if trace.text is None else trace.text[int(tokens.char_spans[tokens.n_context, 0]) :]
    kind = "math" if "\\boxed" in target else "contains"
    return "" if grade(kind, target, trace.answer) else "its target does not state the answer"


def _summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a run says of itself: its noise floor, and by trace what flips, screen and subsets report."""
    results: dict[str, Any] = {
        "noise_nats": _spread([value for report in reports for value in report["noise"]]),
        "nothing_hidden_nats": max(report["nothing_hidden_nats"] for report in reports),
        "linear_kernel": kernel(),
    }
    against = [value for report in reports for value in report.get("noise_fp32", [])]
    if against:
        results["noise_against_fp32_nats"] = _spread(against)
    for name in ("flips", "screen", "subsets"):
        found = {report["trace_id"]: report[name] for report in reports if name in report}
        if found:
            results[name] = found
    return results


def _spread(noise: Sequence[float]) -> dict[str, Any]:
    """Median and maximum of differences in nats, and of how many windows; null where none could be measured."""
    if not noise:
        return {"median": None, "max": None, "n_windows": 0}
    return {"median": float(np.median(noise)), "max": max(noise), "n_windows": len(noise)}
