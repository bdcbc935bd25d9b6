"""Figures of policies at work: what a cache holds while a model writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvlens.errors import InputError
from kvlens.page_style import visible
from kvlens.plots.style import INK, MINUS, PLUS, SOFT, TEXT_POINTS, axes, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (INK, PLUS, MINUS, "#009e73", "#cc79a7", SOFT)
DASHES = ("solid", (0, (4, 1.2)), (0, (1, 1)), "dashdot")


def stored_bytes(series: Mapping[str, Sequence[int]], title: Sequence[str] = (), ax: Axes | None = None) -> Axes:
    """Bytes stored after every new token, one line a way, as `kvlens.runtime.meter.Meter` measures them.

    Raises: InputError where there is no line, or one without a token.
    """
    if not series or not all(len(found) for found in series.values()):
        raise InputError("there are no stored bytes to draw", "generate at least one token with a Meter as streamer")
    ax = axes(ax)
    for number, (name, found) in enumerate(series.items()):
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        megabytes = [n / 1e6 for n in found]
        ax.plot(range(1, len(found) + 1), megabytes, color=colour, ls=dashes, lw=1.1, label=visible(name))
    ax.set_ylim(0, None)
    ax.legend(fontsize=TEXT_POINTS, frameon=False, handlelength=2.2)
    describe(ax, list(title) or ["Bytes that the cache holds"], "generated tokens", "stored, MB")
    return ax
