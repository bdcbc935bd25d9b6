"""Does the figure of policies at work draw what was measured?"""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from kvlens import plots
from kvlens.errors import InputError


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
