"""Does the command line answer where it should, in the form asked for, with the right exit code?"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import made_runs
import pytest
import typer

from kvlens import __version__
from kvlens.cli import app, output
from kvlens.errors import EnvironmentLacks, InputError, ModelRefused, VerdictNo

ROOT = Path(__file__).resolve().parents[2]


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    return made_runs.write(
        tmp_path / "run", {"apples": made_runs.APPLES, "hostile": made_runs.HOSTILE}, {3: 2.0, 7: -1.5}
    )


def verb_raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Makes `kvlens fails` a verb that raises `error`."""

    def command() -> None:
        raise error

    monkeypatch.setitem(sys.modules, "kvlens.cli.fails", SimpleNamespace(command=command))
    monkeypatch.setattr(app, "VERBS", (*app.VERBS, app.Verb("fails", "kvlens.cli.fails", "Fails.")))


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (VerdictNo("the audit failed", "look"), 1, ["error: the audit failed", "hint: look"]),
        (InputError("no such trace", "name one"), 2, ["error: no such trace", "hint: name one"]),
        (EnvironmentLacks("no GPU", "use the CPU"), 3, ["error: no GPU", "hint: use the CPU"]),
        (ModelRefused("mask ignored", "sdpa"), 3, ["error: mask ignored", "hint: sdpa"]),
        (MemoryError(), 3, ["error: out of memory: MemoryError"]),
        (OutOfMemoryError("CUDA\nout"), 3, ["error: out of memory: CUDA out"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), 3, ["error: out of memory: Default"]),
        (OSError(errno.ENOSPC, "No space left on device", "/out"), 3, ["error: No space left on device '/out'"]),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 3, ["error: Permission denied '/out'"]),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000),
            2,
            ["error: File name too long: 'xxx", "hint:"],
        ),
        (ValueError("a bug"), 70, ["error: internal error: ValueError: a bug", "hint: --debug"]),
        (RuntimeError("a bug"), 70, ["error: internal error: RuntimeError: a bug"]),
        (KeyboardInterrupt(), 130, ["error: interrupted", "hint: the same command continues"]),
        (typer.Exit(5), 5, []),
    ],
)
def test_errors_become_two_lines_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    lines: list[str],
) -> None:
    verb_raising(monkeypatch, error)
    assert app.main(["fails"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == (2 if lines else 0)
    for line, expected in zip(err.splitlines(), lines, strict=False):
        assert line.startswith(expected)


@pytest.mark.parametrize("words", [["--debug", "fails"], ["fails", "--debug"]])
def test_debug_adds_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    verb_raising(monkeypatch, InputError("no such trace", "name one"))
    assert app.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no such trace\nhint: name one\nTraceback")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-verb"], "No such command 'no-such-verb'"),
        (["inspct"], "inspect"),
        (["inspect"], "PATH"),
        (["inspect", "x", "--no-such-option"], "--no-such-option"),
        (["inspect", "x", "-n", "zero"], "valid integer"),
        (["inspect", "x", "-n", "0"], "equal to 1"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_usage_is_2_and_says_where_help_is(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert app.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 2
    assert err.splitlines()[-1].startswith("hint: kvlens")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvlens {__version__}\n"
    assert app.main([]) == app.main(["--help"]) == app.main(["-h"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for verb in app.VERBS:
        assert out.count(verb.summary[:40]) == 3
    positions = [out.index(f"\n  {verb.name} ") for verb in app.VERBS]
    assert positions == sorted(positions)


@pytest.mark.parametrize("verb", app.VERBS, ids=lambda verb: verb.name)
def test_every_verb_has_its_own_help(capsys: pytest.CaptureFixture[str], verb: app.Verb) -> None:
    assert app.main([verb.name, "--help"]) == 0
    out = capsys.readouterr().out
    command = importlib.import_module(verb.module).command
    assert " ".join(command.__doc__.split()) in " ".join(out.split())
    assert "--json" in out
    assert "--quiet" in out
    assert "--debug" in out


def test_inspect_for_people(capsys: pytest.CaptureFixture[str], labels: Path) -> None:
    assert app.main(["inspect", str(labels), "--trace", "apples", "-n", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "made-up (Q4_1, dequantised)" in out
    assert "+23.5 nats: often an attention sink, not ranked" in out
    header, first, second = out.splitlines()[-5:-2]
    assert header.split() == ["nats", "pos", "segment", "in", "context"]
    assert first.split()[:3] == ["+2.00", "3", "prompt"]
    assert second.split()[:3] == ["−1.50", "7", "prompt"]
    assert "Maria picks 1[4] apples" in first


def test_inspect_prints_no_control_characters(capsys: pytest.CaptureFixture[str], labels: Path) -> None:
    assert app.main(["inspect", str(labels), "--trace", "hostile", "-n", "500"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "␛" in out


def test_inspect_as_json_is_one_document(capsys: pytest.CaptureFixture[str], labels: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert app.main(["inspect", str(labels), "--json", "-n", "3", "--html", str(page)]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["schema"] == "kvlens.labels/1"
    assert document["html"] == str(page)
    assert [row["effect_nats"] for row in document["windows"]][:2] == [2.0, 2.0]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_inspect_quietly_prints_the_path_it_wrote(
    capsys: pytest.CaptureFixture[str], labels: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert app.main(["inspect", str(labels), "--quiet", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "{tmp}/nowhere"],
        ["inspect", "{tmp}/run", "--trace", "x"],
        ["inspect", "{tmp}/run", "--html", "{tmp}"],
    ],
)
def test_inspect_refuses_with_2(
    capsys: pytest.CaptureFixture[str], labels: Path, tmp_path: Path, words: list[str]
) -> None:
    assert app.main([word.replace("{tmp}", str(tmp_path)) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_doctor_and_models_answer_in_all_forms(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path))
    assert app.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["hooks_bite"] is True
    assert app.main(["doctor"]) == 0
    assert "hooks bite  " in capsys.readouterr().out
    assert app.main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert app.main(["models"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert app.main(["models", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_json_has_no_bare_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.Output(json=True).answer({"a": float("nan"), "b": float("inf")}, text="")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": None, "b": "inf"}


def test_tables_align_wide_characters() -> None:
    text = output.table(["a", "b"], [["東京", "1"], ["x", "22"]], right=(1,))
    assert text.splitlines() == ["a      b", "東京   1", "x     22"]


# What only a real process shows.


def kvlens(*words: str, **keywords: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvlens", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, **keywords
    )  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("words", [["--help"], ["inspect", "{run}", "--json", "-n", "500"]])
def test_a_reader_that_leaves_is_no_error(labels: Path, words: list[str]) -> None:
    process = kvlens(*[word.replace("{run}", str(labels)) for word in words], stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_a_terminal_without_unicode_still_gets_an_answer(labels: Path) -> None:
    process = kvlens("inspect", str(labels), stderr=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "\\u2212" in out


PROGRESS = """
import sys, time
from kvlens.cli import output
output.SECONDS_BETWEEN_LINES = 0.05
with output.Output(quiet="quiet" in sys.argv).progress("label") as tick:
    for done in range(100, 121):
        tick(done, 1000)
        time.sleep(0.01)
"""


def test_progress_in_a_log_is_lines_with_rate_and_time_left() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRESS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 8
    words = lines[-1].split()
    assert words[0] == "label:"
    assert words[2:4] == ["of", "1,000,"]
    assert 10 < float(words[4].removesuffix("/s,")) < 101  # the 100 done before do not count
    assert words[-1] == "left"


def test_work_goes_on_when_nobody_reads_its_progress() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{PROGRESS}\nprint('finished')"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    process.stderr.close()
    assert process.stdout is not None
    assert process.stdout.read() == "finished\n"
    process.stdout.close()
    assert process.wait() == 0


def test_quiet_progress_is_silent() -> None:
    command = [sys.executable, "-c", PROGRESS, "quiet"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr == ""


def test_progress_on_a_terminal_is_a_bar() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRESS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.stdout == b""
    assert "120/1000" in shown
    assert "/s" in shown
    assert "\x1b[" in shown


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    code = "import signal, sys, time, types; from kvlens.cli import app\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job starts with it ignored
    code += "sys.modules['slow'] = types.SimpleNamespace(command=lambda: (print('on', flush=True), time.sleep(60)))\n"
    code += "app.VERBS = (app.Verb('slow', 'slow', ''),); sys.exit(app.main(['slow']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[0] == "error: interrupted"


@pytest.mark.parametrize(
    "words", [["inspect", "x" * 5000], ["label", "x" * 5000, "-o", "out"], ["traces", "p.jsonl", "-o", "x" * 5000]]
)
def test_a_path_too_long_for_the_system_is_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": "x"}\n')
    assert app.main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("form", [[], ["--json"], ["--quiet"], ["--html", "page.html"]])
def test_names_that_are_no_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], labels: Path, form: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = labels.rename(tmp_path / os.fsdecode(b"\xff"))
    assert app.main(["inspect", str(odd), *form]) == 0
    assert app.main(["inspect", str(odd), "--trace", os.fsdecode(b"\xff"), *form]) == 2
    assert "has no trace" in capsys.readouterr().err


def test_what_the_package_logs_becomes_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("kvlens")

    def logged() -> list[object]:
        log.info("fetching the model")
        return []

    monkeypatch.setattr("kvlens.cached.cached_models", logged)
    before = (log.level, list(log.handlers))
    assert app.main(["models", "--json"]) == 0
    assert capsys.readouterr().err == "fetching the model\n"
    assert app.main(["models", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert (log.level, log.handlers) == before


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_no_error(closed: int) -> None:
    command = ["sh", "-c", f"{sys.executable} -m kvlens models --json {closed}>&-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == (closed == 1)
