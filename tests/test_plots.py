"""Do the figures draw the run's numbers, say what they are, and stay legible at column width?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import made_runs
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from kvlens import plots
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.loading import Run, load

EFFECTS = {3: 2.0, 7: -1.5, 20: 0.75}
FORMULA = "$\\frac$"  # what matplotlib would fail to set
FORMULAS = (f"Pay {FORMULA} or $6_x^2$ then $6.\n", "So \\$ it $is then, and $7 more are left over.\n", "Pay $.")
LONG = {"name": "an-organisation/and-a-long-name-of-a-model-1.7B-Instruct", "fingerprint": "c0ffee", "note": "int8"}
# How the colours look to those who lack one kind of cone (Machado, Oliveira and Fernandes 2009), on linear RGB.
SIGHT = {
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.fixture(autouse=True)
def drawn_off_screen() -> Iterator[None]:
    with mpl.style.context("default"):
        plt.switch_backend("agg")
        yield
    plt.close("all")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load(made_runs.write(tmp_path / "run", {"apples": made_runs.APPLES, FORMULA: FORMULAS}, EFFECTS))


@pytest.fixture
def wide(tmp_path: Path) -> Run:
    """Windows of four tokens: positions 1 to 3 share theirs with the sink."""
    rows = made_runs.rows("apples", made_runs.APPLES, EFFECTS)
    starts = np.arange(0, 20, 4)
    effects = np.array([23.5, 2.0, -1.5, 0.1, 0.2])
    rows["windows"] |= {"window_start": starts, "window_end": starts + 4, "effect_nats": effects, "kl_nats": effects}
    rows["tokens"]["effect_nats"] = np.full(len(rows["tokens"]["pos"]), np.nan)
    rows["tokens"]["effect_nats"][:20] = effects.repeat(4)
    with made_runs.start(tmp_path / "wide", config={"intervention": "evict", "window": 4, "stride": 4}) as folder:
        for table, columns in rows.items():
            folder.write_part(table, "apples", columns)
        folder.finish({table: ["apples"] for table in rows})
    return load(tmp_path / "wide")


def bars(ax: Any) -> dict[float, Any]:
    """The bars by the position they are centred on."""
    (container,) = [found for found in ax.containers if isinstance(found, BarContainer)]
    return {bar.get_x() + bar.get_width() / 2: bar for bar in container}


def bands(ax: Any) -> list[Rectangle]:
    """What axhspan and axvspan drew."""
    inside = [bar for container in ax.containers for bar in container]
    return [patch for patch in ax.patches if patch not in inside]


def texts(ax: Any) -> list[Text]:
    """The texts of the figure, without tick labels beyond the limits of their axis."""
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    beyond = [text for text in ax.get_xticklabels() if not left <= text.get_position()[0] <= right]
    beyond += [text for text in ax.get_yticklabels() if not low <= text.get_position()[1] <= high]
    return [text for text in ax.figure.findobj(Text) if text.get_text().strip() and text not in beyond]


def words(ax: Any) -> str:
    return "\n".join(text.get_text() for text in texts(ax))


def test_every_labelled_token_is_a_bar_of_its_effect(run: Run) -> None:
    found = bars(plots.token_effects(run, "apples"))
    tokens = run.tokens[(run.tokens.trace_id == "apples") & run.tokens.effect_nats.notna() & (run.tokens.pos > 0)]
    assert {pos: bar.get_height() for pos, bar in found.items()} == dict(
        zip(tokens.pos, tokens.effect_nats, strict=True)
    )
    assert {bar.get_facecolor()[:3] for bar in found.values() if bar.get_height() > 0} == {to_rgb(plots.PLUS)}
    assert {bar.get_facecolor()[:3] for bar in found.values() if bar.get_height() < 0} == {to_rgb(plots.MINUS)}


def test_the_sink_is_a_number_and_not_a_bar(run: Run) -> None:
    ax = plots.token_effects(run, "apples")
    assert 0 not in bars(ax)
    assert -3 < ax.get_ylim()[0] < -1.5 < 2 < ax.get_ylim()[1] < 4
    assert "position 0: +23.5" in words(ax)


def test_what_shares_a_window_with_the_sink_stands_apart_with_it(wide: Run) -> None:
    ax = plots.token_effects(wide)
    assert sorted(bars(ax)) == list(range(4, 20))
    assert "positions 0 to 3: +23.5" in words(ax)
    assert "width 4, stride 4" in words(ax)
    assert "20 of" in words(ax)  # this run left context tokens out
    assert "(n = 23)" not in words(plots.effect_distribution(wide))
    assert sum(int(label.get_text().split("= ")[1][:-1]) for label in counted(plots.effect_distribution(wide))) == 16


def counted(ax: Any) -> list[Text]:
    return [text for text in ax.get_legend().get_texts() if "n = " in text.get_text()]


def test_segments_are_shaded_where_they_are_and_named(run: Run) -> None:
    ax = plots.token_effects(run, "apples")
    tokens = run.tokens[run.tokens.trace_id == "apples"]
    for segment, rows in tokens.groupby("segment"):
        (band,) = [band for band in bands(ax) if band.get_facecolor()[:3] == to_rgb(plots.SHADES[segment])]
        assert (band.get_x(), band.get_x() + band.get_width()) == (rows.pos.min() - 0.5, rows.pos.max() + 0.5)
        assert segment in [text.get_text() for text in texts(ax)]


def test_the_noise_floor_is_a_band_and_a_number(run: Run) -> None:
    noise = run.traces.noise_nats[0]
    along, across = plots.token_effects(run, "apples"), plots.effect_distribution(run)
    (band,) = [band for band in bands(along) if band.get_facecolor()[:3] == to_rgb(plots.NOISE)]
    assert (band.get_y(), band.get_y() + band.get_height()) == (-noise, noise)
    (band,) = [band for band in bands(across) if band.get_facecolor()[:3] == to_rgb(plots.NOISE)]
    assert (band.get_x(), band.get_x() + band.get_width()) == (0, noise)
    assert "2e-06 nats" in words(along)
    assert "2e-06 nats" in words(across)


def test_the_largest_effects_are_named_by_their_words(run: Run) -> None:
    ax = plots.token_effects(run, "apples")
    named = {text.xy[0]: text.get_text() for text in ax.texts if text.xy[0] in EFFECTS}
    pieces = made_runs.pieces("".join(made_runs.APPLES))
    assert pieces[3:5] == ["4", " apples"]
    assert named[3] == "14"  # the word that the token is a part of
    assert set(named) == {3, 20}  # 7 is too close to 3 for a name of its own


def test_the_distribution_is_the_share_of_tokens_above(run: Run) -> None:
    ax = plots.effect_distribution(run)
    tokens = run.tokens[run.tokens.effect_nats.notna() & (run.tokens.pos > 0)]
    assert [line.get_label() for line in ax.lines] == [
        f"{segment} (n = {(tokens.segment == segment).sum()})" for segment in ("prompt", "reasoning")
    ]
    for line, segment in zip(ax.lines, ("prompt", "reasoning"), strict=True):
        sizes = tokens.effect_nats[tokens.segment == segment].abs().to_numpy()
        steps = dict(zip(*line.get_data(), strict=True))  # equal sizes: the last step counts
        assert len(steps) > 5
        for x, share in steps.items():
            assert share == pytest.approx(np.mean(sizes > x))
    assert ax.get_xlim()[1] < 4  # the sink would need 23.5
    assert ax.get_xscale() == "symlog"
    assert ax.xaxis.get_transform().linthresh == run.traces.noise_nats.max()


@pytest.mark.parametrize("name", ["token_effects", "effect_distribution"])
def test_figures_say_what_they_show_and_fit_a_column(name: str, run: Run, wide: Run) -> None:
    for shown in (run, wide, Run(run.path, run.meta | {"model": LONG}, run.tables)):
        ax = getattr(plots, name)(shown)
        model = shown.meta["model"]
        said = "".join(words(ax).split())  # a long name is broken over lines
        for fact in (model["name"], "".join(f"({model['note']})".split()), "evict", "nats", "position"):
            assert fact in said
        figure = ax.figure
        figure.canvas.draw()
        assert figure.get_figwidth() <= 3.3
        assert min(text.get_fontsize() for text in texts(ax)) >= 7
        width, height = figure.canvas.get_width_height()
        for text in texts(ax):
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= width, text
            assert 0 <= box.y0 < box.y1 <= height, text


@pytest.mark.parametrize("name", ["token_effects", "effect_distribution"])
def test_axes_are_taken_and_returned(name: str, run: Run, tmp_path: Path) -> None:
    _, ax = plt.subplots()
    n_figures = len(plt.get_fignums())
    assert getattr(plots, name)(tmp_path / "run", ax=ax) is ax
    assert len(plt.get_fignums()) == n_figures


def test_a_formula_in_a_trace_is_text(run: Run) -> None:
    ax = plots.token_effects(run, FORMULA)
    ax.figure.canvas.draw()
    assert [text.get_text() for text in texts(ax)].count(FORMULA) == 1  # the word
    assert words(ax).count(FORMULA) == 2  # and in the title


def test_colours_stay_apart_whatever_cones_a_reader_has() -> None:
    def linear(colour: str) -> np.ndarray:
        parts = np.array(to_rgb(colour))
        return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)

    together = [(plots.PLUS, plots.MINUS), *combinations([colour for colour, _ in plots.LINES.values()], 2)]
    for one, other in together:
        for matrix in SIGHT.values():
            assert np.linalg.norm(np.array(matrix) @ (linear(one) - linear(other))) > 0.2
    assert len({str(dashes) for _, dashes in plots.LINES.values()}) == len(plots.LINES)


def test_what_cannot_be_drawn_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no trace 'aples'"):
        plots.token_effects(run, "aples")
    bare = Run(run.path, run.meta, run.tables | {"tokens": run.tokens.assign(effect_nats=np.nan)})
    for draw in (plots.token_effects, plots.effect_distribution):
        with pytest.raises(InputError, match="only position 0"):
            draw(bare)
    for name in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentLacks, match="matplotlib") as caught:
        plots.effect_distribution(run)
    assert ".[lens]" in caught.value.hint
