"""Figures of what signals show: bands over layers, trends over positions, signals against each other, labels compared.

1. Every function takes the run that its verb wrote (or its folder); bands also as `bands.json`.
2. Intervals are 95 % over traces; the title says how many traces, which model and which intervention.
3. What is above 0 is orange and solid, what is below is blue and hatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.discover.movement import read_bands
from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.page_style import visible
from kvlens.plots.style import INK, MINUS, NOISE, PLUS, SOFT, TEXT_POINTS, axes, describe
from kvlens.schemas import AGREEMENT, RANKING
from kvlens.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TREND_LINES = (("#009e73", (0, (4, 1.2))), (INK, "solid"), (PLUS, (0, (1, 1))))
AGREEMENT_NAMES = {
    "spearman": "rank\nagreement",
    "top_tenth_overlap": "top tenth\nshared",
    "sign_agreement": "same\nsign",
}
CHANCE = {"spearman": 0.0, "top_tenth_overlap": 0.1, "sign_agreement": 0.5}
N_SIGNALS, N_DIFFERENCES = 12, 2
TITLE_CHARACTERS = 45  # beside tick labels with signs and digits


def layer_profile(bands: Run | str | Path, ax: Axes | None = None) -> Axes:
    """The mean rank correlation of each layer with the label, its interval, and the bands, shaded where confirmed."""
    found = read_bands(bands)
    ax = axes(ax)
    layers = np.arange(len(found["layers"]))
    mean, low, high = (_column(found["layers"], name) for name in ("mean_rho", "low", "high"))
    ax.axhline(0, color=SOFT, lw=0.5, zorder=1)
    for band in found["bands"]:
        colour, hatch = (PLUS, None) if band["sign"] > 0 else (MINUS, "////")
        edges = (band["start"] - 0.5, band["stop"] - 0.5)
        if band["confirmed"]:
            ax.axvspan(*edges, facecolor=colour, alpha=0.2, lw=0, hatch=hatch, edgecolor="white", zorder=0)
        else:
            for edge in edges:
                ax.axvline(edge, color=colour, lw=0.8, linestyle=(0, (2, 2)), zorder=1)
    ax.errorbar(
        layers, mean, yerr=[mean - low, high - mean], fmt="o", ms=2.5, lw=0.8, color=INK, ecolor=SOFT, zorder=2
    )  # fmt: skip
    _layers_axis(ax, len(layers))
    shown = "shaded: confirmed bands" if found["verdict"] == "bands" else "no band confirmed"
    title = [f"{found['signal']}, {found['intervention']}", visible(_model(found["model"])), f"n = {found['n_traces']}"]
    describe(
        ax, [*title[:2], f"{title[2]} traces, {shown}"], "layer", "rank correlation with the effect", TITLE_CHARACTERS
    )
    return ax


def position_trend(bands: Run | str | Path, ax: Axes | None = None) -> Axes:
    """The mean rank correlation of each layer's signal with the position, before and after the z-score where known."""
    found = read_bands(bands)
    ax = axes(ax)
    ax.axhline(0, color=SOFT, lw=0.5, zorder=1)
    for (name, rows), (colour, dashes) in zip(found["position_trend"].items(), TREND_LINES, strict=False):
        mean, low, high = (_column(rows, column) for column in ("mean_rho", "low", "high"))
        layers = np.arange(len(rows))
        ax.fill_between(layers, low, high, color=colour, alpha=0.2, lw=0, zorder=1)
        ax.plot(layers, mean, color=colour, linestyle=dashes, lw=1.3, label=name, zorder=2)
    ax.set_ylim(-1, 1)
    _layers_axis(ax, len(found["layers"]))
    title = [visible(_model(found["model"])), f"n = {found['n_traces']} traces, 95 % interval"]
    describe(ax, title, "layer", "rank correlation with position", TITLE_CHARACTERS)
    _legend(ax)
    return ax


def signal_ranking(ranking: Run | str | Path, ax: Axes | None = None) -> Axes:
    """The signals by |rank correlation| with the effect in traces that did not choose the layer, without position."""
    run = _run(ranking, RANKING, "kvlens signals")
    rows = [row for row in run.ranking.to_dict("records") if row["choice"] != "each layer" and row["n_traces"] > 1]
    if not rows:
        raise InputError(f"plotting {run!r} failed: no signal has a rank correlation", "observe other signals")
    rows, left = rows[:N_SIGNALS], len(rows) - N_SIGNALS
    ax = axes(ax, height=1.1 + 0.16 * len(rows))
    ax.axvline(0, color=SOFT, lw=0.5, zorder=1)
    for place, row in enumerate(rows):
        colour = PLUS if row["rho"] > 0 else MINUS
        ax.plot([row["rho_low"], row["rho_high"]], [place, place], color=colour, lw=1.2, zorder=1)
        face = colour if row["causal"] is True else "white"
        ax.plot([row["rho"]], [place], "o", ms=3.5, mfc=face, mec=colour, zorder=2)
    ax.set_yticks(range(len(rows)), [_name(row) for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    fitted = run.documents["fitted"]
    more = f", {counted(left, 'signal')} left out" if left > 0 else ""
    n = max(row["n_traces"] for row in rows)
    title = [visible(f"{_model(fitted['model'])}, {fitted['intervention']}"), f"n = {n} traces{more}, open: not causal"]
    describe(ax, title, "rank correlation with the effect", "", width=25)
    return ax


def label_agreement(agreement: Run | str | Path, ax: Axes | None = None) -> Axes:
    """Rank agreement, shared top tenth and equal signs of two label runs: traces, their mean, and chance."""
    run = _run(agreement, AGREEMENT, "kvlens compare-labels")
    found = run.documents["agreement"]
    ax = axes(ax)
    for place, name in enumerate(AGREEMENT_NAMES):
        values = run.agreement[name].dropna().to_numpy()
        spread = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else np.zeros(len(values))
        ax.plot(place + spread, values, "o", ms=2, color=NOISE, mec=SOFT, mew=0.3, zorder=1)
        ax.hlines(CHANCE[name], place - 0.3, place + 0.3, color=SOFT, lw=0.8, linestyle=(0, (2, 2)), zorder=1)
        if found[name]["mean"] is not None:
            mean = found[name]["mean"]
            ends = [mean if found[name][end] is None else found[name][end] for end in ("low", "high")]
            ax.errorbar(
                [place], [mean], yerr=[[mean - ends[0]], [ends[1] - mean]], fmt="s", ms=3.5, lw=1.3, color=INK, zorder=2
            )  # fmt: skip
    ax.set_xticks(range(len(AGREEMENT_NAMES)), list(AGREEMENT_NAMES.values()))
    ax.set_xlim(-0.5, len(AGREEMENT_NAMES) - 0.5)
    differ = [f"{name}: {values['a']} and {values['b']}" for name, values in found["differences"].items()]
    title = [visible(line) for line in differ[:N_DIFFERENCES]] or ["runs that differ in nothing recorded"]
    if len(differ) > N_DIFFERENCES:
        title.append(f"and in {len(differ) - N_DIFFERENCES} more")
    describe(ax, [*title, f"n = {found['n_traces']} traces; dashed: chance"], "", "agreement", TITLE_CHARACTERS)
    return ax


def _run(run: Run | str | Path, schema: str, verb: str) -> Run:
    """The run, loaded when it is a path. Raises: InputError when another verb wrote it."""
    run = run if isinstance(run, Run) else load(run)
    if run.schema != schema or "runs" in run.meta:
        raise InputError(f"plotting {run!r} failed: it is no single run of '{schema}'", f"give what `{verb}` wrote")
    return run


def _model(model: Mapping[str, Any]) -> str:
    return f"{model['name']} ({model['note']})" if model["note"] else str(model["name"])


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['signal']}, layer {row['layer']}" if row["choice"] == "best layer" else str(row["signal"])


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype=float)


def _layers_axis(ax: Axes, n_layers: int) -> None:
    """Nothing; ticks at whole layers."""
    ax.set_xlim(-0.7, n_layers - 0.3)
    step = max(1, -(-n_layers // 8))
    ax.set_xticks(range(0, n_layers, step))


def _legend(ax: Axes) -> None:
    legend = ax.legend(loc="best", frameon=False, fontsize=TEXT_POINTS, handlelength=2.2, borderpad=0.2)
    for text in legend.get_texts():
        text.set_color(INK)
