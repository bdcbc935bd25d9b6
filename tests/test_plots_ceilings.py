"""Do the figures of a ceilings run draw the run's numbers, and stay legible at column width?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import tiny_runs
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from test_plots import texts, words

import kvlens
from kvlens import plots
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.plots.ceilings import MARKS, PAPER_PI

DRAWN = ("ceiling_distribution", "dropped_mass_auc", "predictors", "cell_map", "free_weights", "rule_excess")
SERIES = ("real", "permuted", "gaussian", "rank 4")


@pytest.fixture(autouse=True)
def drawn_off_screen() -> Iterator[None]:
    with mpl.style.context("default"):
        plt.switch_backend("agg")
        yield
    plt.close("all")


def model() -> Model:
    long = {"name": "an-organisation/a-long-name-of-a-model-1.7B", "note": "int8"}
    return dataclasses.replace(tiny_runs.model(max_position_embeddings=64), **long)


def measure(out: Path, **asked: Any) -> Path:
    traces = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
    traces.append(dataclasses.replace(traces[0], id="third", prompt=traces[1].prompt, spans=()))
    usual = {"budgets": (2, 4), "rows_per_head": 3}
    return Path(kvlens.ceilings(traces, model(), out, **usual | asked).path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One document, one budget, no nulls, no groups: nothing has an interval."""
    out = tmp_path_factory.mktemp("runs") / "small"
    alone = tiny_runs.model(num_key_value_heads=4)
    trace = tiny_runs.as_trace(tiny_runs.SUM)
    return Path(kvlens.ceilings([trace], alone, out, budgets=[3], rows_per_head=3, nulls="none").path)


def summary(folder: Path) -> dict[str, Any]:
    return kvlens.load(folder).documents["summary"]


def labelled(ax: Any) -> dict[str, Any]:
    """The marks that the legend names."""
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def spans(ax: Any, along: int) -> list[list[list[float]]]:
    """The ends of the intervals of every series, along that axis; without those that are not known."""
    found = [child for child in ax.collections if isinstance(child, LineCollection)]
    return [[segment[:, along].tolist() for segment in one.get_segments() if len(segment)] for one in found]


def ends(rows: list[dict[str, Any]], low: str = "low", high: str = "high") -> list[Any]:
    return [pytest.approx([row[low], row[high]]) for row in rows]


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    found = summary(folder)
    change(found)
    (to / "summary.json").write_text(json.dumps(found))
    return to / "summary.json"


# What is drawn


def test_the_distribution_is_the_quantiles_of_real_rows_and_nulls(folder: Path, tmp_path: Path) -> None:
    def spread(found: dict[str, Any]) -> None:  # few rows have several quantiles at 0
        for number, line in enumerate(found["budgets"]):
            for place, facts in enumerate(both(line).values()):
                facts["ceiling"]["quantiles"] = [0.1 * i + 0.01 * place + 0.05 * number for i in range(5)]

    file = changed(folder, tmp_path, spread)
    ax = plots.ceiling_distribution(file)
    found = json.loads(file.read_text())["budgets"]
    marks = [line for line in ax.lines if line.get_marker() != "None"]
    bars = [line for line in ax.lines if line.get_marker() == "None"]
    assert len(marks) == len(bars) / 2 == 8
    wanted = [(number, name, facts) for number, line in enumerate(found) for name, facts in both(line).items()]
    for place, (number, name, facts) in enumerate(wanted):
        quantiles = facts["ceiling"]["quantiles"]
        outer, inner = bars[2 * place : 2 * place + 2]
        assert list(outer.get_ydata()) == [quantiles[0], quantiles[4]]
        assert list(inner.get_ydata()) == [quantiles[1], quantiles[3]]
        assert outer.get_linewidth() < inner.get_linewidth()
        assert marks[place].get_ydata() == quantiles[2]
        assert round(float(marks[place].get_xdata()[0])) == number
        assert (marks[place].get_color(), marks[place].get_marker()) == MARKS[name]
    assert list(labelled(ax)) == [*SERIES]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4"]
    assert len({float(mark.get_xdata()[0]) for mark in marks}) == 8  # side by side
    for line in summary(folder)["budgets"]:
        for facts in both(line).values():
            assert facts["ceiling"]["quantiles"][2] == pytest.approx(facts["ceiling"]["median"], abs=1e-6)


def both(line: dict[str, Any]) -> dict[str, Any]:
    return {"real": line["real"]} | line["nulls"]


def test_the_auc_of_each_budget_has_its_interval(folder: Path) -> None:
    found = summary(folder)["budgets"]
    ax = plots.dropped_mass_auc(folder)
    assert list(labelled(ax)) == [*SERIES]
    for (name, marks), intervals in zip(labelled(ax).items(), spans(ax, 1), strict=True):
        aucs = [both(line)[name]["auc"] for line in found]
        assert marks.get_ydata() == pytest.approx([auc["mean"] for auc in aucs])
        assert intervals == ends(aucs)
        assert np.round(marks.get_xdata()).tolist() == [0, 1]
    (chance,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert list(chance.get_ydata()) == [0.5, 0.5]


def test_the_auc_of_several_models_stands_at_each_ones_budget(folder: Path, small: Path) -> None:
    ax = plots.dropped_mass_auc([folder, kvlens.load(small)])
    one, other = (summary(given)["budgets"][-1] for given in (folder, small))  # 4 and 3 keys
    assert list(labelled(ax)) == [*SERIES]
    for (name, marks), intervals in zip(labelled(ax).items(), spans(ax, 1), strict=True):
        means = [both(line)[name]["auc"]["mean"] if name in both(line) else np.nan for line in (one, other)]
        assert marks.get_ydata() == pytest.approx(means, nan_ok=True)
        assert intervals == ends([both(one)[name]["auc"]])
    said = [label.get_text().splitlines() for label in ax.get_xticklabels()]
    assert said == [["an-organisation/a-long-name-of-a-model-1.7B", "4 kept"], ["tiny", "3 kept"]]
    assert "2 models" in words(ax)
    with pytest.raises(InputError, match="no run"):
        plots.dropped_mass_auc([])
    with pytest.raises(InputError):
        plots.dropped_mass_auc([folder, folder / "nowhere"])


def test_predictors_stand_by_rank_over_rows_and_within_cells(folder: Path) -> None:
    found = summary(folder)["predictors"]
    ax = plots.predictors(folder)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [line["statistic"].replace("_", " ") for line in found[::-1]]
    over, within = labelled(ax).values()
    assert list(labelled(ax)) == ["over all rows", "within cells"]
    for marks, intervals, prefix in zip((over, within), spans(ax, 0), ("", "within_cells_"), strict=True):
        assert marks.get_xdata() == pytest.approx([line[f"{prefix}auc"] for line in found[::-1]])
        assert np.round(marks.get_ydata()).tolist() == list(range(8))
        assert intervals == ends(found[::-1], f"{prefix}low", f"{prefix}high")
    assert to_rgb(over.get_markerfacecolor()) == to_rgb(plots.PLUS)
    assert to_rgb(within.get_markerfacecolor()) == (1, 1, 1)


def test_the_map_shows_each_cell_and_a_dot_where_it_is_flat(folder: Path) -> None:
    cells = kvlens.load(folder).cells
    ax = plots.cell_map(folder)
    (image,) = ax.images
    grid = image.get_array()
    assert grid.shape == (4, 3)
    for cell in cells.itertuples():
        assert grid[cell.head, cell.layer] == pytest.approx(cell.median_dropped_mass)
    (dots,) = [line for line in ax.lines if line.get_marker() == "."]
    flat = cells[cells.flat]
    assert sorted(zip(*dots.get_data(), strict=True)) == sorted(zip(flat["layer"], flat["head"], strict=True))
    assert f"flat, {len(flat)} of 12" in words(ax)
    assert image.get_clim() == (0, 1)


def test_free_weights_stand_beside_the_papers(folder: Path) -> None:
    found = [line["real"] for line in summary(folder)["budgets"]]
    ax = plots.free_weights(folder)
    own, search, paper = labelled(ax).values()
    for marks, intervals, name in zip((own, search), spans(ax, 1), ("pi", "pi_search"), strict=True):
        assert marks.get_ydata() == pytest.approx([line[name]["median"] for line in found])
        assert intervals == ends([line[name] for line in found])
    assert (list(paper.get_xdata()), list(paper.get_ydata())) == ([1], [PAPER_PI[4]])  # 2 is no budget of the paper


def test_rules_and_shared_sets_are_drawn_over_the_best(folder: Path) -> None:
    found = summary(folder)
    ax = plots.rule_excess(folder)
    shared = {"one set for a KV group": {budget: line["excess"] for budget, line in found["shared_sets"].items()}}
    wanted = {name.replace("_", " "): by_budget for name, by_budget in found["rules"].items()} | shared
    assert list(labelled(ax)) == list(wanted)
    for (name, marks), intervals in zip(labelled(ax).items(), spans(ax, 1), strict=True):
        facts = [wanted[name][budget] for budget in ("2", "4")]
        assert marks.get_ydata() == pytest.approx([one["median"] for one in facts])
        assert intervals == ends(facts)
    assert len({line.get_marker() for line in labelled(ax).values()}) == len(wanted) == 6


# What is not there


@pytest.mark.parametrize("name", DRAWN)
def test_one_document_one_budget_and_no_nulls_are_drawn_without_intervals(name: str, small: Path) -> None:
    found = summary(small)
    assert found["shared_sets"] == found["budgets"][0]["nulls"] == {}
    assert found["budgets"][0]["real"]["auc"]["low"] is None
    ax = getattr(plots, name)(small)
    ax.figure.canvas.draw()
    if name != "cell_map":  # whose colour bar has lines of its own
        assert not any(spans(ax, 1))
    said = " ".join(words(ax).split())
    assert "36 rows of 1 document" in said
    assert "documents" not in said.replace("over documents", "")
    if name in ("ceiling_distribution", "dropped_mass_auc"):
        assert list(labelled(ax)) == ["real"]
        assert [label.get_text() for label in ax.get_xticklabels()] == ["3"]
    if name == "rule_excess":
        assert "one set for a KV group" not in labelled(ax)
    if name == "free_weights":
        assert not len(labelled(ax)["paper, Qwen2.5-1.5B"].get_xdata())


def test_an_interval_beside_its_mark_and_infinite_medians_are_no_error(folder: Path, tmp_path: Path) -> None:
    """A bootstrap's interval need not hold the number of the sample itself."""

    def odd(found: dict[str, Any]) -> None:
        real = found["budgets"][0]["real"]
        real["auc"] |= {"mean": 0.5, "low": 0.6, "high": 0.7}
        real["pi"] |= {"median": "inf", "low": 1.5, "high": "inf"}
        found["rules"]["random"]["2"] |= {"median": "inf", "low": "inf", "high": "inf"}
        found["predictors"][0] |= {"auc": 0.5, "low": 0.6, "high": 0.7}

    file = changed(folder, tmp_path, odd)
    for name in DRAWN:
        getattr(plots, name)(file).figure.canvas.draw()
    ax = plots.dropped_mass_auc(file)
    assert labelled(ax)["real"].get_ydata()[0] == 0.5
    assert spans(ax, 1)[0][0] == [0.6, 0.7]
    own = next(iter(labelled(plots.free_weights(file)).values()))
    assert np.isfinite(own.get_ydata()).tolist() == [False, True]


# As every figure


@pytest.mark.parametrize("name", DRAWN)
def test_run_folder_and_summary_draw_the_same_and_axes_are_taken_and_returned(name: str, folder: Path) -> None:
    draw = getattr(plots, name)
    drawn = []
    for given in (kvlens.load(folder), folder, str(folder), folder / "summary.json"):
        _, ax = plt.subplots()
        assert draw(given, ax=ax) is ax
        data = [np.asarray(line.get_xydata()).tolist() for line in ax.lines]
        drawn.append(json.dumps([data, spans(ax, 0), spans(ax, 1), words(ax)]))
    assert len(set(drawn)) == 1


@pytest.mark.parametrize("name", DRAWN)
def test_figures_say_what_they_show_and_fit_a_column(name: str, folder: Path) -> None:
    ax = getattr(plots, name)(folder)
    said = "".join(words(ax).split())
    assert "an-organisation/a-long-name-of-a-model-1.7B(int8)" in said
    assert "n=108rowsof3documents" in said
    figure = ax.figure
    figure.canvas.draw()
    assert figure.get_figwidth() <= 3.3
    assert min(text.get_fontsize() for text in texts(ax)) >= 7
    width, height = figure.canvas.get_width_height()
    for text in texts(ax):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width, text
        assert 0 <= box.y0 < box.y1 <= height, text


def write(content: str) -> Callable[[Path], Path]:
    def write_to(folder: Path) -> Path:
        (folder / "summary.json").write_text(content)
        return folder / "summary.json"

    return write_to


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(
    "make",
    [
        write(""),
        write("{"),
        write("[]"),
        write("null"),
        write('{"schema": "kvlens.bands/1"}'),
        write('{"schema": "kvlens.ceilings/1"}'),
        write('{"schema": "kvlens.ceilings/1", "budgets": []}'),
        lambda folder: folder,  # no summary.json in it
        lambda folder: folder / "nowhere",
        lambda folder: kvlens.observe(
            [tiny_runs.as_trace(tiny_runs.SUM)], tiny_runs.model(), folder / "signals", signals="age"
        ),
    ],
)
def test_what_is_no_ceilings_run_is_refused_in_one_line(name: str, make: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        getattr(plots, name)(make(tmp_path))
    assert caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_another_documents_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    file = changed(folder, tmp_path, lambda found: found.update(schema="kvlens.ceilings/2"))
    with pytest.raises(InputError, match="no summary of ceilings"):
        plots.free_weights(file)


def test_runs_stacked_are_no_single_run(folder: Path, small: Path) -> None:
    with pytest.raises(InputError, match="no summary of ceilings"):
        plots.cell_map(kvlens.load([folder, small]))
