"""What does a policy hold while a model writes, and what has it kept of what was said early? Draws 05_deploy.svg.

Reads data/results/05_runtime.json and 05_needle.json, which the experiments of these names wrote.
Left: bytes stored after every new token, without a policy and with. Right: of ten early facts, how many are answered by
what a query-agnostic policy kept, by its budget.
Run: python figures/05_deploy.py
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
NAMED = {
    "keynorm": (plots.PLUS, "o-"),
    "h2o": ("#e69f00", "P-"),
    "random": (INK, "s--"),
    "epikv": (plots.MINUS, "^-"),
    "surprise_fast": ("#009e73", "v-"),
    "sliding_window": ("#cc79a7", "D-"),
}


def needles(found: dict[str, Any], ax: Axes) -> None:
    """Answers by budget: six scorers by name, the others as grey lines."""
    rows = [r for r in found["rows"] if r["visibility"] == "query_agnostic" and r["scorer"] != "full cache"]
    rows = [r for r in rows if r["reduce"] == "all"]
    others = [name for name in dict.fromkeys(row["scorer"] for row in rows) if name not in NAMED]
    for name in (*others, *NAMED):
        colour, form = NAMED.get(name, (plots.NOISE, "-"))
        points = sorted((row["budget"], row["right"]) for row in rows if row["scorer"] == name)
        label = name if name in NAMED else ("others" if name == others[0] else None)
        x, y = zip(*points, strict=True)
        ax.plot(x, y, form, color=colour, ms=3, lw=0.9, mew=0.5, label=label)
    n = found["rows"][0]["n"]
    ax.axhline(n, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.set_ylim(-0.3, n + 0.5)
    ax.set_xticks(sorted({row["budget"] for row in rows}))
    ax.legend(fontsize=TEXT_POINTS - 0.5, frameon=False, handletextpad=0.4, loc="center left", bbox_to_anchor=(1, 0.5))
    title = [
        f"Early facts answered, of {n}, texts of {found['length']:,} tokens",
        "the question is seen after evicting",
    ]
    describe(ax, title, "budget, tokens a head", "answered", 34)


def draw(results: Path = RESULTS, svg: Path = SVG) -> None:
    """Writes the figure; the same results give the same bytes, whatever the user's settings."""
    runtime, needle = (json.loads((results / f"05_{name}.json").read_text()) for name in ("runtime", "needle"))
    width, height = plots.SIZE_INCHES
    with style.context(["default", {"svg.hashsalt": svg.stem}]):
        figure = Figure(figsize=(2 * width, 1.25 * height), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        growth = runtime["growth"]
        settings = f"prompt of {growth['n_prompt']} tokens, budget {runtime['budget']}, SmolLM2-135M"
        plots.stored_bytes(growth["bytes"], ["Bytes that the cache holds", settings], left)
        needles(needle, right)
        settle(figure)
        about = {"Title": "What a policy holds, and what it has kept", "Date": None, "Creator": None}
        figure.savefig(svg, metadata=about)


if __name__ == "__main__":
    draw()
