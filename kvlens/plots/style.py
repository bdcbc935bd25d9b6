"""What all figures share: their size, their colours, and how they say what they show.

Colours are Okabe and Ito's, which stay apart for every common kind of colour blindness; lines differ in dashes too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlens.errors import EnvironmentLacks
from kvlens.wording import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (3.3, 2.3)
TITLE_POINTS, TEXT_POINTS = 8.0, 7.0
INK, SOFT, NOISE = "#1c1e21", "#5a6169", "#c9ced4"
PLUS, MINUS = "#d55e00", "#0072b2"  # of a positive and of a negative value
SHADES = {"prompt": "#e9eef4", "reasoning": "#ffffff", "target": "#f3ead2"}
LINES = {"prompt": ("#009e73", (0, (4, 1.2))), "reasoning": (INK, "solid")}
TITLE_CHARACTERS = 50


def axes(ax: Axes | None, height: float = SIZE_INCHES[1]) -> Axes:
    """`ax`, or new axes as wide as a column and of this height in inches."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise EnvironmentLacks("plots need matplotlib", extra("lens")) from error
    return plt.subplots(figsize=(SIZE_INCHES[0], height), layout="constrained", dpi=150)[1]


def describe(ax: Axes, title: Sequence[str], x: str, y: str, width: int = TITLE_CHARACTERS) -> None:
    """Nothing; writes title and axis labels at sizes that stay readable at column width."""
    lines = [line for part in title for line in textwrap.wrap(part, width)]
    pad = TEXT_POINTS + 7  # room for the names of the segments
    ax.set_title("\n".join(lines), fontsize=TITLE_POINTS, color=INK, loc="left", pad=pad, parse_math=False)
    ax.set_xlabel(x, fontsize=TEXT_POINTS, color=INK)
    ax.set_ylabel(y, fontsize=TEXT_POINTS, color=INK)
    ax.tick_params(labelsize=TEXT_POINTS, color=SOFT, labelcolor=INK, length=2.5, width=0.6)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=SOFT, linewidth=0.6)


def settle(figure: Figure) -> None:
    """Nothing; the layout is worked out once and rounded, for its last digits differ from process to process."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ax in figure.axes:
        left, low, wide, high = (round(edge, 4) for edge in ax.get_position().bounds)
        ax.set_position((left, low, wide, high))
