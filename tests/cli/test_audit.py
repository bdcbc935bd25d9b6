"""`kvlens audit` on the command line: killed and begun again, told apart, and what it says in tables and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import made_audit as made
import pytest
import tiny_runs

import kvlens
from kvlens.cli import app

# The same command, killed without a word before its fifth row.
KILLED = """
import os, signal, sys, time
from kvlens.auditing.audit import Job
from kvlens.cli import app

row, calls = Job.row, []

def killed(self, method, case, full):
    calls.append(method.name)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return row(self, method, case, full)

Job.row = killed
app.main(sys.argv[1:])
"""
Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"), head_dim=8)


@pytest.fixture
def command(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The words of an audit of two texts at half of their tokens, and more."""
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))
    rows = [{"id": name, "text": made.TEXT.text} for name in ("one", "two")]
    source = tiny_runs.write_rows(tmp_path / "texts.jsonl", rows)

    def words(*more: object, traces: Path = source) -> list[str]:
        own = ["audit", traces, "-m", model, "-o", tmp_path / "out", "--device", "cpu", "--keep-fraction", "0.5"]
        return [str(word) for word in (*own, "--sinks", "2", "--recent", "3", "--target-tokens", "12", *more)]

    return words


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """What a command with this exit code writes to stdout and stderr."""

    def said(code: int, words: list[str]) -> tuple[str, str]:
        capsys.readouterr()
        assert app.main(words) == code
        return capsys.readouterr()

    return said


Says = Callable[..., tuple[str, str]]


def test_a_killed_audit_keeps_every_finished_row_and_goes_on(command: Command, says: Says, tmp_path: Path) -> None:
    words = command("--scorer", "random", "--scorer", "keynorm")
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert len(list((tmp_path / "out").glob(".parts/*/*.part"))) == 4
    _, err = says(0, words)
    assert f"4 of 6 rows are in '{tmp_path / 'out'}' already, 2 to go" in err
    again = kvlens.load(tmp_path / "out").cases
    assert [*zip(again.trace_id, again.method, strict=True)] == [
        (trace, method) for trace in ("one", "two") for method in ("full", "random", "keynorm")
    ]
    whole = kvlens.audit(
        tmp_path / "texts.jsonl", str(words[words.index("-m") + 1]), tmp_path / "whole",
        scorers=["random", "keynorm"], keep_fraction=0.5, sinks=2, recent=3, target_tokens=12, device="cpu",
    ).cases  # fmt: skip
    measured = ["seconds", "peak_bytes"]
    assert again.drop(columns=measured).equals(whole.drop(columns=measured))
    assert "nothing to measure" in says(0, words)[1]


def test_progress_counts_from_what_an_earlier_start_left(command: Command, tmp_path: Path) -> None:
    """So that rows which are there already do not flatter the rate."""
    ticks: list[tuple[int, int]] = []
    words = command("--scorer", "random")
    subprocess.run([sys.executable, "-c", KILLED.replace("== 5", "== 4"), *words], capture_output=True, check=False)
    kvlens.audit(
        tmp_path / "texts.jsonl", str(words[words.index("-m") + 1]), tmp_path / "out", scorers=["random"],
        keep_fraction=0.5, sinks=2, recent=3, target_tokens=12, device="cpu", progress=lambda *at: ticks.append(at),
    )  # fmt: skip
    assert ticks == [(3, 4), (4, 4)]


def test_another_configuration_is_named_in_a_line(command: Command, says: Says, tmp_path: Path) -> None:
    says(0, command("--scorer", "random"))
    for more, differs in (
        (["--scorer", "keynorm"], "methods is ['full', 'random'] there and ['full', 'keynorm'] here"),
        (["--scorer", "all"], "methods has sliding_window, epikv, hidden_change, "),
        (["--scorer", "keynorm"], "policies has 'random' there alone, 'keynorm' here alone"),
        (
            ["--scorer", "random", "--sinks", "1"],
            "policies.random.protect is {'sinks': 2, 'prompt': False, 'recent': 3}",
        ),
        (["--scorer", "random", "--keep-fraction", "0.25"], "keep_fraction is 0.5 there and 0.25 here"),
        (["--scorer", "random", "--seed", "7"], "seed is 0 there and 7 here"),
    ):
        _, err = says(2, command(*more))
        message = err.splitlines()[-2].replace(str(tmp_path), "")
        assert differs in message
        assert len(message) < 300
        assert "'trigger'" not in message  # no whole policy


def test_the_table_tells_side_state_from_keys_and_values(command: Command, says: Says) -> None:
    out, _ = says(0, command("--scorer", "snapkv", "--scorer", "sliding_window"))
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    shares = {name: re.findall(r"\((\d+)%\)", lines[name]) for name in ("full", "snapkv", "sliding_window")}
    assert shares == {"full": ["100", "100"], "snapkv": ["50", "50"], "sliding_window": ["50", "50"]}
    assert "side: the method's own state" in out
    document = json.loads(says(0, command("--scorer", "snapkv", "--scorer", "sliding_window", "--json"))[0])
    row = next(row for row in document["rows"] if row["method"] == "snapkv")
    keys_and_values = row["claimed_bytes"] - row["claimed_side_bytes"]
    assert keys_and_values == row["physical_bytes"] - row["side_bytes"] == row["full_bytes"] // 2
    assert row["claimed_side_bytes"] > 0
    assert set(document["columns"]) <= set(row)


def test_rows_say_how_they_reduce_and_when_no_score_decided(command: Command, says: Says) -> None:
    names = ("kvzip", "surprise", "epikv", "lagkv", "snapkv", "keynorm")
    document = json.loads(says(0, command(*[word for name in names for word in ("--scorer", name)], "--json"))[0])
    rows = {row["method"]: row for row in document["rows"]}
    reduces = {name: rows[name]["reduce"] for name in ("full", *names)}
    assert reduces == {
        "full": None, "kvzip": "head", "surprise": "all", "epikv": "all", "lagkv": "head", "snapkv": "head",
        "keynorm": "head",
    }  # fmt: skip
    assert rows["lagkv"]["note"] == "no token judged: kept by position alone"  # its chunks are longer than the text
    assert re.fullmatch(
        r"\d+% of tokens not judged yet: they fill the budget, no score decided", rows["snapkv"]["note"]
    )
    assert [rows[name]["note"] for name in ("full", "kvzip", "surprise", "epikv", "keynorm")] == [None] * 5
    assert "holds; no token judged" in says(0, command(*[word for name in names for word in ("--scorer", name)]))[0]


def test_a_policy_for_another_model_is_named_with_what_helps_here(command: Command, says: Says, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    kvlens.export(None, file, scorer="random", budget_tokens=20)
    document = json.loads(file.read_text())
    document["model"] = {"fingerprint": None, "n_layers": 30, "n_kv_heads": 3, "d_head": 64}
    file.write_text(json.dumps(document))
    _, err = says(2, command("--policy", file))
    assert "policy:other: this policy was made for another architecture" in err
    assert "allow" not in err  # an option that this verb does not have


def test_policies_of_one_name_are_numbered_and_the_same_one_is_run_once(
    command: Command, says: Says, tmp_path: Path
) -> None:
    files = [tmp_path / folder / "random.json" for folder in ("a", "b")]
    for file, scorer in zip(files, ("random", "keynorm"), strict=True):
        file.parent.mkdir()
        kvlens.export(None, file, scorer=scorer, budget_tokens=20)
    asked = [word for file in (*files, files[0]) for word in ("--policy", file)]
    out, _ = says(0, command(*asked, "--scorer", "random", "--scorer", "random"))
    names = [line.split()[0] for line in out.splitlines() if "holds" in line]
    assert names[:4] == ["full", "policy:random", "policy:random#2", "random"]


def test_a_folder_that_cannot_be_written_and_a_closed_stdout(command: Command, says: Says, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = command("--scorer", "random")
    words[words.index("-o") + 1] = str(tmp_path / "file" / "out")
    _, err = says(2, words)
    assert err.splitlines()[-2].startswith("error: ")
    run = [sys.executable, "-m", "kvlens", *command("--scorer", "random")]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *run], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "audit.json").exists()


def test_where_no_method_could_run_the_command_fails(command: Command, says: Says, tmp_path: Path) -> None:
    kvlens.export(None, tmp_path / "p.json", scorer="random", protect_prompt=True, budget_tokens=20)
    words = command("--policy", str(tmp_path / "p.json"))
    words[(at := words.index("--keep-fraction")) : at + 2] = []
    out, err = says(2, words)
    assert "no method could run: policy:p refused: " in err
    assert "protected, more than the budget of 20" in out


def test_inspect_prints_the_table_again(command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = command("--scorer", "random")
    assert app.main(words) == 0
    printed = capsys.readouterr().out
    run = words[words.index("-o") + 1]
    assert app.main(["inspect", run]) == 0
    assert capsys.readouterr().out == printed
    assert app.main(["inspect", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][1]["method"] == "random"
    assert app.main(["inspect", run, "--html", str(tmp_path / "page.html")]) == 2
    assert "a run of audit, not labels or surprise" in capsys.readouterr().err
