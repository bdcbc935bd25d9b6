"""A file of lines after kills, refusals of the disk, and under two processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlens import linefile
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.linefile import LineFile


def test_lines_are_kept_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    with LineFile(path) as lines:
        lines.append("one")
        lines.append("zwei \u00fc\u2028")
        assert path.read_text(encoding="utf-8") == "one\nzwei \u00fc\u2028\n"
    with LineFile(path) as lines:
        assert (lines.lines, lines.tail) == ([b"one", "zwei \u00fc\u2028".encode()], b"")
        lines.append("three")
        assert len(lines.lines) == 3
    assert path.read_text(encoding="utf-8").splitlines()[-1] == "three"


def test_a_tail_is_shown_and_cut_off_on_demand_only(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    with LineFile(path) as lines:
        assert (lines.lines, lines.tail) == ([b"one"], b"tw")
    assert path.read_bytes() == b"one\ntw"
    with LineFile(path) as lines:
        lines.repair()
        lines.append("two")
    assert path.read_bytes() == b"one\ntwo\n"
    with LineFile(path) as lines:
        lines.clear()
        lines.append("other")
    assert path.read_bytes() == b"other\n"


def test_a_file_that_stays_empty_is_removed_and_a_lone_tail_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineFile(path):
        assert path.exists()
    assert not path.exists()
    path.write_bytes(b"tail")
    with LineFile(path):
        pass
    assert path.read_bytes() == b"tail"


def test_a_line_that_the_disk_refuses_halfway_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    real = os.write
    calls: list[int] = []

    def full_disk(handle: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:2])

    with LineFile(path) as lines:
        lines.append("one")
        monkeypatch.setattr(linefile.os, "write", full_disk)
        with pytest.raises(EnvironmentLacks, match="No space left"):
            lines.append("two")
        monkeypatch.undo()
        assert calls == [4, 2]
        assert path.read_bytes() == b"one\n"
        lines.append("three")
    assert path.read_bytes() == b"one\nthree\n"


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(linefile.os, "write", lambda handle, data: real(handle, data[:1]))
    with LineFile(tmp_path / "lines") as lines:
        lines.append("one")
    assert (tmp_path / "lines").read_bytes() == b"one\n"


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    code = f"from kvlens.linefile import LineFile; from pathlib import Path; LineFile(Path({str(path)!r}))"
    root = Path(__file__).resolve().parents[1]

    def other() -> str:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
        ).stderr

    with LineFile(path) as lines:
        lines.append("one")
        assert "InputError" in other()
        assert "is being written by another process" in other()
    assert other() == ""


@pytest.mark.parametrize("name", ["", "a-file/below"])
def test_a_path_that_cannot_be_a_file_is_an_input_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").write_text("x")
    with pytest.raises(InputError, match="writing"):
        LineFile(tmp_path / name)
