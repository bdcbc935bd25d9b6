"""Figures of a run of surprise: what a cache holds as it is refreshed, and how long a score stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvlens.errors import InputError
from kvlens.loading import Run
from kvlens.page_style import visible
from kvlens.plots.style import INK, MINUS, PLUS, SOFT, TEXT_POINTS, axes, describe
from kvlens.stats import over_traces
from kvlens.surprise_facts import LEAST_TOKENS, chosen_traces, chosen_variant, staleness, surprise_run, variants
from kvlens.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = "osv^DPX"  # one more than the colours, so that many variants differ in one or the other
NARROW = 40  # characters of a title
COLOURS = (PLUS, MINUS, "#009e73", INK, SOFT, "#cc79a7")


def kept_tokens(
    run: Run | str | Path, trace_id: str | None = None, variant: str | None = None, ax: Axes | None = None
) -> Axes:
    """Refresh by refresh (downwards), which positions of a trace stay and which leave; default: the run's first.

    Raises: InputError for a run without refreshes, or in which the trace is too short for one.
    """
    run = _with_refreshes(run)
    trace_id = chosen_traces(run, trace_id)[0]
    variant = chosen_variant(run, variant)
    steps = run.refreshes[(run.refreshes.trace_id == trace_id) & (run.refreshes.variant == variant)]
    if steps.empty:
        raise InputError(f"'{trace_id}' was never refreshed", "it is no longer than what is held; choose another trace")
    ax = axes(ax)
    from matplotlib.colors import to_rgb

    grid = np.zeros((int(steps.refresh.max()) + 1, int(steps.pos.max()) + 1), dtype=int)
    grid[steps.refresh, steps.pos] = np.where(steps.kept, 1, 2)
    colours = np.array([to_rgb(colour) for colour in ("white", MINUS, PLUS)])
    ax.imshow(colours[grid], aspect="auto", interpolation="nearest")
    for colour, label in ((MINUS, "stays"), (PLUS, "evicted"), ("white", "gone, or to come")):
        ax.plot([], [], "s", color=colour, mec=SOFT, mew=0.4, ms=4, label=label)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 3, "columnspacing": 0.8}
    ax.legend(fontsize=TEXT_POINTS, frameon=False, handletextpad=0.2, **below)
    cycle = run.meta["config"]["cycle"]
    held = f"{cycle['budget']:,} + {cycle['frozen']:,} tokens held, every {cycle['every']:,}"
    describe(ax, [visible(trace_id), f"{variant}: {held}", _model(run)], "position in the trace", "refresh", NARROW)
    return ax


def score_staleness(run: Run | str | Path, ax: Axes | None = None) -> Axes:
    """Rank correlation of the scores of held tokens with those some refreshes later, by variant, 95 % over traces.

    Raises: InputError for a run without refreshes, or in which no two of a trace can be compared.
    """
    run = _with_refreshes(run)
    found = {variant: staleness(run, variant) for variant in variants(run)}
    if all(rows.empty for rows in found.values()):
        raise InputError(
            f"'{run.path}' has no two refreshes of a trace that hold {LEAST_TOKENS} tokens in common",
            "run kvlens surprise on longer traces, or with a larger budget",
        )
    ax = axes(ax)
    apart_by = min(0.1, 0.6 / len(found))  # side by side, none nearer to the next number
    for number, (variant, rows) in enumerate(found.items()):
        groups = [(int(apart), part.rho.to_numpy()) for apart, part in rows.groupby("apart")]
        means = [(apart, over_traces(values, seed=0)) for apart, values in groups]
        x = np.array([apart for apart, _ in means]) + apart_by * (number - (len(found) - 1) / 2)
        colour = COLOURS[number % len(COLOURS)]
        ax.vlines(x, [m.low for _, m in means], [m.high for _, m in means], color=colour, lw=0.8)
        mark = MARKS[number % len(MARKS)]
        ax.plot(x, [m.mean for _, m in means], mark + "-", color=colour, ms=2.5, lw=0.8, label=variant)
    ax.axhline(0, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.legend(fontsize=TEXT_POINTS, frameon=False, handletextpad=0.3)
    every = run.meta["config"]["cycle"]["every"]
    title = [_model(run), f"{counted(len(run.traces), 'trace')}, 95 % interval; the fewer, the further right"]
    describe(ax, title, f"refreshes between (one every {every:,} tokens)", "rank correlation", NARROW)
    return ax


def _with_refreshes(run: Run | str | Path) -> Run:
    run = surprise_run(run)
    if "refreshes" not in run.tables:
        raise InputError(f"'{run.path}' has no refreshes to draw", "run kvlens surprise with a budget: -J N")
    return run


def _model(run: Run) -> str:
    model = run.meta["model"]
    return visible(model["name"] + (f" ({model['note']})" if model["note"] else "")) + f", {run.meta['dtype']}"
