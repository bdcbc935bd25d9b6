"""Do the figures of a run of surprise draw what stays and how stale a score gets, and fit a column?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_runs
import made_surprise
import matplotlib as mpl
import numpy as np
import pytest
from made_surprise import APPLES, HOSTILE, Made, long
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from test_plots import FORMULA, LONG, texts, words

from kvlens import plots
from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.plots.surprise import COLOURS, MARKS
from kvlens.stats import over_traces
from kvlens.surprise_facts import staleness

DRAWN = ("kept_tokens", "score_staleness")
STAYS, LEAVES, NOTHING = to_rgb(plots.MINUS), to_rgb(plots.PLUS), (1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def drawn_off_screen() -> Iterator[None]:
    with mpl.style.context("default"):
        plt.switch_backend("agg")
        yield
    plt.close("all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    traces = {"apples": APPLES, FORMULA: HOSTILE} | {f"long {number}": long(number) for number in range(4)}
    return made_surprise.write(tmp_path_factory.mktemp("runs") / "run", traces, model=LONG)


@pytest.fixture
def run(folder: Path) -> Run:
    return load(folder)


def cells(ax: Any) -> np.ndarray:
    """What colour stands at each refresh and position: 0 none, 1 stays, 2 leaves."""
    (image,) = ax.images
    found = np.asarray(image.get_array())
    kinds = np.stack([np.isclose(found, colour).all(-1) for colour in (NOTHING, STAYS, LEAVES)])
    assert (kinds.sum(0) == 1).all()
    return kinds.argmax(0)


# What stays


def test_each_refresh_shows_what_stays_and_what_leaves(run: Run) -> None:
    ax = plots.kept_tokens(run)
    assert cells(ax).tolist() == [
        [1, 1, 2, 1, 1, 2, 2, 1, 0, 0, 0, 0],
        [1, 2, 0, 1, 2, 0, 0, 2, 1, 1, 2, 1],
    ]
    (image,) = ax.images
    assert np.isclose(np.asarray(image.get_array())[1, 2], NOTHING).all()
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"stays", "evicted", "gone, or to come"}
    named = {line.get_label(): to_rgb(line.get_color()) for line in ax.lines}
    assert named == {"stays": STAYS, "evicted": LEAVES, "gone, or to come": NOTHING}
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # downwards
    assert image.get_extent()[0] == -0.5


@pytest.mark.parametrize("variant", ["full", "fast"])
@pytest.mark.parametrize("trace_id", ["apples", "long 2"])
def test_the_trace_and_variant_asked_for_are_drawn(run: Run, trace_id: str, variant: str) -> None:
    found = cells(plots.kept_tokens(run, trace_id, variant))
    steps = run.refreshes[(run.refreshes.trace_id == trace_id) & (run.refreshes.variant == variant)]
    wanted = np.zeros_like(found)
    for row in steps.itertuples():
        wanted[row.refresh, row.pos] = 1 if row.kept else 2
    assert found.tolist() == wanted.tolist()
    assert (found == 2).any(axis=1).all()


def test_what_is_drawn_is_said(run: Run) -> None:
    said = words(plots.kept_tokens(run, "long 1", "fast"))
    for part in ("long 1", "fast: 4 + 1 tokens held", "every 4", "position in the trace", "refresh"):
        assert part in " ".join(said.split())


# Staleness


def marks(ax: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def intervals(ax: Any) -> list[list[list[float]]]:
    return [
        [segment[:, 1].tolist() for segment in one.get_segments()]
        for one in ax.collections
        if isinstance(one, LineCollection)
    ]


def test_staleness_is_the_mean_over_traces_with_its_interval(run: Run) -> None:
    ax = plots.score_staleness(run)
    assert list(marks(ax)) == ["full", "fast"]
    for number, (variant, line) in enumerate(marks(ax).items()):
        rows = staleness(run, variant)
        assert rows.trace_id.nunique() == 4  # the two short ones have no pair of refreshes to compare
        groups = [part.rho.to_numpy() for _, part in rows.groupby("apart")]
        wanted = [over_traces(values, seed=0) for values in groups]
        assert len(wanted) > 1
        assert line.get_ydata() == pytest.approx([float(one.mean) for one in wanted])
        assert line.get_ydata() == pytest.approx([values.mean() for values in groups])
        assert np.round(line.get_xdata()).tolist() == sorted(rows.apart.unique())
        for drawn, one in zip(intervals(ax)[number], wanted, strict=True):
            assert drawn == pytest.approx([float(one.low), float(one.high)])
        assert (line.get_color(), line.get_marker()) == (COLOURS[number], MARKS[number])


def test_several_variants_stand_side_by_side(tmp_path: Path) -> None:
    names = [
        "full",
        "fast",
        "layers=2",
        "full,logprob",
        "full,no_self",
        "full,past",
        "full,gap=2",
        "layers=3",
        "full,clause",
        "full,sentence",
        "full,gap=1",
        "fast,past",
    ]
    one = long(3)
    made = Made(one.tokens, 20, dict.fromkeys(names, one.scores["full"]), dict.fromkeys(names, one.steps["full"]))
    ax = plots.score_staleness(made_surprise.write(tmp_path / "run", {"a": made, "b": made}))
    assert list(marks(ax)) == names
    first = [float(line.get_xdata()[0]) for line in marks(ax).values()]
    assert first == sorted(set(first))
    assert {round(x) for x in first} == {1}  # never under another distance's number
    kinds = [(line.get_color(), line.get_marker()) for line in marks(ax).values()]
    assert len(set(kinds)) == len(names)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == names


# As every figure


@pytest.mark.parametrize("name", DRAWN)
def test_run_and_folder_draw_the_same_and_axes_are_taken_and_returned(name: str, folder: Path) -> None:
    drawn = []
    for given in (load(folder), folder, str(folder)):
        _, ax = plt.subplots()
        n_figures = len(plt.get_fignums())
        assert getattr(plots, name)(given, ax=ax) is ax
        assert len(plt.get_fignums()) == n_figures
        drawn.append(str([[line.get_xydata().tolist() for line in ax.lines], intervals(ax), words(ax)]))
    assert len(set(drawn)) == 1


@pytest.mark.parametrize(("name", "trace"), [("kept_tokens", {"trace_id": FORMULA}), ("score_staleness", {})])
def test_figures_say_what_they_show_and_fit_a_column(name: str, trace: dict[str, str], folder: Path) -> None:
    ax = getattr(plots, name)(folder, **trace)
    figure = ax.figure
    figure.canvas.draw()
    said = "".join(words(ax).split())
    assert "an-organisation/and-a-long-name-of-a-model-1.7B-Instruct(int8)" in said
    assert "float32" in said
    assert "refresh" in said
    assert figure.get_figwidth() <= 3.3
    assert min(text.get_fontsize() for text in texts(ax)) >= 7
    width, height = figure.canvas.get_width_height()
    for text in texts(ax):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width, text
        assert 0 <= box.y0 < box.y1 <= height, text


@pytest.mark.parametrize("name", DRAWN)
def test_what_has_no_refreshes_is_refused(name: str, tmp_path: Path, folder: Path) -> None:
    draw = getattr(plots, name)
    bare = made_surprise.write(tmp_path / "bare", {"apples": APPLES}, cycle=None)
    with pytest.raises(InputError, match="no refreshes to draw") as caught:
        draw(bare)
    assert "-J" in caught.value.hint
    labels = made_runs.write(tmp_path / "labels", {"apples": made_runs.APPLES})
    for other in (labels, load([folder, made_surprise.write(tmp_path / "other", {"apples": APPLES})])):
        with pytest.raises(InputError, match="no single run of surprise"):
            draw(other)
    with pytest.raises(InputError):
        draw(tmp_path / "nowhere")


def test_names_that_are_none_are_refused(run: Run) -> None:
    with pytest.raises(InputError, match="no trace 'aples'"):
        plots.kept_tokens(run, "aples")
    with pytest.raises(InputError, match="no variant 'past'") as caught:
        plots.kept_tokens(run, "apples", "past")
    assert "full; fast" in caught.value.hint


@pytest.mark.parametrize("name", DRAWN)
def test_traces_too_short_for_what_is_drawn_are_refused(name: str, tmp_path: Path) -> None:
    still = Made(APPLES.tokens, 6, APPLES.scores, {"full": [], "fast": []})
    with pytest.raises(InputError) as caught:
        getattr(plots, name)(made_surprise.write(tmp_path / "run", {"apples": still}))
    assert caught.value.hint
