"""How much could any selection of keys gain on SmolLM2-135M, and do the nulls say the same? Draws 03_ceilings.svg.

Reads data/results/03_ceilings/summary.json alone, which experiments/03_ceilings.py wrote. Top: how far the error could
fall, and how well dropped mass tells where. Middle: its rivals, and the map of cells. Bottom: free weights, and rules.
Run: python figures/03_ceilings.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

from kvlens import plots

SUMMARY = Path(__file__).resolve().parent.parent / "data" / "results" / "03_ceilings" / "summary.json"
SVG = Path(__file__).with_suffix(".svg")


def draw(summary: Path = SUMMARY, svg: Path = SVG) -> None:
    """Writes the figure; the same summary gives the same bytes, whatever the user's settings."""
    width, height = plots.SIZE_INCHES
    with style.context(["default", {"svg.hashsalt": svg.stem}]):
        figure = Figure(figsize=(2 * width, 3.4 * height), layout="constrained")
        axes = figure.subplots(3, 2)
        plots.ceiling_distribution(summary, ax=axes[0, 0])
        plots.dropped_mass_auc(summary, ax=axes[0, 1])
        plots.predictors(summary, ax=axes[1, 0])
        plots.cell_map(summary, ax=axes[1, 1])
        plots.free_weights(summary, ax=axes[2, 0])
        plots.rule_excess(summary, ax=axes[2, 1])
        about = {"Title": "How much any selection of cached keys could gain", "Date": None, "Creator": None}
        figure.savefig(svg, metadata=about)


if __name__ == "__main__":
    draw()
