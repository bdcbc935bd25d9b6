"""`kvlens label` as a command: its three forms of answer, its options, and a SIGKILL at many instants."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_runs

import kvlens
from kvlens.cli import app, output

ROOT = Path(__file__).resolve().parents[2]
N_TRACES = 6


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own, unless it needs the default model, which lies in the user's."""
    if "real" not in request.keywords:
        monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_runs.write_rows(tmp_path / "traces.jsonl")


def words(source: Path, model: Path, out: Path, *more: str) -> list[str]:
    return ["label", str(source), "-m", str(model), "-o", str(out), "--device", "cpu", *more]


def test_the_answer_for_people(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--window", "6")) == 0
    out, err = capsys.readouterr()
    assert str(model) in out
    assert "width 6, stride 6" in out
    assert "noise floor" in out
    assert out.splitlines()[-1].split() == ["run", str(tmp_path / "run")]
    (estimate,) = err.splitlines()
    assert "windows of 2 traces" in estimate


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    asked = words(source, model, tmp_path / "run", "--json", "--screen", "0.3", "--random-subsets", "3")
    assert app.main(asked) == 0
    out, err = capsys.readouterr()
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["path"] == str(tmp_path / "run")
    assert document["counts"]["traces"] == 2
    assert document["noise_nats"]["max"] > 0
    assert set(document["results"]["screen"]) == set(document["results"]["subsets"]) == {"box", "sum"}
    assert document["screen"]["n_measured"] < document["screen"]["n_windows"]
    assert document["subsets"]["reasons"] == ["3 sets a trace are too few, 10 are needed"]
    assert "estimate" not in out
    assert "windows of 2 traces" in err
    assert app.main(asked) == 0  # the finished run answers the same
    assert json.loads(capsys.readouterr().out) == document


def test_quiet_says_the_path_alone(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--window", "6")) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'run'}\n", "")


def test_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: Path, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    assert app.main(words(source, model, tmp_path / "run", "--json", "--window", "6")) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "windows: 13 of 13" in err


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("--intervention knockout --window 3 --stride 2", {"intervention": "knockout", "window": 3, "stride": 2}),
        ("--cells 0-1:2 --lag 2 --window 4", {"cells": "0-1:2", "lag": 2, "window": 4, "stride": 4}),
        ("--units sentence --per-target", {"units": "sentence", "per_target": True, "window": None, "stride": None}),
        (
            "--intervention substitute --filler random --window 9 --flips --only-correct",
            {"intervention": "substitute", "filler": "random", "flips": True, "only_correct": True}
            | {"window": 9, "stride": 9},
        ),
        ("--random-subsets 2 --screen auto", {"random_subsets": 2, "screen": "auto", "stride": 1}),
        (
            "--chat --beyond-context --units step",
            {"chat": True, "beyond_context": True, "units": "step", "window": None, "stride": None},
        ),
        ("--target-tokens 5 --window 8", {"target_tokens": 5, "window": 8, "stride": 8}),
    ],
)
def test_options_become_the_configuration(
    source: Path, model: Path, tmp_path: Path, options: str, changed: dict[str, Any]
) -> None:
    plain = {
        "intervention": "evict", "window": 1, "stride": 1, "units": None, "cells": "all", "lag": None,
        "filler": "randmulti", "filler_id": None, "per_target": False, "flips": False, "only_correct": False,
        "skip_prompt": False, "random_subsets": 0, "screen": None, "chat": False, "target_tokens": 48,
        "beyond_context": False, "metric": None,
    }  # fmt: skip
    asked = words(source, model, tmp_path / "run", "--quiet", "--seed", "7", "--limit", "1", *options.split())
    assert app.main(asked) == 0
    run = kvlens.load(tmp_path / "run")
    assert run.meta["config"] == plain | changed
    assert (run.meta["seed"], run.meta["device"], run.meta["attention"], len(run.traces)) == (7, "cpu", "sdpa", 1)


def test_python_and_command_line_write_the_same_bytes(source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "a", "--quiet", "--window", "5")) == 0
    loaded = kvlens.label(source, str(model), tmp_path / "b", window=5, device="cpu").meta["model"]
    at_hand = kvlens.label(
        [tiny_runs.as_trace(row) for row in tiny_runs.ROWS],
        tiny_runs.model(max_position_embeddings=64),
        tmp_path / "c",
        window=5,
    ).meta["model"]
    assert tiny_runs.hashes(tmp_path / "a") == tiny_runs.hashes(tmp_path / "b") == tiny_runs.hashes(tmp_path / "c")
    assert loaded["name"] == str(model)
    assert at_hand["name"] == "tiny"
    assert loaded["fingerprint"] == at_hand["fingerprint"]  # a name is no weight


def test_another_configuration_needs_force(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--window", "6")) == 0
    before = tiny_runs.hashes(tmp_path / "run")
    capsys.readouterr()
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--window", "7")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "window is 6 there and 7 here" in err
    assert "--force" in err
    assert tiny_runs.hashes(tmp_path / "run") == before
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--window", "7", "--force")) == 0
    assert tiny_runs.state(tmp_path / "run")["config"]["window"] == 7


# What only a real process shows: a kill


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that start with the slow imports done, so that a kill costs no more than the work it undoes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvlens.probe.labels", "transformers.models.llama.modeling_llama"])
    return context


def kill_once(process: Any, out: Path, parts: int | None) -> None:
    """Kills the process once so many parts exist (None: once a table is there), if it lives that long."""
    while process.is_alive() if hasattr(process, "is_alive") else process.poll() is None:
        there = (out / "windows.parquet").exists() if parts is None else n_parts(out) >= parts
        if there:
            process.kill()
            break
        time.sleep(0.0005)


def n_parts(out: Path) -> int:
    return sum(1 for _ in out.glob(".parts/*/*.part"))


@pytest.mark.parametrize(
    "options",
    ["--window 4 --flips --random-subsets 12 --per-target", "--screen auto"],
    ids=["flips and subsets", "screen"],
)
def test_killed_at_many_instants_the_same_command_ends_in_the_same_bytes(
    processes: Any, model: Path, tmp_path: Path, options: str
) -> None:
    rows = [row | {"id": f"{row['id']} {number}"} for number in range(N_TRACES // 2) for row in tiny_runs.ROWS]
    source = tiny_runs.write_rows(tmp_path / "traces.jsonl", rows)
    out = tmp_path / "killed"
    instants: tuple[int | None, ...] = (1, 6, 11, None)  # the last may be too quick to catch
    killed = []
    for parts in instants:
        process = processes.Process(target=app.main, args=(words(source, model, out, "--quiet", *options.split()),))
        process.start()
        kill_once(process, out, parts)
        process.join(60)
        killed.append(process.exitcode == -signal.SIGKILL)
        assert tiny_runs.state(out)["status"] == ("running" if killed[-1] else "complete")
        assert parts is None or n_parts(out) >= parts
    assert killed[:3] == [True, True, True]
    for folder in (out, tmp_path / "whole"):
        process = processes.Process(target=app.main, args=(words(source, model, folder, "--quiet", *options.split()),))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")
    assert tiny_runs.state(out)["results"] == tiny_runs.state(tmp_path / "whole")["results"]
    assert {file.name for file in out.iterdir()} == {"run.json", *tiny_runs.hashes(out)}


@pytest.mark.real
@pytest.mark.slow
def test_a_killed_command_on_the_default_model_goes_on(tmp_path: Path) -> None:
    source = tiny_runs.write_rows(tmp_path / "traces.jsonl")
    command = ["label", str(source), "--device", "cpu", "--quiet", "--limit", "1", "--window", "8", "-o"]

    def start(out: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvlens", *command, str(out)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    out = tmp_path / "killed"
    process = start(out)
    kill_once(process, out, 1)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert start(out).communicate(timeout=120) == (f"{out}\n", "")
    assert start(tmp_path / "whole").communicate(timeout=120)[1] == ""
    assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")
