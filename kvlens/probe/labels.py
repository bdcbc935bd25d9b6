"""Label runs: how important is every window of every trace, in one folder that survives interruption?

1. read and tokenise all traces, load and check the model: whatever is wrong with the input is said before any work;
2. open the run folder: finished, continued, or new; its plan fixes how windows are packed into batches;
3. trace by trace: measure (`measure.py`) and write each batch as a part; a part that is there is never redone;
4. merge the parts into the tables of `kvlens.labels/1`, with the noise floor of the run beside them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.grading import grade
from kvlens.linear import kernel
from kvlens.loading import Run, load
from kvlens.model import Model
from kvlens.probe import budget
from kvlens.probe.measure import TraceMeasurement
from kvlens.probe.readout import Metric
from kvlens.probe.settings import Settings, as_config, make_settings
from kvlens.probe.windows import list_windows
from kvlens.provenance import hash_traces
from kvlens.records import Tokens, Trace
from kvlens.schemas import LABELS
from kvlens.store import RunFolder, open_run
from kvlens.texts import read_traces
from kvlens.tokenising import tokenize

Tick = Callable[[int, int], None]
Note = Callable[[str], None]
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
    found = read_traces(traces, limit=limit) if isinstance(traces, (str, Path)) else _at_hand(traces, limit)
    loaded = model if isinstance(model, Model) else models.load(model, device=device, dtype=dtype, attention=attention)
    asked = {
        "intervention": intervention, "window": window, "stride": stride, "units": units, "cells": cells, "lag": lag,
        "per_target": per_target, "flips": flips, "only_correct": only_correct, "target_tokens": target_tokens,
        "filler": filler, "random_subsets": random_subsets, "screen": screen, "chat": chat,
        "beyond_context": beyond_context, "seed": seed,
    }  # fmt: skip
    settings = make_settings(preset, loaded, metric, **asked)
    everything = [_tokens(trace, loaded, settings) for trace in found]
    skipped = _not_correct(everything) if settings.only_correct else {}
    chosen = [tokens for tokens in everything if tokens.trace.id not in skipped]
    if not chosen:
        raise InputError(
            f"all {len(found)} traces are left out: none is known to be answered right",
            "drop --only-correct, or give traces with an `answer` their target states",
        )
    for tokens in chosen:
        list_windows(tokens, settings)  # a trace without any is refused here, before any work
    with open_run(
        out,
        schema=LABELS,
        config=as_config(settings),
        model={"name": loaded.name, "fingerprint": loaded.fingerprint, "note": loaded.note},
        input_hash=_hash_input(found, everything),
        seed=seed,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        attention=loaded.attention,
        force=force,
    ) as run:
        if not run.complete:
            for trace_id, reason in skipped.items():
                run.skip(trace_id, reason)
            Job(run, loaded, settings, metric, progress or _ignore, note or _ignore).do(chosen)
    return load(out)


def _ignore(*_: object) -> None:
    """Nobody listens."""


def _at_hand(traces: Sequence[Trace], limit: int | None) -> list[Trace]:
    """The first `limit` traces.

    Raises: InputError when there are none, or two of one id.
    """
    if limit is not None and limit < 1:
        raise InputError(f"cannot label {limit} traces: the limit must be 1 or more", "leave limit out")
    found = list(traces)[:limit]
    if not found:
        raise InputError("no traces to label", "give at least one trace")
    counts = Counter(trace.id for trace in found)
    twice = [trace_id for trace_id, count in counts.items() if count > 1]
    if twice:
        raise InputError(f"the id {twice[0]!r} stands for {counts[twice[0]]} traces", "give every trace its own id")
    return found


def _hash_input(traces: Sequence[Trace], everything: Sequence[Tokens]) -> str:
    """The SHA-256 of the traces and of how they were tokenised: another tokenizer or template makes another run."""
    digest = hashlib.sha256(hash_traces(traces).encode())
    for tokens in everything:
        digest.update(f"{tokens.n_prompt} {tokens.n_context} ".encode() + tokens.ids.astype("<i8").tobytes())
    return digest.hexdigest()


def _tokens(trace: Trace, model: Model, settings: Settings) -> Tokens:
    """The trace's tokens, refused when the model was not trained for that many or does not know one of them."""
    found = tokenize(
        trace,
        model.tokenizer,
        target_tokens=settings.target_tokens,
        chat=settings.chat,
        max_tokens=models.learned_positions(model) if settings.beyond_context else model.max_context,
    )
    models.check_ids(model, found.ids.tolist())
    return found


@dataclass
class Job:
    """What a label run works with while it runs."""

    run: RunFolder
    model: Model
    settings: Settings
    metric: Metric | None
    progress: Tick
    note: Note

    def do(self, chosen: Sequence[Tokens]) -> None:
        """Nothing; measures what the run lacks of these traces and finishes it."""
        run = self.run
        if run.plan is None:
            longest = max(tokens.n_tokens for tokens in chosen)
            run.save_plan({"rows": budget.choose_rows(self.model, longest), "split": 1, "selected": {}})
        measurements = [TraceMeasurement(run, self.model, t, self.settings, self.metric) for t in chosen]
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
        size = budget.prefix_bytes(self.model, longest) + budget.batch_bytes(self.model, longest, rows)
        windows = sum(m.n_windows for m in ahead)
        upper = ", at most" if self.settings.screen is not None else ", about"
        self.note(
            f"{windows:,} windows of {len(ahead)} traces: {n_tokens:,} tokens to compute{upper} "
            f"{n_tokens * seconds / 60:.1f} min and {size / 1e6:,.0f} MB beside the model"
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
    """What a run says of itself: its noise floor over all traces, and the screen's and subsets' reports."""
    results: dict[str, Any] = {
        "noise_nats": _spread([value for report in reports for value in report["noise"]]),
        "nothing_hidden_nats": max(report["nothing_hidden_nats"] for report in reports),
        "linear_kernel": kernel(),
    }
    against = [value for report in reports for value in report.get("noise_fp32", [])]
    if against:
        results["noise_against_fp32_nats"] = _spread(against)
    for name in ("screen", "subsets"):
        found = {report["trace_id"]: report[name] for report in reports if name in report}
        if found:
            results[name] = found
    return results


def _spread(noise: Sequence[float]) -> dict[str, Any]:
    """Median and maximum of differences in nats, and of how many windows; null where none could be measured."""
    if not noise:
        return {"median": None, "max": None, "n_windows": 0}
    return {"median": float(np.median(noise)), "max": max(noise), "n_windows": len(noise)}
