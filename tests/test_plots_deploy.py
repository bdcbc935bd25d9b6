"""Does the figure of policies at work draw what was measured?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import made_runs
import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from kvlens import plots
from kvlens.errors import InputError
from kvlens.plots.deploy import draw_claims


@pytest.fixture(autouse=True)
def drawn_off_screen() -> Iterator[None]:
    with mpl.style.context("default"):
        plt.switch_backend("agg")
        yield
    plt.close("all")


def test_each_way_is_a_line_over_its_tokens() -> None:
    series = {"full cache": [2_000_000, 3_000_000, 4_000_000], "$policy_": [2_000_000, 1_500_000]}
    ax = plots.stored_bytes(series)
    assert [line.get_xdata().tolist() for line in ax.lines] == [[1, 2, 3], [1, 2]]
    assert [line.get_ydata().tolist() for line in ax.lines] == [[2.0, 3.0, 4.0], [2.0, 1.5]]
    assert ax.get_ylim()[0] == 0
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("generated tokens", "stored, MB")
    assert len({(line.get_color(), str(line.get_linestyle())) for line in ax.lines}) == 2
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(series)
    assert plots.stored_bytes(series, ["Mine"], ax=ax) is ax
    assert ax.get_title("left") == "Mine"


@pytest.mark.parametrize("series", [{}, {"full cache": []}])
def test_nothing_to_draw_is_said(series: dict[str, list[int]]) -> None:
    with pytest.raises(InputError, match="no stored bytes"):
        plots.stored_bytes(series)


ROWS = [
    {"method": "keynorm", "claimed_bytes": 50, "physical_bytes": 51, "full_bytes": 100, "simulated": False},
    {"method": "press $AdaKV_", "claimed_bytes": 50, "physical_bytes": 102, "full_bytes": 100, "simulated": True},
    {"method": "broken", "claimed_bytes": None, "physical_bytes": None, "full_bytes": None, "simulated": None},
]


def test_a_method_shows_what_it_claims_and_what_it_holds() -> None:
    ax = draw_claims(ROWS)
    drawn = [line for line in ax.lines if line.get_marker() in "oX" and len(line.get_xdata())]
    points = {
        (float(line.get_xdata()[0]), line.get_ydata()[0], line.get_marker(), line.get_markerfacecolor())
        for line in drawn
    }
    assert points == {
        (0.5, 1, "o", "white"),
        (0.51, 1, "o", plots.MINUS),
        (0.5, 0, "o", "white"),
        (1.02, 0, "X", plots.PLUS),
    }
    assert [label.get_text() for label in ax.get_yticklabels()] == ["press $AdaKV_", "keynorm"]
    with pytest.raises(InputError, match="no method"):
        draw_claims(ROWS[2:])


def test_what_is_no_audit_is_refused(tmp_path: Path) -> None:
    labels = made_runs.write(tmp_path / "run", {"apples": made_runs.APPLES}, {3: 2.0})
    with pytest.raises(InputError, match="no audit"):
        plots.claimed_and_held(labels)
