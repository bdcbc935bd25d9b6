"""Figures of policies at work: what a cache holds while a model writes, what methods claim and what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.page_style import visible
from kvlens.plots.style import INK, MINUS, NOISE, PLUS, SOFT, TEXT_POINTS, axes, describe
from kvlens.schemas import AUDIT

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


def claimed_and_held(run: Run | str | Path, ax: Axes | None = None) -> Axes:
    """Each method's claimed bytes (open) and held bytes (full) as shares of the full cache's; marked: simulated.

    Rows that could not run are left out. Raises: InputError for what is no audit, or one in which nothing ran.
    """
    run = load(run) if not isinstance(run, Run) else run
    if run.meta.get("schema") != AUDIT:
        raise InputError(f"'{run.path}' is no audit", "name a run folder of kvlens audit")
    return draw_claims(run.documents["audit"]["rows"], ax)


def draw_claims(rows: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """The same of rows as `audit.json` has them."""
    ran = [row for row in rows if row["claimed_bytes"] is not None]
    if not ran:
        raise InputError("there is no method to draw", "audit one that can run")
    ax = axes(ax, 0.9 + 0.13 * len(ran))
    for y, row in enumerate(ran[::-1]):
        claimed, held = (row[name] / row["full_bytes"] for name in ("claimed_bytes", "physical_bytes"))
        colour = PLUS if row["simulated"] else MINUS
        ax.plot([claimed, held], [y, y], color=NOISE, lw=1.0, zorder=1)
        ax.plot(claimed, y, "o", color=colour, mfc="white", ms=3.2, mew=0.8)
        ax.plot(held, y, "X" if row["simulated"] else "o", color=colour, ms=3.2, mew=0.5)
    ax.set_yticks(range(len(ran)), [visible(row["method"]) for row in ran[::-1]])
    ax.set_ylim(-0.7, len(ran) - 0.3)
    ax.set_xlim(0, None)
    for mark, colour, face, label in (
        ("o", SOFT, "white", "claimed"),
        ("o", MINUS, MINUS, "held"),
        ("X", PLUS, PLUS, "held, simulated"),
    ):
        ax.plot([], [], mark, color=colour, mfc=face, ms=3.2, label=label)
    below = {"loc": "upper center", "bbox_to_anchor": (0.4, 0), "borderaxespad": 5.0}  # in letters: under the label
    ax.legend(fontsize=TEXT_POINTS - 0.5, frameon=False, ncols=3, **below)
    describe(ax, ["Claimed and held bytes"], "share of the full cache's bytes", "")
    ax.tick_params(axis="y", labelsize=TEXT_POINTS - 1.5)
    return ax
