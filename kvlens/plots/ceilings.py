"""Figures of a ceilings run: how much a better choice could gain, what tells where, and what free weights would add.

1. Every function takes a ceilings run, its folder, or its `summary.json`.
2. Real rows are orange squares, nulls other marks and colours; intervals are 95 % over documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.disk import as_path, disk
from kvlens.errors import InputError
from kvlens.loading import Run
from kvlens.page_style import visible
from kvlens.plots.style import INK, MINUS, PLUS, SOFT, TEXT_POINTS, axes, describe
from kvlens.schemas import CEILINGS
from kvlens.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = {"real": (PLUS, "s"), "permuted": (MINUS, "o"), "gaussian": ("#009e73", "^"), "rank 4": (INK, "D")}
PAPER_PI = {4: 1.07, 8: 1.16, 16: 1.39, 32: 1.79}  # ContourKV, Qwen2.5-1.5B
FLAT = 0.25
TITLE_CHARACTERS = 45  # beside tick labels
NEEDED = ("budgets", "predictors", "predictor_budget", "rules", "cells", "model", "n_rows", "n_documents")


def read_summary(ceilings: Run | str | Path) -> dict[str, Any]:
    """The content of `summary.json`, given as the file, its folder or the run. Raises: InputError when it is none."""
    if isinstance(ceilings, Run):
        found: Any = ceilings.documents.get("summary") or {}
        file = Path(ceilings.path)
    else:
        file = as_path(ceilings, "ceilings")
        file = file / "summary.json" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"'{file}' does not exist", "give what `kvlens ceilings` wrote")
        with disk(f"reading '{file}'"):
            content = file.read_bytes()
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
    hint = "give what `kvlens ceilings` wrote"
    if not isinstance(found, dict) or found.get("schema") != CEILINGS:
        raise InputError(f"'{file}' is no summary of ceilings", hint)
    if lacking := [name for name in NEEDED if not found.get(name)]:
        raise InputError(f"'{file}' is damaged: it lacks {', '.join(lacking)}", hint)
    return found


def ceiling_distribution(ceilings: Run | str | Path, ax: Axes | None = None) -> Axes:
    """By budget, how far the error could fall: median, middle half and middle nine tenths, real and under each null."""
    found = read_summary(ceilings)
    ax = axes(ax)
    names = list(_series(found["budgets"][0]))
    for number, line in enumerate(found["budgets"]):
        for place, (name, facts) in enumerate(_series(line).items()):
            x = number + (place - (len(names) - 1) / 2) * 0.8 / len(names)
            colour, mark = MARKS.get(name, (SOFT, "v"))
            low, first, middle, third, high = facts["ceiling"]["quantiles"]
            ax.plot([x, x], [low, high], color=colour, lw=0.7, zorder=1)
            ax.plot([x, x], [first, third], color=colour, lw=2.4, solid_capstyle="butt", zorder=2)
            label = visible(name) if number == 0 else None
            ax.plot(x, middle, mark, color=colour, ms=3.5, mec="white", mew=0.5, zorder=3, label=label)
    ax.set_yscale("function", functions=(np.sqrt, np.square))
    ax.set_ylim(1e-9, 1.7)  # room for the legend
    ax.set_yticks([0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1], ["0", ".01", ".05", ".1", ".2", ".4", ".6", ".8", "1"])
    _budget_axis(ax, found)
    ax.legend(fontsize=TEXT_POINTS, frameon=False, ncols=2, loc="upper right", handletextpad=0.3, columnspacing=0.8)
    _describe(ax, found, "bars: half and nine tenths of the rows", "keys kept", "ceiling (square-root scale)")
    return ax


def dropped_mass_auc(ceilings: Run | str | Path | Sequence[Run | str | Path], ax: Axes | None = None) -> Axes:
    """The AUC of dropped mass for `closable` with its interval, real and under each null: by budget.

    Of several runs, each of another model: by model, at the budget of the predictors.
    """
    asked = [ceilings] if isinstance(ceilings, (Run, str, Path)) else list(ceilings)
    if not asked:
        raise InputError("the AUC of no run was asked for", "give at least one")
    runs, several = [read_summary(run) for run in asked], len(asked) > 1
    ax = axes(ax)
    lines, ticks = runs[0]["budgets"], [str(line["budget"]) for line in runs[0]["budgets"]]
    if several:
        lines = [next(line for line in run["budgets"] if line["budget"] == run["predictor_budget"]) for run in runs]
        ticks = [f"{visible(run['model']['name'])}\n{run['predictor_budget']} kept" for run in runs]
    for place, name in enumerate(dict.fromkeys(name for line in lines for name in _series(line))):
        facts = [_series(line).get(name, {}).get("auc", dict.fromkeys(("mean", "low", "high"))) for line in lines]
        x = np.arange(len(facts)) + (place - 1.5) * 0.15
        colour, mark = MARKS.get(name, (SOFT, "v"))
        _with_interval(ax, x, facts, "mean", colour, mark, visible(name))
    ax.axhline(0.5, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.set_xticks(range(len(ticks)), ticks)
    ax.set_xlim(-0.6, len(ticks) - 0.4)
    ax.legend(fontsize=TEXT_POINTS, frameon=False, ncols=2, handletextpad=0.3, columnspacing=0.8)
    shown = "95 % interval over documents; dashed: chance"
    if several:
        describe(ax, [f"{len(runs)} models", shown], "", "AUC of dropped mass", TITLE_CHARACTERS)
    else:
        _describe(ax, runs[0], shown, "keys kept", "AUC of dropped mass")
    return ax


def predictors(ceilings: Run | str | Path, ax: Axes | None = None) -> Axes:
    """Dropped mass and its rivals: the AUC of each for `closable` over all rows, and within cells (open marks)."""
    found = read_summary(ceilings)
    ax = axes(ax)
    lines = found["predictors"][::-1]
    y = np.arange(len(lines))
    for name, prefix, face, shift in (
        ("over all rows", "", PLUS, 0.12),
        ("within cells", "within_cells_", "white", -0.12),
    ):
        auc, low, high = (_column(lines, f"{prefix}{end}") for end in ("auc", "low", "high"))
        ax.hlines(y + shift, low, high, color=PLUS, lw=1)
        ax.plot(auc, y + shift, "o", color=PLUS, mfc=face, ms=3.5, mew=0.8, label=name)
    ax.axvline(0.5, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.set_yticks(y, [visible(line["statistic"].replace("_", " ")) for line in lines])
    ax.legend(fontsize=TEXT_POINTS, frameon=False, loc="lower left", handletextpad=0.3)
    at = f"{found['predictor_budget']} keys kept, 95 % interval; dashed: chance"
    _describe(ax, found, at, "AUC for closable rows", "", width=35)
    return ax


def cell_map(ceilings: Run | str | Path, ax: Axes | None = None) -> Axes:
    """The median dropped mass of every layer and head; flat cells, above .25, have a dot."""
    found = read_summary(ceilings)
    ax = axes(ax)
    table = found["cells"]["table"]
    layer, head, dropped = (np.array([row[name] for row in table]) for name in ("layer", "head", "median_dropped_mass"))
    grid = np.full((int(head.max()) + 1, int(layer.max()) + 1), np.nan)
    grid[head, layer] = dropped
    image = ax.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower", interpolation="nearest")
    flat = dropped > FLAT
    ax.plot(layer[flat], head[flat], ".", color="white", ms=2.5, mec=INK, mew=0.3)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02)
    bar.ax.tick_params(labelsize=TEXT_POINTS, length=2)
    bar.outline.set_linewidth(0.4)
    shown = f"{found['predictor_budget']} keys kept; dot: flat, {found['cells']['n_flat']} of {found['cells']['n']}"
    _describe(ax, found, shown, "layer", "head")
    return ax


def free_weights(ceilings: Run | str | Path, ax: Axes | None = None) -> Axes:
    """By budget, pi: the best error under forced weights over that of free weights, beside what the paper has."""
    found = read_summary(ceilings)
    ax = axes(ax)
    budgets = [line["budget"] for line in found["budgets"]]
    x = np.arange(len(budgets))
    real = [line["real"] for line in found["budgets"]]
    _with_interval(ax, x - 0.08, [line["pi"] for line in real], "median", PLUS, "s", "free, the best set's keys")
    _with_interval(ax, x + 0.08, [line["pi_search"] for line in real], "median", MINUS, "o", "free, any keys")
    known = [number for number, budget in enumerate(budgets) if budget in PAPER_PI]
    ax.plot(known, [PAPER_PI[budgets[number]] for number in known], "x", color=INK, ms=4, label="paper, Qwen2.5-1.5B")
    ax.axhline(1, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    _budget_axis(ax, found)
    ax.legend(fontsize=TEXT_POINTS, frameon=False, handletextpad=0.3)
    _describe(ax, found, "medians of rows, 95 % interval", "keys kept", "forced over free error")
    return ax


def rule_excess(ceilings: Run | str | Path, ax: Axes | None = None) -> Axes:
    """By budget, how many times the best error each rule makes, and one set shared by a KV group."""
    found = read_summary(ceilings)
    ax = axes(ax)
    budgets = [str(line["budget"]) for line in found["budgets"]]
    shared = {"one set for a KV group": {budget: line["excess"] for budget, line in found["shared_sets"].items()}}
    series = {name.replace("_", " "): by_budget for name, by_budget in found["rules"].items()}
    series |= shared if found["shared_sets"] else {}
    styles = zip((PLUS, MINUS, "#009e73", INK, SOFT, "#cc79a7"), "sov^DP", strict=True)
    for number, ((name, by_budget), (colour, mark)) in enumerate(zip(series.items(), styles, strict=False)):
        x = np.arange(len(budgets)) + (number - 2.5) * 0.12
        _with_interval(ax, x, [by_budget[budget] for budget in budgets], "median", colour, mark, visible(name))
    ax.axhline(1, color=SOFT, lw=0.6, linestyle=(0, (2, 2)))
    ax.set_yscale("log")
    values = [float(one["median"]) for by_budget in series.values() for one in by_budget.values()]
    largest = max([16.0, *(value for value in values if np.isfinite(value))])
    ax.set_ylim(0.85, 5 * largest)  # room for the legend
    ticks = [2**n for n in range(int(np.log2(largest)) + 2)]
    ax.set_yticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    _budget_axis(ax, found)
    ax.legend(fontsize=TEXT_POINTS, frameon=False, handletextpad=0.3, ncols=2, columnspacing=0.8)
    _describe(ax, found, "medians of rows, 95 % interval", "keys kept", "error over the best")
    return ax


def _series(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"real": line["real"], **line["nulls"]}


def _describe(ax: Axes, found: Mapping[str, Any], shown: str, x: str, y: str, width: int = TITLE_CHARACTERS) -> None:
    """Nothing; says whose rows these are, how many, and what is shown."""
    model = found["model"]
    name = visible(model["name"] + (f" ({model['note']})" if model["note"] else ""))
    n = f"n = {found['n_rows']:,} rows of {counted(found['n_documents'], 'document')}"
    describe(ax, [name, n, shown], x, y, width)


def _with_interval(
    ax: Axes, x: np.ndarray, facts: list[dict[str, Any]], middle: str, colour: str, mark: str, label: str
) -> None:
    """Nothing; draws marks and intervals, and neither where it is unknown. An interval need not hold its mark."""
    values, low, high = (_column(facts, name) for name in (middle, "low", "high"))
    ax.vlines(x, low, high, color=colour, lw=1)
    ax.plot(x, values, mark, color=colour, ms=3.5, mec="white", mew=0.5, label=label)


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    """One number a row; NaN for what is unknown. What is infinite has no place on an axis either."""
    return np.array([np.nan if row[name] is None else float(row[name]) for row in rows])


def _budget_axis(ax: Axes, found: Mapping[str, Any]) -> None:
    budgets = [line["budget"] for line in found["budgets"]]
    ax.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
    ax.set_xlim(-0.6, len(budgets) - 0.4)
