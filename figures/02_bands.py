"""Which layers' signals go with importance, and do two interventions agree on it? Draws 02_bands.svg.

Reads data/results/02_bands alone: bands, ranking and agreement of the traces written for this project, as
experiments/02_bands.py left them. Top: the profile over layers against `evict` and against `substitute` labels. Middle:
what position does to the raw signal, and all signals ranked. Bottom: how far the interventions agree.
Run: python figures/02_bands.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

from kvlens import plots

RUNS = Path(__file__).resolve().parent.parent / "data" / "results" / "02_bands"
SVG = Path(__file__).with_suffix(".svg")


def draw(runs: Path = RUNS, svg: Path = SVG) -> None:
    """Writes the figure; the same runs give the same bytes, whatever the user's settings."""
    width, height = plots.SIZE_INCHES
    with style.context(["default", {"svg.hashsalt": svg.stem}]):
        figure = Figure(figsize=(2 * width, 4.2 * height), layout="constrained")
        axes = figure.subplots(3, 2, height_ratios=(1, 1.3, 1))
        plots.layer_profile(runs / "evict-bands", ax=axes[0, 0])
        plots.layer_profile(runs / "substitute-bands", ax=axes[0, 1])
        plots.position_trend(runs / "evict-bands", ax=axes[1, 0])
        plots.signal_ranking(runs / "evict-ranking", ax=axes[1, 1])
        plots.label_agreement(runs / "evict-substitute", ax=axes[2, 0])
        plots.label_agreement(runs / "evict-knockout", ax=axes[2, 1])
        about = {"Title": "Which layers' signals go with importance", "Date": None, "Creator": None}
        figure.savefig(svg, metadata=about)


if __name__ == "__main__":
    draw()
