"""Does surprise say which cached tokens matter, and does it measure the future? Draws 04_surprise.svg.

Reads data/results/04_surprise.json and the run beside it, which experiments/04_surprise.py wrote. Top: correlation with
occlusion labels, each variant, its mirror from the past, and other rules. Middle: what a text's own future says of a
token beyond another text's, and what a verbatim repetition later does. Bottom: what stays at each refresh of one text,
and how stale scores get.
Run: python figures/04_surprise.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlens import plots
from kvlens.plots.style import INK, SOFT, TEXT_POINTS, describe, settle

RESULTS = Path(__file__).resolve().parent.parent / "data" / "results"
SVG = Path(__file__).with_suffix(".svg")
GREEN = "#009e73"
NAMES = {"project": "project's", "gsm8k": "GSM8K", "math": "MATH", "own": "model's own"}
MARKS = dict(zip(NAMES, "osv^", strict=True))
MIRRORED = ("full", "fast", "full,logprob,no_self", "fast,logprob,no_self")
OTHERS = ("key norm", "hidden change", "hidden change z", "attention mass")
INFORMATION = ("full,logprob", "full,logprob,no_self", "fast,logprob", "fast,logprob,no_self")


def interval(ax: Axes, fact: dict[str, float], y: float, colour: str, mark: str, face: str | None = None) -> None:
    ax.hlines(y, fact["low"], fact["high"], color=colour, lw=0.9)
    ax.plot(fact["mean"], y, mark, color=colour, mfc=face or colour, ms=3, mew=0.7)


def correlations(found: dict[str, Any], ax: Axes, key: str, what: str) -> None:
    """Partial rank correlation with the labels, by rule and source; open marks: the mirror from the past."""
    rows = [*MIRRORED, *OTHERS][::-1]
    for source, facts in found["sources"].items():
        shift = 0.18 * (1.5 - list(NAMES).index(source))
        for y, name in enumerate(rows):
            colour = plots.PLUS if name in MIRRORED else SOFT
            interval(ax, facts["rules"][name][key], y + shift, colour, MARKS[source])
            if name in MIRRORED:
                fact = facts["rules"][f"{name},past"][key]
                interval(ax, fact, y + shift - 0.07, plots.MINUS, MARKS[source], "white")
    ax.axvline(0, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(-0.6, len(rows) + 0.9)
    describe(ax, [what, "95 % interval; beyond position and frequency"], "rank correlation", "", 36)


def legend(found: dict[str, Any], ax: Axes) -> None:
    for source, facts in found["sources"].items():
        ax.plot([], [], MARKS[source], color=INK, ms=3, label=f"{NAMES[source]} (n = {facts['n_traces']})")
    ax.plot([], [], "o", color=plots.MINUS, mfc="white", ms=3, label="from the past")
    ax.legend(fontsize=TEXT_POINTS - 1, frameon=False, handletextpad=0.1, ncols=2, loc="upper left", columnspacing=0.5)


def information(found: dict[str, Any], ax: Axes) -> None:
    """Nats that a text's own rows tell of a token beyond another text's, from the future and from the past."""
    for number, name in enumerate(INFORMATION[::-1]):
        for source, facts in found["sources"].items():
            shift = 0.16 * (1.5 - list(NAMES).index(source))
            interval(ax, facts["information"][f"{name}: gain"], number + shift, plots.PLUS, MARKS[source])
            mirror = facts["information"][f"{name},past: gain"]
            interval(ax, mirror, number + shift - 0.06, plots.MINUS, MARKS[source], "white")
    ax.axvline(0, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.set_yticks(range(len(INFORMATION)), INFORMATION[::-1])
    title = ["What own rows tell of a token beyond another text's", "open: from the past"]
    describe(ax, title, "nats a token", "", 36)


def repetition(found: dict[str, Any], ax: Axes) -> None:
    """What a verbatim repetition later adds to the score of a sentence."""
    names = [name for name in found["repetition"] if "logprob" in name][::-1]
    for y, name in enumerate(names):
        interval(ax, found["repetition"][name], y, GREEN, "o")
    ax.axvline(0, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.6, len(names) - 0.4)
    title = ["A sentence followed later by itself, against by another", f"n = {found['n_seeds']} seeds, 95 % interval"]
    describe(ax, title, "minus log p, difference in nats a token", "", 36)


def stale(found: dict[str, Any], ax: Axes) -> None:
    """How far the order of held tokens is still that of some refreshes before, by source."""
    for source, facts in found["sources"].items():
        for variant, colour in (("full", plots.PLUS), ("fast", plots.MINUS)):
            rows = facts["staleness"][variant]
            x = [int(apart) for apart in rows]
            ax.vlines(x, [row["low"] for row in rows.values()], [row["high"] for row in rows.values()], colour, lw=0.8)
            means = [row["mean"] for row in rows.values()]
            ax.plot(x, means, MARKS[source] + "-", color=colour, ms=3, lw=0.7, mew=0.5)
    for variant, colour in (("full", plots.PLUS), ("fast", plots.MINUS)):
        ax.plot([], [], color=colour, label=variant)
    ax.set_ylim(0, 1.05)
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    ax.legend(fontsize=TEXT_POINTS, frameon=False, loc="lower left", handletextpad=0.3)
    title = [f"{found['budget']} + 4 tokens held, refreshed every {found['every']}", "95 % interval over traces"]
    describe(ax, title, "refreshes between", "rank correlation of scores", 34)


def draw(results: Path = RESULTS, svg: Path = SVG) -> None:
    """Writes the figure; the same results give the same bytes, whatever the user's settings."""
    found = json.loads((results / "04_surprise.json").read_text())
    width, height = plots.SIZE_INCHES
    with style.context(["default", {"svg.hashsalt": svg.stem}]):
        figure = Figure(figsize=(2 * width, 4.3 * height), layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(1.7, 1, 1))
        left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        correlations(found, left, "rho_position_frequency", "With the effect of evicting the token")
        correlations(found, right, "rho_size", "With the size of the effect")
        legend(found, left)
        right.tick_params(labelleft=False)
        information(found, figure.add_subplot(grid[1, 0]))
        repetition(found, figure.add_subplot(grid[1, 1]))
        run = results / "04_surprise"
        plots.kept_tokens(run, variant="fast", ax=figure.add_subplot(grid[2, 0]))
        stale(found, figure.add_subplot(grid[2, 1]))
        settle(figure)
        about = {"Title": "Does counter-causal surprise say which tokens matter", "Date": None, "Creator": None}
        figure.savefig(svg, metadata=about)


if __name__ == "__main__":
    draw()
