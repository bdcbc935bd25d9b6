"""Where do the important tokens of a trace stand, and how are effects distributed? Draws 01_labels.svg.

Reads the released label set in data/labels alone. Left: one trace, the effect of evicting each token. Right: the share
of tokens above each |effect|, over all traces. Run: python figures/01_labels.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

import kvlens
from kvlens import plots

LABELS = Path(__file__).resolve().parent.parent / "data" / "labels"
SVG = Path(__file__).with_suffix(".svg")
TRACE = "night-bus"


def draw(labels: Path = LABELS, svg: Path = SVG, trace: str = TRACE) -> None:
    """Writes the figure of a label run; the same labels give the same bytes, whatever the user's settings."""
    run = kvlens.load(labels)
    width, height = plots.SIZE_INCHES
    with style.context(["default", {"svg.hashsalt": svg.stem}]):
        figure = Figure(figsize=(2 * width, height), layout="constrained")
        left, right = figure.subplots(1, 2)
        plots.token_effects(run, trace, ax=left)
        plots.effect_distribution(run, ax=right)
        about = {"Title": "Effect of each token on log p(target), in nats", "Date": None, "Creator": None}
        figure.savefig(svg, metadata=about)


if __name__ == "__main__":
    draw()
