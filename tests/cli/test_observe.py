"""`kvlens observe` as a command: its three forms of answer, its options, what it refuses, and a SIGKILL."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs

import kvlens
from kvlens.cli import app, output

N_TRACES = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_runs.write_rows(tmp_path / "traces.jsonl")


def words(source: Path, model: Path, out: Path, *more: str) -> list[str]:
    return ["observe", str(source), "-m", str(model), "-o", str(out), "--device", "cpu", *more]


# Answers


def test_the_answer_for_people(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "run")) == 0
    out, err = capsys.readouterr()
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    said = {name.strip(): value.strip() for name, value in lines.items()}
    assert said["model"] == str(model)
    assert said["traces"] == "2, 78 tokens of prompt and reasoning"
    assert said["3 layers"].startswith("hidden_change, hidden_change_rolling, ")
    assert said["one number"] == "lag_causal, surprisal, age, log_frequency"
    assert said["not causal"] == "attention_mass, lag, age, log_frequency"
    assert said["no value"] == "lag in 2 traces too short for it"
    assert list(said)[-1] == "run"
    assert said["run"] == str(tmp_path / "run")
    assert err.splitlines() == ["78 tokens of 2 traces to observe, a forward pass each"]


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    asked = words(source, model, tmp_path / "run", "--json", "--signals", "attention_mass,surprisal")
    assert app.main(asked) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["run"] == str(tmp_path / "run")
    assert document["n_layers"] == 3
    assert document["counts"] == {"skipped": [], "traces": 2, "tokens": 78}
    assert document["signals"] == [
        {"name": "attention_mass", "per_layer": True, "causal": False},
        {"name": "surprisal", "per_layer": False, "causal": True},
    ]
    assert app.main(asked) == 0  # the finished run answers the same
    assert json.loads(capsys.readouterr().out) == document


def test_quiet_says_the_path_alone(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--signals", "age")) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'run'}\n", "")


def test_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: Path, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    assert app.main(words(source, model, tmp_path / "run", "--json", "--signals", "age")) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "tokens: 78 of 78" in err


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("", {}),
        ("--signals all", {}),
        ("--signals log_frequency,key_norm", {"signals": ["key_norm", "log_frequency"], "per_layer": ["key_norm"]}),
        ("--signals surprise_fast,surprise_full", {"signals": ["surprise_full", "surprise_fast"], "causal": []}),
        ("--chat --beyond-context", {"chat": True, "beyond_context": True}),
        ("--target-tokens 5", {"target_tokens": 5}),
    ],
)
def test_options_become_the_configuration(
    source: Path, model: Path, tmp_path: Path, options: str, changed: dict[str, Any]
) -> None:
    asked = words(source, model, tmp_path / "run", "--quiet", "--seed", "7", "--limit", "1", *options.split())
    assert app.main([*asked, "--attention", "eager"]) == 0
    run = kvlens.load(tmp_path / "run")
    plain = {"chat": False, "beyond_context": False, "target_tokens": 48, "n_layers": 3, "rolling_window": 64}
    config = run.meta["config"]
    assert {name: config[name] for name in plain | changed} == plain | changed
    assert set(config["causal"]) <= set(config["signals"])
    assert list(run.signals.columns) == ["trace_id", "pos", "token_id", *config["signals"]]
    assert (run.meta["seed"], run.meta["device"], run.meta["attention"], len(run.traces)) == (7, "cpu", "eager", 1)


def test_python_and_command_line_write_the_same_bytes(source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "a", "--quiet")) == 0
    kvlens.observe(source, str(model), tmp_path / "b", device="cpu")
    at_hand = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
    kvlens.observe(at_hand, tiny_runs.model(max_position_embeddings=64), tmp_path / "c")
    assert tiny_runs.hashes(tmp_path / "a") == tiny_runs.hashes(tmp_path / "b") == tiny_runs.hashes(tmp_path / "c")


def test_another_configuration_needs_force(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--signals", "age")) == 0
    before = tiny_runs.hashes(tmp_path / "run")
    capsys.readouterr()
    other = words(source, model, tmp_path / "run", "--quiet", "--signals", "lag_causal")
    assert app.main(other) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "signals is ['age'] there and ['lag_causal'] here" in err
    assert "--force" in err
    assert tiny_runs.hashes(tmp_path / "run") == before
    assert app.main([*other, "--force"]) == 0
    assert tiny_runs.state(tmp_path / "run")["config"]["signals"] == ["lag_causal"]


def test_a_label_run_is_never_overwritten_unasked(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    kvlens.label(source, str(model), out, device="cpu", window=30)
    before = tiny_runs.hashes(out)
    assert app.main(words(source, model, out, "--quiet", "--signals", "age")) == 2
    assert "schema is 'kvlens.labels/1' there and 'kvlens.signals/1' here" in capsys.readouterr().err
    assert tiny_runs.hashes(out) == before
    assert app.main(words(source, model, out, "--quiet", "--signals", "age", "--force")) == 0
    assert {file.name for file in out.iterdir()} == {"run.json", "signals.parquet", "traces.parquet"}


# Refusals


def a_file(content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "bad.jsonl"
        path.write_text(content, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("make", "options", "code", "message"),
    [
        (None, "--signals hidden_chnage", 2, "there is no signal 'hidden_chnage'"),
        (None, "--signals age,", 2, "there is no signal ''"),
        (None, "--signals surprise_ful", 2, "there is no signal 'surprise_ful'"),
        (None, "--target-tokens 0", 2, "--target-tokens"),
        (None, "--attention flash_attention_2", 3, "flash_attention_2"),
        (None, "-m no/such-model", 3, "no/such-model"),
        (None, "-m ./nowhere", 2, "no such model folder or file"),
        (a_file(""), "", 2, "it is empty"),
        (a_file('{"id": "a", "prompt": "p"}\n'), "", 2, "line 1: the field 'target' is missing"),
        (a_file(json.dumps({"id": "a", "prompt": "word " * 99, "target": "t"})), "", 2, "model's context of 64"),
        (a_file(json.dumps({"id": "a", "text": "short"})), "", 2, "at least 2 are needed"),
        (a_file(json.dumps({"id": "a", "text": "word " * 40})), "--chat --target-tokens 4", 2, "no prompt to render"),
        (lambda folder: folder / "nowhere.jsonl", "", 2, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_observed_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str],
    source: Path,
    model: Path,
    tmp_path: Path,
    make: Callable[[Path], Path] | None,
    options: str,
    code: int,
    message: str,
) -> None:
    asked = words(source if make is None else make(tmp_path), model, tmp_path / "out", *options.split())
    assert app.main(asked) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["error", "hint"]
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_misspelt_signal_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "out", "--signals", "key_nrom")) == 2
    assert "did you mean key_norm" in capsys.readouterr().err


# A kill


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that start with the slow imports done, so that a kill costs no more than the work it undoes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvlens.probe.observe", "transformers.models.llama.modeling_llama"])
    return context


def n_parts(out: Path) -> int:
    return sum(1 for _ in out.glob(".parts/*/*.part"))


def test_killed_at_many_instants_the_same_command_ends_in_the_same_bytes(
    processes: Any, model: Path, tmp_path: Path
) -> None:
    rows = [row | {"id": f"{row['id']} {number}"} for number in range(N_TRACES // 2) for row in tiny_runs.ROWS]
    source = tiny_runs.write_rows(tmp_path / "traces.jsonl", rows)
    out = tmp_path / "killed"
    for parts in (1, 12, 25):
        process = processes.Process(target=app.main, args=(words(source, model, out, "--quiet"),))
        process.start()
        while process.is_alive() and n_parts(out) < parts:
            time.sleep(0.0005)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert tiny_runs.state(out)["status"] == "running"
        assert parts <= n_parts(out) < 2 * N_TRACES
    for folder in (out, tmp_path / "whole"):
        process = processes.Process(target=app.main, args=(words(source, model, folder, "--quiet"),))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")
    assert tiny_runs.state(out)["results"] == tiny_runs.state(tmp_path / "whole")["results"]
    assert {file.name for file in out.iterdir()} == {"run.json", *tiny_runs.hashes(out)}
    run = kvlens.load(out)
    assert list(run.traces.trace_id) == [row["id"] for row in rows]
    assert np.stack(run.signals.attention_mass).shape == (len(run.signals), 3)
