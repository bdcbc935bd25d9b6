"""`kvlens surprise`, and `kvlens inspect` of its runs: forms of answer, options, what is refused, and a SIGKILL."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_runs
import made_surprise
import numpy as np
import pytest
import tiny_runs
from made_surprise import APPLES, HOSTILE

import kvlens
from kvlens import surprise_facts
from kvlens.cli import app, output
from kvlens.page_style import visible

N_TRACES = 12


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
    return ["surprise", str(source), "-m", str(model), "-o", str(out), "--device", "cpu", *more]


def cells(line: str) -> list[str]:
    return [cell for cell in (part.strip() for part in line.split("  ")) if cell]


# Answers


def test_the_answer_for_people(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "run", "-J", "16", "--recent", "2")) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["2 traces under 2 variants"]
    run = kvlens.load(tmp_path / "run")
    lines = out.splitlines()
    said = {cells(line)[0]: cells(line)[-1] for line in lines if len(cells(line)) == 2}
    assert said["model"] == str(model)
    assert said["precision"] == "float32 on cpu, attention sdpa"
    assert said["traces"] == "2 traces, 78 tokens of prompt and reasoning"
    assert said["refreshed"] == "every 4 tokens to 16 (2 recent among them) and the first 4"
    assert said["run"] == str(tmp_path / "run")
    at = lines.index(next(line for line in lines if line.startswith("variant")))
    assert cells(lines[at]) == [
        "variant", "scored", "median score", "rho with full", "side bytes a token", "refreshes", "evicted",
        "rho with the next refresh",
    ]  # fmt: skip
    for line, row in zip(lines[at + 1 :], surprise_facts.by_variant(run).to_dict("records"), strict=False):
        assert cells(line) == [
            row["variant"], "76", output.number(row["median"]), output.number(row["rho_with_first"]),
            {"full": "16", "fast": "144"}[row["variant"]], str(row["n_refreshes"]), f"{100 * row['evicted']:.0f} %",
            output.number(row["rho_with_next"], "+.3f"),
        ]  # fmt: skip
    assert lines[at + 1].startswith("full")
    assert lines[at + 2].startswith("fast")
    assert lines[-1].startswith("run ")


def test_without_a_budget_nothing_is_said_of_refreshes(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    asked = ["--variant", "fast", "--variant", "clause,past", "--variant", " gap=3,logprob "]
    assert app.main(words(source, model, tmp_path / "run", *asked)) == 0
    out, _ = capsys.readouterr()
    assert "refresh" not in out
    assert "evicted" not in out
    firsts = [cells(line)[0] for line in out.splitlines() if line.strip()]
    assert firsts[-4:] == ["fast", "full,clause,past", "full,logprob,gap=3", "run"]


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    asked = words(source, model, tmp_path / "run", "--json", "-J", "40", "--variant", "full", "--variant", "gap=99")
    assert app.main([*asked, "-J", "100"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["run"] == str(tmp_path / "run")
    assert document["schema"] == "kvlens.surprise/1"
    assert document["model"]["name"] == str(model)
    assert document["counts"] == {"skipped": [], "traces": 2, "tokens": 78}
    assert document["config"]["cycle"] == {"budget": 100, "every": 25, "frozen": 4, "recent": 0}
    full, nothing = document["variants"]
    run = kvlens.load(tmp_path / "run")
    assert full["median"] == pytest.approx(float(run.scores.score.median()))
    assert (full["n_tokens"], full["rho_with_first"], full["n_refreshes"], full["rho_with_next"]) == (76, 1.0, 0, None)
    assert nothing == {
        "variant": "full,gap=99", "n_tokens": 0, "median": None, "rho_with_first": None, "n_refreshes": 0,
        "evicted": 0.0, "rho_with_next": None,
    }  # fmt: skip
    assert app.main([*asked, "-J", "100"]) == 0  # the finished run answers the same
    out, err = capsys.readouterr()
    assert json.loads(out) == document
    assert "holds this run already, finished" in err


def test_quiet_says_the_path_alone(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--variant", "fast")) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'run'}\n", "")


def test_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: Path, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    assert app.main(words(source, model, tmp_path / "run", "--json", "--variant", "fast")) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "traces: 1 of 2" in err
    assert "traces: 2 of 2" in err


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("", {}),
        ("--variant fast --variant fast,logit", {"variants": ["fast"]}),
        ("--variant fast -J 20", {"variants": ["fast"], "cycle": [20, 5, 4, 0]}),
        (
            "--variant no_self --budget 9 --every 7 --frozen 0 --recent 3",
            {"variants": ["full,no_self"], "cycle": [9, 7, 0, 3]},
        ),
        ("--variant fast --chat --beyond-context", {"variants": ["fast"], "chat": True, "beyond_context": True}),
        ("--variant fast --target-tokens 5", {"variants": ["fast"], "target_tokens": 5}),
    ],
)
def test_options_become_the_configuration(
    source: Path, model: Path, tmp_path: Path, options: str, changed: dict[str, Any]
) -> None:
    asked = words(source, model, tmp_path / "run", "--quiet", "--seed", "7", "--limit", "1", *options.split())
    assert app.main([*asked, "--attention", "eager"]) == 0
    run = kvlens.load(tmp_path / "run")
    plain = {"variants": ["full", "fast"], "cycle": None, "target_tokens": 48, "chat": False, "beyond_context": False}
    found = run.meta["config"]
    if found["cycle"] is not None:
        found["cycle"] = [found["cycle"][name] for name in ("budget", "every", "frozen", "recent")]
    assert found == plain | changed
    assert (run.meta["seed"], run.meta["device"], run.meta["attention"], len(run.traces)) == (7, "cpu", "eager", 1)


def test_python_and_command_line_write_the_same_bytes(source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "a", "--quiet", "-J", "16")) == 0
    kvlens.surprise(source, str(model), tmp_path / "b", device="cpu", budget=16)
    at_hand = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
    kvlens.surprise(at_hand, tiny_runs.model(max_position_embeddings=64), tmp_path / "c", budget=16)
    assert tiny_runs.hashes(tmp_path / "a") == tiny_runs.hashes(tmp_path / "b") == tiny_runs.hashes(tmp_path / "c")
    assert len(tiny_runs.hashes(tmp_path / "a")) == 4


def test_another_configuration_needs_force(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--variant", "fast")) == 0
    before = tiny_runs.hashes(tmp_path / "run")
    capsys.readouterr()
    other = words(source, model, tmp_path / "run", "--quiet", "--variant", "past")
    assert app.main(other) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "variants is ['fast'] there and ['full,past'] here" in err
    assert "--force" in err
    assert tiny_runs.hashes(tmp_path / "run") == before
    assert app.main([*other, "--force"]) == 0
    assert tiny_runs.state(tmp_path / "run")["config"]["variants"] == ["full,past"]


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
        (None, "--variant quick", 2, "no variant word 'quick'"),
        (None, "--variant fast,full", 2, "'full' contradicts a word before it"),
        (None, "--variant fast --variant layers=9", 2, "last 9 blocks"),
        (None, "--variant gap=x", 2, "no variant word 'gap=x'"),
        (None, "--variant=", 2, "no variant word ''"),
        (None, "-J 0", 2, "-J"),
        (None, "-J=-3", 2, "-J"),
        (None, "-J many", 2, "-J"),
        (None, "-J 99999999999", 2, "budget 99999999999 is no count"),
        (None, "-J 8 --every 0", 2, "--every"),
        (None, "-J 8 --frozen=-1", 2, "--frozen"),
        (None, "-J 8 --recent 8", 2, "leaves nothing to choose beside 8 recent tokens"),
        (None, "-J 8 --variant gap=8", 2, "cannot hold 13 protected ones"),
        (None, "--every 4", 2, "no budget is given"),
        (None, "--frozen 0", 2, "no budget is given"),
        (None, "--recent 2", 2, "no budget is given"),
        (None, "--target-tokens 0", 2, "--target-tokens"),
        (None, "--limit 0", 2, "--limit"),
        (None, "--attention flash_attention_2", 3, "flash_attention_2"),
        (None, "--device cuda:99", 2, "cuda:99"),
        (None, "-m no/such-model", 3, "no/such-model"),
        (None, "-m ./nowhere", 2, "no such model folder or file"),
        (None, "--no-such-option", 2, "--no-such-option"),
        (a_file(""), "", 2, "it is empty"),
        (a_file(json.dumps({"id": "a", "prompt": "word " * 99, "target": "t"})), "", 2, "model's context of 64"),
        (a_file(json.dumps({"id": "a", "text": "word " * 40})), "--chat", 2, "no prompt to render"),
        (lambda folder: folder / "nowhere.jsonl", "", 2, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_any_work(
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


def test_a_wrong_word_lists_what_there_is(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "out", "--variant", "quick")) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    for word in (
        "full", "fast", "layers=N", "skip_mlp", "logit", "logprob", "with_self", "no_self", "token", "sentence",
        "clause", "gap=N", "past",
    ):  # fmt: skip
        assert f" {word}" in hint


def test_a_strangers_folder_is_untouched(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert app.main(words(source, model, tmp_path / "out", "--force")) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_verbs_that_need_labels_or_signals_refuse_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, labels = (
        made_surprise.write(tmp_path / "run", {"apples": APPLES}),
        made_runs.write(tmp_path / "labels", {"apples": made_runs.APPLES}),
    )
    for verb, one, other in (
        ("bands", labels, run),
        ("bands", run, labels),
        ("signals", labels, run),
        ("compare-labels", labels, run),
    ):
        assert app.main([verb, str(one), str(other), "-o", str(tmp_path / "out")]) == 2
        assert str(run) in capsys.readouterr().err


# Inspect


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return made_surprise.write(tmp_path / "made", {"apples": APPLES, "\x1b[31m<b>": HOSTILE})


def test_inspect_lists_the_tokens_of_the_highest_and_the_lowest_score(
    capsys: pytest.CaptureFixture[str], made: Path
) -> None:
    assert app.main(["inspect", str(made), "--trace", "apples", "-n", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = ["score", "pos", "leaves at", "last score", "segment", "token"]
    first, second = (number for number, line in enumerate(lines) if cells(line) == heads)
    assert lines[first - 2] == "What the future says least about: highest scores under full"
    assert [cells(line) for line in lines[first + 1 : first + 5]] == [
        ["+7.00", "8", "stays", "+7.00", "reasoning", "one"],
        ["+6.00", "9", "stays", "+6.00", "reasoning", ","],
        ["+5.00", "3", "stays", "+5.00", "prompt", "two"],
        ["+4.00", "4", "refresh 1", "+1.00", "prompt", "apples"],
    ]
    assert lines[second - 2] == "What the future says most about: lowest scores under full"
    assert [cells(line) for line in lines[second + 1 : second + 5]] == [
        ["−3.00", "10", "refresh 1", "−3.00", "reasoning", "so"],
        ["−2.00", "6", "refresh 0", "−2.00", "reasoning", "She"],
        ["−1.00", "0", "stays", "−2.00", "prompt", "<s>"],
        ["+0.00", "5", "refresh 0", "+0.00", "prompt", ".↵"],
    ]
    assert lines[second + 5 :] == ["", f"run   {made}"]
    table = {cells(line)[0]: cells(line) for line in lines if cells(line)}
    assert table["full"][1:] == ["11", "+2.00", "+1.00", "16", "2", "58 %"]


def test_inspect_of_all_traces_names_them_and_hides_nothing(capsys: pytest.CaptureFixture[str], made: Path) -> None:
    assert app.main(["inspect", str(made)]) == 0
    out = capsys.readouterr().out
    assert [char for char in out if visible(char) != char and char != "\n"] == []
    assert "␛[31m<b>" in out
    assert "leaves at" in out
    assert "20" in out


def test_inspect_without_refreshes_has_no_fates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = made_surprise.write(tmp_path / "bare", {"apples": APPLES}, cycle=None)
    assert app.main(["inspect", str(bare)]) == 0
    out = capsys.readouterr().out
    assert "leaves at" not in out
    assert "evicted" not in out
    assert app.main(["inspect", str(bare), "--json", "-n", "2"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [set(row) for row in document["tokens"]] == [{"pos", "token", "segment", "score", "trace_id"}] * 2


def test_inspect_as_json(capsys: pytest.CaptureFixture[str], made: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert app.main(["inspect", str(made), "--json", "--trace", "apples", "-n", "4", "--html", str(page)]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["html"] == str(page)
    assert document["schema"] == "kvlens.surprise/1"
    assert [row["variant"] for row in document["variants"]] == ["full", "fast"]
    assert document["variants"][0]["n_tokens"] == 11
    assert document["variants"][0]["rho_with_next"] is None
    assert document["tokens"][0] == {
        "pos": 8, "token": " one", "segment": "reasoning", "score": 7.0, "refresh": None, "last_score": 7.0,
        "trace_id": "apples",
    }  # fmt: skip
    assert [row["refresh"] for row in document["tokens"]] == [None, None, None, 1]
    assert page.read_text(encoding="utf-8").count("<section") == 1


def test_inspect_writes_a_page_and_says_where(capsys: pytest.CaptureFixture[str], made: Path, tmp_path: Path) -> None:
    page = tmp_path / "a page.html"
    assert app.main(["inspect", str(made), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"page  {page.resolve().as_uri()}"
    assert page.read_text(encoding="utf-8").count("<section") == 2
    assert app.main(["inspect", str(made), "--html", str(page), "--quiet"]) == 0
    assert capsys.readouterr() == (f"{page}\n", "")
    assert app.main(["inspect", str(made), "--quiet"]) == 0
    assert capsys.readouterr() == (f"{made}\n", "")


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ("--trace aples", "no trace 'aples'", "apples"),
        ("--trace=", "no trace ''", "apples"),
        ("-n 0", "-n", "--help"),
        ("--html {run}/scores.parquet", "a file of the run itself", "--html"),
        ("--html {run}/nowhere/page.html", "nowhere", ""),
    ],
)
def test_inspect_refuses(capsys: pytest.CaptureFixture[str], made: Path, options: str, message: str, hint: str) -> None:
    before = tiny_runs.hashes(made)
    assert app.main(["inspect", str(made), *options.format(run=made).split()]) in (2, 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["error", "hint"]
    assert message in err.splitlines()[0]
    assert hint in err.splitlines()[1]
    assert tiny_runs.hashes(made) == before


def test_inspect_of_another_schema_says_what_it_takes(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    kvlens.observe(source, str(model), tmp_path / "signals", device="cpu", signals="age")
    assert app.main(["inspect", str(tmp_path / "signals")]) == 2
    err = capsys.readouterr().err
    assert "it holds a run of signals, not labels or surprise" in err
    assert "a run of labels or of surprise" in err.splitlines()[1]


# A kill


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that start with the slow imports done, so that a kill costs no more than the work it undoes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvlens.probe.surprise", "transformers.models.llama.modeling_llama"])
    return context


def n_parts(out: Path) -> int:
    return sum(1 for _ in out.glob(".parts/*/*.part"))


def test_killed_at_many_instants_the_same_command_ends_in_the_same_bytes(
    processes: Any, model: Path, tmp_path: Path
) -> None:
    rows = [row | {"id": f"{row['id']} {number}"} for number in range(N_TRACES // 2) for row in tiny_runs.ROWS]
    source = tiny_runs.write_rows(tmp_path / "traces.jsonl", rows)
    out, asked = tmp_path / "killed", ["--quiet", "-J", "20", "--every", "8"]
    for parts in (1, 14, 31):
        process = processes.Process(target=app.main, args=(words(source, model, out, *asked),))
        process.start()
        while process.is_alive() and n_parts(out) < parts:
            time.sleep(0.0005)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert tiny_runs.state(out)["status"] == "running"
        assert parts <= n_parts(out) < 4 * N_TRACES
    for folder in (out, tmp_path / "whole"):
        process = processes.Process(target=app.main, args=(words(source, model, folder, *asked),))
        process.start()
        process.join(240)
        assert process.exitcode == 0
    assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")
    assert {file.name for file in out.iterdir()} == {"run.json", *tiny_runs.hashes(out)}
    run = kvlens.load(out)
    assert list(run.scores.trace_id.unique()) == [row["id"] for row in rows]
    assert np.isfinite(run.scores.score).sum() == 2 * (len(run.tokens) - N_TRACES)
