"""What do methods claim, what do they hold, and what does it cost? Draws 06_audit.svg.

Reads data/results/06_audit.json, which experiments/06_audit.py wrote. Left: claimed and held bytes of every method.
Right: KL to the full cache at the bytes held; marked presses as they ship and in three shapes of storage.
Run: python figures/06_audit.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlens import plots
from kvlens.plots.deploy import draw_claims
from kvlens.plots.style import SOFT, TEXT_POINTS, describe, settle

RESULTS = Path(__file__).resolve().parent.parent / "data" / "results"
TICKS = (0.03, 0.05, 0.1, 0.2, 0.5)
SVG = Path(__file__).with_suffix(".svg")


def losses(rows: list[dict[str, Any]], ax: Axes) -> None:
    """KL of every method, in the same order as on the left."""
    ran = [row for row in rows if row["claimed_bytes"] is not None]
    least = min(row["kl_nats"] for row in ran if row["kl_nats"] > 1e-9)
    for y, row in enumerate(ran[::-1]):
        simulated = row["simulated"]
        colour, mark = (plots.PLUS, "X") if simulated else (plots.MINUS, "o")
        ax.plot(max(row["kl_nats"], least / 3), y, mark, color=colour, ms=3.2, mew=0.5)
    ax.set_xscale("log")
    ax.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    ax.minorticks_off()
    ax.set_yticks(range(len(ran)), [""] * len(ran))
    ax.set_ylim(-0.7, len(ran) - 0.3)
    ax.grid(axis="x", color=SOFT, lw=0.2)
    describe(ax, ["What the target loses by it"], "KL to the full cache, nats a token", "")
    ax.tick_params(axis="y", labelsize=TEXT_POINTS - 1.5)


def draw(results: Path = RESULTS, svg: Path = SVG) -> None:
    """Writes the figure; the same results give the same bytes, whatever the user's settings."""
    found = json.loads((results / "06_audit.json").read_text())
    rows = [row | {"method": row["method"].removeprefix("policy:")} for row in found["rows"] if row["method"] != "full"]
    width = plots.SIZE_INCHES[0]
    with style.context(["default", {"svg.hashsalt": svg.stem}]):
        figure = Figure(figsize=(2 * width, 1.1 + 0.125 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        draw_claims(rows, left)
        losses(rows, right)
        settle(figure)
        about = {"Title": "Claimed and held bytes of every method", "Date": None, "Creator": None}
        figure.savefig(svg, metadata=about)


if __name__ == "__main__":
    draw()
