"""Does each figure follow from committed data, to the byte?"""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

import made_runs
import matplotlib as mpl
import pytest

FIGURES = Path(__file__).resolve().parent.parent / "figures"
SCRIPTS = sorted(FIGURES.glob("[0-9]*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_committed_figure_is_what_its_script_draws(script: Path, tmp_path: Path) -> None:
    svg = tmp_path / script.with_suffix(".svg").name
    runpy.run_path(str(script))["draw"](svg=svg)
    assert svg.read_bytes() == script.with_suffix(".svg").read_bytes(), "make figures"


def test_labels_figure_is_the_same_bytes_whatever_the_users_settings(tmp_path: Path) -> None:
    draw = runpy.run_path(str(FIGURES / "01_labels.py"))["draw"]
    labels = made_runs.write(tmp_path / "run", {"apples": made_runs.APPLES}, {3: 2.0, 7: -1.5})
    one, other = tmp_path / "one" / "figure.svg", tmp_path / "other" / "figure.svg"
    for svg in (one, other):
        svg.parent.mkdir()
    draw(labels, one, "apples")
    with mpl.rc_context({"lines.linewidth": 9, "font.size": 20, "svg.fonttype": "none"}):
        draw(labels, other, "apples")
    assert one.read_bytes() == other.read_bytes()
    assert b"date>" not in one.read_bytes()
    width = ET.parse(one).getroot().attrib["width"]
    assert float(width.removesuffix("pt")) == pytest.approx(2 * 3.3 * 72)
