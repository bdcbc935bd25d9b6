"""`kvlens traces`: its three forms of answer, its exit codes, and what it says of prompts without a trace."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import tiny_tokenizers

import kvlens
from kvlens import linefile
from kvlens.cli import app
from kvlens.texts import read_traces

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of a tiny Llama with a context of 200 tokens."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizers.byte_level()
    changes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": None, "max_position_embeddings": 200}
    tiny.llama(**changes).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "sum", "prompt": "Let a = 17 and b = a + 24.", "answer": "41"},
        {"id": "long", "prompt": "word " * 300},
        {"id": "box", "prompt": "Where is the box?"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str, source: Path = prompts, out: Path = tmp_path / "own.jsonl") -> tuple[int, str, str]:
        given = ["traces", str(source), "-m", str(folder), "-o", str(out), "--max-new-tokens", "6", *words]
        code = app.main(given)
        return code, *capsys.readouterr()

    return run


def test_the_answer_for_people_and_the_reasons_beside_it(run: Run, tmp_path: Path) -> None:
    code, out, err = run()
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["traces"] == "2, 1 prompt without one"
    assert lines["correct"] == "0 of 1 graded"
    assert lines["file"] == str(tmp_path / "own.jsonl")
    assert "no trace of long: its prompt of 1" in err
    assert [trace.id for trace in read_traces(tmp_path / "own.jsonl")] == ["sum", "box"]


def test_json_is_one_document_and_quiet_a_path(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--json")
    document = json.loads(out)
    assert code == 0
    assert document["path"] == str(tmp_path / "own.jsonl")
    assert (document["n_traces"], document["n_graded"], document["n_correct"]) == (2, 1, 0)
    assert document["n_hit_length_cap"] == 2
    assert [skipped["id"] for skipped in document["skipped"]] == ["long"]
    assert run("--quiet") == (0, f"{tmp_path / 'own.jsonl'}\n", "")


def test_options_reach_the_traces(run: Run, tmp_path: Path) -> None:
    words = ["--seed", "5", "--temperature", "1.5", "--limit", "1", "--chat", "--grade", "contains"]
    assert run(*words)[0] == 0
    (trace,) = read_traces(tmp_path / "own.jsonl")
    made_by = trace.meta["made_by"]
    expected = {"seed": 5, "temperature": 1.5, "chat": True, "grade": "contains", "max_new_tokens": 6}
    assert {name: made_by[name] for name in expected} == expected
    code, out, err = run("--limit", "1")
    assert (code, out) == (2, "")
    assert "different configuration" in err
    assert "--force" in err
    assert run("--limit", "1", "--force")[0] == 0
    assert read_traces(tmp_path / "own.jsonl")[0].meta["made_by"]["seed"] == 0


def test_bad_input_is_exit_2(run: Run, tmp_path: Path) -> None:
    assert run(source=tmp_path / "none.jsonl")[0] == 2
    assert run(out=tmp_path / "own.txt")[0] == 2
    assert run(out=tmp_path)[0] == 2
    assert run("--grade", "vibes")[0] == 2
    assert run("--temperature", "-1")[0] == 2
    assert not (tmp_path / "own.txt").exists()


def test_a_full_disk_is_exit_3_and_the_same_command_continues(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    written: list[int] = []

    def fills_up(handle: int, data: bytes) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(real(handle, data))
        return written[-1]

    monkeypatch.setattr(linefile.os, "write", fills_up)
    code, out, err = run()
    monkeypatch.undo()
    assert (code, out) == (3, "")
    assert "No space left on device" in err
    assert "finished parts are kept" in err
    assert [trace.id for trace in read_traces(tmp_path / "own.jsonl")] == ["sum"]
    assert run()[0] == 0
    assert [trace.id for trace in read_traces(tmp_path / "own.jsonl")] == ["sum", "box"]


def test_the_function_is_public() -> None:
    from kvlens.probe.own_traces import traces

    assert kvlens.traces is traces
