"""`kvlens bands`, `signals` and `compare-labels` as commands: three forms of answer, exit codes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import made_signals
import numpy as np
import pytest

import kvlens
from kvlens.cli import app
from kvlens.discover.simulate import simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    worlds = simulate(3, n_traces=14, n_layers=8, band=(3, 6), rho=0.33, n_tokens=(90, 120))
    more = [{"surprisal": world.label + np.random.default_rng(0).normal(size=len(world.label))} for world in worlds]
    made_signals.pair(folder, worlds, more)
    made_signals.labels(folder / "other", [world.label**3 for world in worlds], dtype="bfloat16")
    return folder


WORDS = {
    "bands": ["{folder}/labels", "{folder}/signals"],
    "signals": ["{folder}/labels", "{folder}/signals"],
    "compare-labels": ["{folder}/labels", "{folder}/other"],
}


def words(verb: str, folder: Path, out: Path, *more: str) -> list[str]:
    return [verb, *(word.replace("{folder}", str(folder)) for word in WORDS[verb]), "-o", str(out), *more]


def test_bands_for_people(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    assert app.main(words("bands", folder, tmp_path / "out", "--compare", str(folder / "none"))) == 2
    capsys.readouterr()
    assert app.main(words("bands", folder, tmp_path / "out")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "hidden_change_rolling against evict labels" in lines["signal"]
    assert "made-up (Q4_1, dequantised), 8 layers" in lines["model"]
    assert "14 (7 to discover, 7 to confirm)" in lines["traces"]
    assert lines["[3, 6)"].split()[2:5] == ["0.38", "to", "0.75"]
    assert lines["[3, 6)"].endswith("yes")
    assert "bands: 1 found in 7 traces, 1 confirmed in 7 others" in lines["verdict"]
    assert out.splitlines()[-1].split() == ["run", str(tmp_path / "out")]


def test_bands_says_whether_they_moved(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    assert app.main(words("bands", folder, tmp_path / "a", "--quiet")) == 0
    assert app.main(words("bands", folder, tmp_path / "b", "--compare", str(tmp_path / "a"))) == 0
    out = capsys.readouterr().out
    assert "positive band: no, centre +0.00 of the depth [+0.00, +0.00] against" in out
    assert "negative band: cannot say (no negative band in this run and the other)" in out


def test_no_band_is_an_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made_signals.pair(tmp_path, simulate(1, n_traces=12, n_layers=6, rho=0.0, band=(0, 0), n_tokens=(90, 120)))
    assert app.main(words("bands", tmp_path, tmp_path / "out")) == 0
    assert "no band: none found in 6 traces" in capsys.readouterr().out


def test_signals_for_people(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    assert app.main(words("signals", folder, tmp_path / "out")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines() if line.startswith(("hidden", "surprisal"))]
    assert [row[0] for row in rows] == ["surprisal", "hidden_change_rolling"]
    assert rows[1][1] in "345"
    assert [row[-1] for row in rows] == ["yes", "yes"]
    assert "1 streaming signal," in out
    assert "nan" not in out


def test_compare_labels_for_people(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    assert app.main(words("compare-labels", folder, tmp_path / "out")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "dtype: float32 and bfloat16" in out
    assert "rank agreement (Spearman)             1.00  [1.00, 1.00]" in out
    assert "traces        14," in out


@pytest.mark.parametrize(
    ("verb", "keys"),
    [
        ("bands", {"run", "verdict", "bands", "layers", "n_traces"}),
        ("signals", {"run", "ranking", "fitted", "counts"}),
        ("compare-labels", {"run", "spearman", "differences", "n_traces"}),
    ],
)
def test_json_is_one_document_and_quiet_the_path(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, verb: str, keys: set[str]
) -> None:
    assert app.main(words(verb, folder, tmp_path / "out", "--json")) == 0
    out, err = capsys.readouterr()
    document = json.loads(out, parse_constant=pytest.fail)
    assert err == ""
    assert keys <= set(document)
    assert document["run"] == str(tmp_path / "out")
    assert app.main(words(verb, folder, tmp_path / "out", "--json")) == 0  # the finished run answers the same
    assert json.loads(capsys.readouterr().out) == document
    assert app.main(words(verb, folder, tmp_path / "out", "--quiet")) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'out'}\n", "")


@pytest.mark.parametrize("verb", list(WORDS))
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("{folder}/nowhere", "{folder}/other", "no such folder"),
        ("{folder}/signals", "{folder}/labels", "is given as"),
        ("{folder}/signals", "{folder}/signals", "is given as"),
    ],
)
def test_bad_runs_are_2(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, verb: str, first: str, second: str, message: str
) -> None:
    given = [word.replace("{folder}", str(folder)) for word in (first, second)]
    assert app.main([verb, *given, "-o", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["error", "hint"]
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", list(WORDS))
def test_a_run_of_another_configuration_needs_force(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, verb: str
) -> None:
    assert app.main(words(verb, folder, tmp_path / "out", "--quiet")) == 0
    assert app.main(words(verb, folder, tmp_path / "out", "--quiet", "--seed", "2")) == 2
    assert "seed is 0 there and 2 here" in capsys.readouterr().err
    assert app.main(words(verb, folder, tmp_path / "out", "--quiet", "--seed", "2", "--force")) == 0


def test_a_bands_run_is_no_label_run(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    assert app.main(words("bands", folder, tmp_path / "out", "--quiet")) == 0
    assert app.main(["inspect", str(tmp_path / "out")]) == 2
    assert "it holds a run of bands, not labels" in capsys.readouterr().err


def test_bands_say_how_large_a_mean_was_and_would_have_to_be(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    assert app.main(words("bands", folder, tmp_path / "out")) == 0
    out = capsys.readouterr().out
    found = kvlens.load(tmp_path / "out").documents["bands"]
    sizes = [abs(row["mean_rho"]) for row in found["layers"]]
    assert found["largest"]["layer"] == sizes.index(max(sizes))
    assert f"layer {found['largest']['layer']}: " in out
    widths = sorted((row["high"] - row["low"]) / 2 for row in found["layers"])
    assert widths[0] <= found["half_width"] <= widths[-1]


def test_signals_say_whether_they_add_to_the_position(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    assert app.main(words("signals", folder, tmp_path / "out")) == 0
    out = capsys.readouterr().out
    beyond = kvlens.load(tmp_path / "out").documents["fitted"]["held_out"]["beyond_position"]["auc"]
    said = "adds to knowing the position" if beyond["low"] > 0 else "do not build a policy on it"
    assert said in out
    assert "one in twenty leaves out 0 by chance" in out
