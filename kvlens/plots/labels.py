"""Figures of a labels run: where in a trace do the effects stand, and how large are they?

1. Every function draws on the axes it is given, or on new ones of a column's width, and returns them.
2. Position 0 is an attention sink: it, and what shares a window with it, is named apart, and no scale reaches for it.
3. The noise floor is drawn as a band, and the title says which model, which precision and which intervention.

Orange where the target needs a token, blue where it is better off without it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvlens.errors import InputError
from kvlens.facts import facts
from kvlens.findings import beside_sink, labels_run, nats, tokens_of
from kvlens.loading import Run
from kvlens.page_style import visible
from kvlens.plots.style import INK, LINES, MINUS, NOISE, PLUS, SHADES, SOFT, TEXT_POINTS, axes, describe
from kvlens.records import SEGMENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

N_NAMED = 3
NAMED_APART, NAMED_SHARE = 0.2, 0.1  # of the positions, of the largest |effect|
AROUND_CHARACTERS, WORD_CHARACTERS = 4, 12
HEADROOM, FOOTROOM = 0.30, 0.12  # of the y range, for names


def token_effects(run: Run | str | Path, trace_id: str | None = None, ax: Axes | None = None) -> Axes:
    """The effect of every labelled token along one trace (default: the run's first), in nats.

    The segments are shaded, the tokens with the largest |effect| are named, position 0 is set apart at the top left.
    """
    run = labels_run(run)
    trace_id = _first_trace(run) if trace_id is None else trace_id
    tokens = tokens_of(run, trace_id).sort_values("pos")
    rows = _labelled(run, tokens)
    ax = axes(ax)
    n_tokens = int(tokens.pos.max()) + 1
    _shade_segments(ax, tokens, n_tokens)
    noise = _noise(run.traces[run.traces.trace_id == trace_id])
    ax.axhspan(-noise, noise, color=NOISE, lw=0, zorder=1)
    ax.axhline(0, color=SOFT, lw=0.5, zorder=1)
    colours = np.where(rows.effect_nats > 0, PLUS, MINUS)
    ax.bar(rows.pos, rows.effect_nats, width=1, color=colours, edgecolor=colours, linewidth=0.4, zorder=2)
    low, high = min(0.0, rows.effect_nats.min()), max(0.0, rows.effect_nats.max())
    span = (high - low) or 1.0
    ax.set_ylim(low - FOOTROOM * span, high + HEADROOM * span)
    ax.set_xlim(-0.01 * n_tokens - 0.5, n_tokens - 0.5)
    _name_largest(ax, tokens, rows)
    _mark_sink(ax, tokens[beside_sink(run, tokens)])
    n_context = int((tokens.segment != "target").sum())
    n_labelled = int(tokens.effect_nats.notna().sum())
    some = "" if n_labelled >= n_context - 1 else f", {n_labelled:,} of {n_context:,} labelled\n"  # the last never is
    x = f"position in the trace{some} (noise floor {_small(noise)} nats)"
    describe(ax, [visible(trace_id), *_about(run)], x, "effect, nats")
    return ax


def effect_distribution(run: Run | str | Path, ax: Axes | None = None) -> Axes:
    """The share of labelled tokens whose |effect| is larger than x nats, for each segment; position 0 left out."""
    run = labels_run(run)
    rows = _labelled(run, run.tokens)
    ax = axes(ax)
    noise = _noise(run.traces)
    sizes = rows.effect_nats.abs()
    for segment in (name for name in SEGMENTS if (rows.segment == name).any()):
        ordered = np.sort(sizes[rows.segment == segment].to_numpy())
        above = 1 - np.arange(1, len(ordered) + 1) / len(ordered)
        colour, dashes = LINES[segment]
        label = f"{segment} (n = {len(ordered):,})"
        ax.step([0, *ordered], [1, *above], where="post", color=colour, linestyle=dashes, lw=1.3, label=label)
    ax.axvspan(0, noise, color=NOISE, lw=0, zorder=0)
    _symlog(ax, noise, float(sizes.max()))
    ax.set_ylim(0, 1.02)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    n_traces = rows.trace_id.nunique()
    traces = f"{n_traces:,} traces" if n_traces > 1 else visible(str(rows.trace_id.iloc[0]))
    x = f"|effect|, nats, position 0 left out\n(shaded: noise floor, {_small(noise)} nats)"
    describe(ax, [traces, *_about(run)], x, "share of tokens above")
    legend = ax.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=TEXT_POINTS, handlelength=2.2,
        columnspacing=1.2, borderpad=0.2, borderaxespad=0,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(INK)
    return ax


def _first_trace(run: Run) -> str:
    if run.traces.empty:
        raise InputError(f"plotting {run!r} failed: it has no traces", "look at counts.skipped in its run.json")
    return str(run.traces.trace_id.iloc[0])


def _labelled(run: Run, tokens: pd.DataFrame) -> pd.DataFrame:
    """The rows with an effect, without the window of position 0. Raises: InputError when none is left."""
    rows = tokens[np.isfinite(tokens.effect_nats) & ~beside_sink(run, tokens)]
    if rows.empty:
        raise InputError(f"plotting {run!r} failed: only position 0 has an effect", "label with narrower windows")
    return rows


def _noise(traces: pd.DataFrame) -> float:
    """The largest noise floor of these traces in nats, 0 where it was not measured."""
    known = traces.noise_nats.dropna()
    return float(known.max()) if len(known) else 0.0


def _about(run: Run) -> list[str]:
    """Which model, precision and intervention; the windows too, where they are not single tokens."""
    said, config = facts(run), run.meta["config"]
    single = config.get("units") is None and config.get("window") == config.get("stride") == 1
    return [visible(f"{said['model']}, {said['intervention']}"), *([] if single else [f"windows: {said['windows']}"])]


def _shade_segments(ax: Axes, tokens: pd.DataFrame, n_tokens: int) -> None:
    """Nothing; shades each segment and names it above the axes, the target at its right end."""
    for segment, rows in tokens.groupby("segment", sort=False):
        start, end = rows.pos.min() - 0.5, rows.pos.max() + 0.5
        ax.axvspan(start, end, color=SHADES[segment], lw=0, zorder=0)
        last = segment == "target"
        if last or end - start > 0.12 * n_tokens:  # narrower ones have no room for their name
            where, side = (end, "right") if last else (start, "left")
            ax.annotate(
                segment, (where, 1), xycoords=ax.get_xaxis_transform(), xytext=(0, 2), textcoords="offset points",
                ha=side, va="bottom", fontsize=TEXT_POINTS, color=SOFT,
            )  # fmt: skip


def _name_largest(ax: Axes, tokens: pd.DataFrame, rows: pd.DataFrame) -> None:
    """Nothing; writes the words of the largest effects at their bars, none close to one named before."""
    n_tokens = len(tokens)
    named: list[int] = []
    sizes = rows.effect_nats.abs()
    rows = rows[sizes >= NAMED_SHARE * sizes.max()]
    blank = rows.token.str.strip() == ""  # of the tokens of one window, which share an effect, name one with a text
    for row in rows.iloc[np.lexsort((rows.pos, blank, -rows.effect_nats.abs()))].itertuples():
        if len(named) == N_NAMED:
            return
        if all(abs(row.pos - pos) > NAMED_APART * n_tokens for pos in named):
            named.append(row.pos)
            up, side = row.effect_nats > 0, "left" if row.pos < 0.06 * n_tokens else "center"
            ax.annotate(
                _word(tokens, row.pos), (row.pos, row.effect_nats), xytext=(0, 1.5 if up else -1.5), ha=side,
                va="bottom" if up else "top", textcoords="offset points", fontsize=TEXT_POINTS, color=INK,
                parse_math=False,
            )  # fmt: skip


def _word(tokens: pd.DataFrame, pos: int) -> str:
    """The word that the token at `pos` is part of, cut to a few characters on each side of it."""
    token = str(tokens.token[tokens.pos == pos].iloc[0])
    if not token.strip():
        return visible(token).replace(" ", "␣")[:WORD_CHARACTERS]
    before = "".join(tokens.token[tokens.pos.between(pos - AROUND_CHARACTERS, pos - 1)])
    after = "".join(tokens.token[tokens.pos.between(pos + 1, pos + AROUND_CHARACTERS)])
    left = re.split(r"\s", before + token[: len(token) - len(token.lstrip())])[-1][-AROUND_CHARACTERS:]
    right = re.split(r"\s", token[len(token.rstrip()) :] + after)[0][:AROUND_CHARACTERS]
    word = visible(left + token.strip() + right)
    return word if len(word) <= WORD_CHARACTERS else word[: WORD_CHARACTERS - 1] + "…"


def _mark_sink(ax: Axes, apart: pd.DataFrame) -> None:
    """Nothing; marks position 0, or the window it is in, at the top, its effect as a number: it is off the scale."""
    if apart.effect_nats.notna().any():
        top, last = ax.get_xaxis_transform(), int(apart.pos.max())
        name = f"positions 0 to {last}" if last else "position 0"
        ax.plot([0], [0.92], "^", transform=top, mec=INK, ms=4, mfc="white", mew=0.8, zorder=3)
        ax.annotate(
            f"{name}: {nats(float(apart.effect_nats.iloc[0]))}", (0, 0.92), xycoords=top, xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=TEXT_POINTS, color=INK,
        )  # fmt: skip


def _symlog(ax: Axes, noise: float, largest: float) -> None:
    """Nothing; an x axis that is linear up to the noise floor and logarithmic from there, ticks at whole decades."""
    start = noise or 1e-6
    ax.set_xscale("symlog", linthresh=start, linscale=0.5)
    decades = range(int(np.ceil(np.log10(start))), int(np.ceil(np.log10(max(largest, start)))) + 1)
    ax.set_xticks([0, *(10.0**power for power in decades)], ["0", *map(_power, decades)])
    ax.minorticks_off()
    ax.set_xlim(0, max(largest * 1.3, start * 10))


def _small(noise: float) -> str:
    return f"{noise:.1g}" if noise else "unknown"


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if exponent >= -2 else f"$10^{{{exponent}}}$"
