"""Do the figures of bands, rankings and agreement draw the run's numbers, and stay legible at column width?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import made_signals
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from test_plots import SIGHT, texts, words

import kvlens
from kvlens import plots
from kvlens.discover.simulate import Simulated, simulate
from kvlens.errors import InputError
from kvlens.plots.discovery import TREND_LINES

DRAWN = {
    "layer_profile": "bands",
    "position_trend": "bands",
    "signal_ranking": "ranking",
    "label_agreement": "agreement",
}


@pytest.fixture(autouse=True)
def drawn_off_screen() -> Iterator[None]:
    with mpl.style.context("default"):
        plt.switch_backend("agg")
        yield
    plt.close("all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each verb; the signal has a positive band, and a negative one."""
    folder = tmp_path_factory.mktemp("runs")
    random = np.random.default_rng(0)
    worlds, more = [], []
    for signal, label in simulate(0, n_traces=14, n_layers=12, band=(3, 6), rho=0.3, n_tokens=(90, 120)):
        signal[:, 8:11] = -signal[:, 3:6] + 0.3 * random.normal(size=(len(label), 3))
        worlds.append(Simulated(signal, label))
        more.append(
            {
                "hidden_change": signal + np.linspace(0, 5, len(label))[:, None],
                "hidden_change_z": random.normal(size=signal.shape),
                "surprisal": label + random.normal(size=len(label)),
                "age": np.arange(len(label))[::-1].astype(float),
                "attention_mass": random.normal(size=signal.shape),
            }
        )
    changes = {"model": {"name": "an-organisation/a-long-name-of-a-model-1.7B", "fingerprint": "f", "note": "int8"}}
    labels = made_signals.labels(folder / "labels", [world.label for world in worlds], **changes)
    traces = {}
    for number, (world, columns) in enumerate(zip(worlds, more, strict=True)):
        found = {"hidden_change_rolling": world.signal, **columns}
        traces[made_signals.trace_id(number)] = {n: made_signals.with_prompt(v) for n, v in found.items()}
    signals = made_signals.signals(folder / "signals", traces, **changes)
    other = made_signals.labels(
        folder / "other", [w.label + random.normal(size=len(w.label)) for w in worlds], **changes, seed=3
    )
    kvlens.bands(labels, signals, folder / "bands")
    kvlens.signals(labels, signals, folder / "ranking")
    kvlens.compare_labels(labels, other, folder / "agreement")
    return folder


def test_the_profile_is_the_mean_of_each_layer_with_its_interval(folder: Path) -> None:
    found = kvlens.load(folder / "bands").documents["bands"]["layers"]
    ax = plots.layer_profile(folder / "bands")
    (points,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert points.get_xdata().tolist() == list(range(12))
    assert points.get_ydata() == pytest.approx([layer["mean_rho"] for layer in found])
    (bars,) = [child for child in ax.collections if isinstance(child, LineCollection)]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([layer["low"], layer["high"]]) for layer in found]


def test_confirmed_bands_are_shaded_where_they_are_by_their_sign(folder: Path) -> None:
    bands = kvlens.load(folder / "bands").documents["bands"]["bands"]
    assert [(band["sign"], band["confirmed"]) for band in bands] == [(1, True), (-1, True)]
    ax = plots.layer_profile(folder / "bands" / "bands.json")
    shaded = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in shaded] == [
        (band["start"] - 0.5, band["stop"] - 0.5) for band in bands
    ]
    assert [patch.get_facecolor()[:3] for patch in shaded] == [to_rgb(plots.PLUS), to_rgb(plots.MINUS)]
    assert [patch.get_hatch() for patch in shaded] == [None, "////"]
    assert "n = 14 traces, shaded: confirmed bands" in words(ax)


def test_a_band_that_is_not_confirmed_is_an_outline(tmp_path: Path) -> None:
    pair = made_signals.planted(tmp_path, n_traces=10)
    run = kvlens.bands(*pair, tmp_path / "out")
    (band,) = run.documents["bands"]["bands"]
    ax = plots.layer_profile(run)
    assert not ax.patches
    edges = [line.get_xdata()[0] for line in ax.lines if line.get_color() == plots.PLUS]
    assert edges == [band["start"] - 0.5, band["stop"] - 0.5]
    assert "no band confirmed" in words(ax)


def test_the_trend_has_a_line_a_signal(folder: Path) -> None:
    found = kvlens.load(folder / "bands").documents["bands"]["position_trend"]
    ax = plots.position_trend(folder / "bands")
    lines = {line.get_label(): line.get_ydata() for line in ax.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["hidden_change", "hidden_change_z", "hidden_change_rolling"]
    for name, values in lines.items():
        assert values == pytest.approx([row["mean_rho"] for row in found[name]])
    assert ax.get_ylim() == (-1, 1)


def test_signals_stand_by_rank_with_their_interval_and_their_kind(folder: Path) -> None:
    rows = kvlens.load(folder / "ranking").ranking
    rows = rows[(rows.choice != "each layer") & rows.rho.notna()]
    ax = plots.signal_ranking(folder / "ranking")
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert [name.split(",")[0] for name in names] == rows.signal.tolist()
    assert len(rows) == 5  # age has no rank correlation of its own
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    points = [line for line in ax.lines if line.get_marker() == "o"]
    for point, row in zip(points, rows.itertuples(), strict=True):
        assert point.get_xdata() == pytest.approx([row.rho])
        assert to_rgb(point.get_markeredgecolor()) == to_rgb(plots.PLUS if row.rho > 0 else plots.MINUS)
        assert (to_rgb(point.get_markerfacecolor()) == (1, 1, 1)) == (row.signal == "attention_mass")
    spans = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2 and line.get_marker() == "None"]
    assert [list(span) for span in spans[-5:]] == [pytest.approx([r.rho_low, r.rho_high]) for r in rows.itertuples()]


def test_agreement_shows_each_trace_the_mean_and_chance(folder: Path) -> None:
    run = kvlens.load(folder / "agreement")
    ax = plots.label_agreement(folder / "agreement")
    clouds = [line.get_ydata() for line in ax.lines if len(line.get_ydata()) == 14]
    names = ("spearman", "top_tenth_overlap", "sign_agreement")
    for cloud, name in zip(clouds, names, strict=True):
        assert cloud.tolist() == run.agreement[name].tolist()
    means = [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "s"]
    assert means == pytest.approx([run.documents["agreement"][name]["mean"] for name in names])
    assert "seed: 0 and 3" in words(ax)


@pytest.mark.parametrize("name", DRAWN)
def test_figures_say_what_they_show_and_fit_a_column(name: str, folder: Path) -> None:
    ax = getattr(plots, name)(kvlens.load(folder / DRAWN[name]))
    said = "".join(words(ax).split())
    assert "n=" in said
    if name != "label_agreement":
        assert "an-organisation/a-long-name-of-a-model-1.7B(int8)" in said
    figure = ax.figure
    figure.canvas.draw()
    assert figure.get_figwidth() <= 3.3
    assert min(text.get_fontsize() for text in texts(ax)) >= 7
    width, height = figure.canvas.get_width_height()
    for text in texts(ax):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width, text
        assert 0 <= box.y0 < box.y1 <= height, text


@pytest.mark.parametrize("name", DRAWN)
def test_axes_are_taken_and_returned_and_other_runs_refused(name: str, folder: Path) -> None:
    _, ax = plt.subplots()
    assert getattr(plots, name)(folder / DRAWN[name], ax=ax) is ax
    for other in {"labels", "bands", "ranking", "agreement"} - {DRAWN[name]}:
        with pytest.raises(InputError):
            getattr(plots, name)(folder / other)


def test_the_trend_colours_stay_apart_whatever_cones_a_reader_has() -> None:
    def linear(colour: str) -> Any:
        parts = np.array(to_rgb(colour))
        return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)

    for one, other in combinations([colour for colour, _ in TREND_LINES], 2):
        for matrix in SIGHT.values():
            assert np.linalg.norm(np.array(matrix) @ (linear(one) - linear(other))) > 0.2
    assert len({str(dashes) for _, dashes in TREND_LINES}) == len(TREND_LINES)
