"""Is a band that moved said to have moved, by how far, and one that stayed not?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_signals
import numpy as np
import pytest

import kvlens
from kvlens.discover.movement import movement, read_bands
from kvlens.discover.simulate import simulate
from kvlens.errors import InputError

SOME = '"signal": "x", "bands": []'


def bands(folder: Path, name: str, seed: int, band: tuple[int, int], n_layers: int = 20, rho: float = 0.3) -> Path:
    """The folder of a bands run with this band planted."""
    worlds = simulate(seed, n_traces=20, n_layers=n_layers, band=band, rho=rho, n_tokens=(120, 160))
    kvlens.bands(*made_signals.pair(folder / f"pair-{name}", worlds), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bands")
    bands(folder, "early", 0, (4, 8))
    bands(folder, "again", 1, (4, 8))
    bands(folder, "late", 2, (10, 14))
    bands(folder, "deep", 3, (6, 12), n_layers=30)
    bands(folder, "none", 4, (4, 8), rho=0.0)
    return folder


def moved(folder: Path, this: str, other: str) -> dict[str, Any]:
    found = movement(read_bands(folder / this), read_bands(folder / other), seed=0)
    assert [move["sign"] for move in found["moves"]] == [1, -1]
    assert found["moves"][1]["reason"] == "no negative band in this run and the other"
    return found["moves"][0]


def test_a_band_that_moved(folder: Path) -> None:
    move = moved(folder, "late", "early")
    assert move["moved"] is True
    assert (move["this"]["start"], move["this"]["stop"]) == (0.5, 0.7)
    assert (move["other"]["start"], move["other"]["stop"]) == (0.2, 0.4)
    for edge in ("start", "centre", "stop"):
        assert move[edge]["difference"] == pytest.approx(0.3, abs=0.01)
        assert move[edge]["low"] <= move[edge]["difference"] <= move[edge]["high"]
    assert 0.2 < move["centre"]["low"] < move["centre"]["high"] < 0.4
    back = moved(folder, "early", "late")
    assert back["moved"] is True
    assert back["centre"]["difference"] == pytest.approx(-0.3, abs=0.01)


@pytest.mark.parametrize("other", ["again", "deep"])
def test_a_band_that_stayed_in_depth(folder: Path, other: str) -> None:
    move = moved(folder, "early", other)
    assert move["moved"] is False
    assert move["centre"]["low"] <= 0 <= move["centre"]["high"]
    assert move["centre"]["high"] - move["centre"]["low"] < 0.1


def test_no_band_does_not_move(folder: Path) -> None:
    found = movement(read_bands(folder / "early"), read_bands(folder / "none"), seed=0)
    assert found["moves"][0] == {"sign": 1, "moved": None, "reason": "no positive band in the other"}


def test_the_same_traces_are_resampled_together(folder: Path) -> None:
    this = read_bands(folder / "early")
    mixed = {**this, "traces": this["traces"][::-1]}
    found = movement(this, mixed, seed=0)
    assert found["paired"]
    assert found["moves"][0]["centre"] == {"difference": 0.0, "low": 0.0, "high": 0.0}
    strangers = {**this, "traces": [trace | {"trace_id": f"other {i}"} for i, trace in enumerate(this["traces"])]}
    apart = movement(this, strangers, seed=0)
    assert not apart["paired"]
    assert apart["moves"][0]["start"]["low"] <= 0 <= apart["moves"][0]["start"]["high"]


def test_a_band_that_resamples_lose_has_no_place(folder: Path) -> None:
    other = read_bands(folder / "early")
    noise = np.random.default_rng(0).normal(size=20)
    barely = 0.1 * (noise - noise.mean()) / noise.std(ddof=1) + 0.05  # t = 2.24, and 2.09 makes a cluster
    profile = np.where(np.isin(np.arange(20), range(4, 8)), barely[:, None], 0.0)
    traces = [{"trace_id": f"faint {i}", "rho": row.tolist()} for i, row in enumerate(profile)]
    move = movement({**other, "traces": traces}, other, seed=0)["moves"][0]
    assert (move["this"]["start"], move["this"]["stop"]) == (0.2, 0.4)
    assert move["moved"] is None
    assert 0.3 < move["share_of_draws_without_band"] < 0.6
    assert "of the resamples" in move["reason"]
    assert "centre" not in move


def test_compare_stands_in_the_document_and_in_the_runs_identity(folder: Path, tmp_path: Path) -> None:
    pair = (folder / "pair-late" / "labels", folder / "pair-late" / "signals")
    found = kvlens.bands(*pair, tmp_path / "out", compare=folder / "early").documents["bands"]
    assert found["compare"]["moves"][0]["moved"] is True
    assert found["compare"]["other"]["path"] == str(folder / "early" / "bands.json")
    assert found["compare"]["other"]["n_traces"] == 20
    same = kvlens.bands(*pair, tmp_path / "out", compare=folder / "early" / "bands.json")
    assert same.documents["bands"] == found
    with pytest.raises(InputError, match="compare is"):
        kvlens.bands(*pair, tmp_path / "out", compare=folder / "again")
    assert "compare" not in kvlens.bands(*pair, tmp_path / "alone").documents["bands"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no"),
        ("{", "damaged or no bands"),
        ("[]", "damaged or no bands"),
        (
            '{"schema": "kvlens.labels/1", "signal": "x", "bands": [], "layers": [{}], "traces": [{"rho": [1]}]}',
            "schema",
        ),
        ('{"schema": "kvlens.bands/1", "signal": "x", "bands": [], "layers": [{}], "traces": []}', "do not fit"),
        (
            '{"schema": "kvlens.bands/1", "signal": "x", "bands": [], "layers": [], "traces": [{"rho": [1]}]}',
            "do not fit",
        ),
    ],
)
def test_what_is_no_bands_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "bands.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_bands(file)
    assert "kvlens bands" in caught.value.hint


def test_a_run_of_another_verb_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="there is no"):
        read_bands(folder / "pair-early" / "labels")
    with pytest.raises(InputError, match=r"schema is 'kvlens.labels/1'|damaged or no bands"):
        read_bands(folder / "pair-early" / "labels" / "run.json")
    assert json.loads((folder / "early" / "bands.json").read_text())["signal"] == "hidden_change_rolling"
