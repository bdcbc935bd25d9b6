"""Broken files, models, folders and disks: each gives its exit code, one line of error, one of hint, and no answer."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_runs
import torch
from safetensors.torch import load_file, save_file

import kvlens
from kvlens.cli import app
from kvlens.disk import LOCK, Lock
from kvlens.errors import InputError
from kvlens.probe import budget, occlusion

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 64


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLENS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_runs.write_rows(tmp_path / "traces.jsonl")


class Refusal:
    """Runs commands that must fail and reads what they say."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, code: int, *command: object) -> str:
        self.capsys.readouterr()
        assert app.main([str(word) for word in command]) == code
        out, err = self.capsys.readouterr()
        return self.read(out, err)

    @staticmethod
    def read(out: str, err: str) -> str:
        assert out == ""
        lines = [
            line for line in err.splitlines() if "tokens to compute" not in line
        ]  # the estimate of a run that began
        assert [line.partition(": ")[0] for line in lines] == ["error", "hint"]
        assert all(line.partition(": ")[2].strip() for line in lines)
        return "\n".join(lines)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(capsys)


# Traces

GOOD = json.dumps(tiny_runs.SUM)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\n \n", "it is empty"),
        (f"{GOOD}\n{GOOD}\n".encode(), "line 2: id 'sum' was already used at"),
        (GOOD.encode() + b'\n{"id": "b", "prompt": "\xff", "target": "t"}\n', "line 2"),
        (f"{GOOD}\n{{oops}}\n".encode(), "line 2"),
        (f'{GOOD}\n{{"id": "b", "prom'.encode(), "line 2: the last line is cut off"),
        (b'{"id": "a", "prompt": "p"}\n', "line 1: the field 'target' is missing"),
        (b'{"prompt": "p", "target": "t"}\n', "line 1: the field 'id' is missing"),
        (b'{"id": "a", "prompt": "p", "target": NaN}\n', "line 1"),
        (b'{"id": "a", "prompt": "p", "target": "t", "meta": {"x": NaN}}\n', "line 1"),
        (b'{"id": "a", "prompt": "p", "target": "t", "meta": {"x": 1e999}}\n', "NaN or infinity"),
        (b'{"id": "a", "prompt": 1, "target": "t"}\n', "'prompt' must be a string"),
        (b'{"id": "a", "prompt": "p", "target": ""}\n', "target is empty"),
        (b'{"id": "a", "prompt": "p", "target": "\\ud800"}\n', "lone surrogate"),
        (b'{"id": "a", "prompt": "p", "target": "t", "spans": [[0, 99]]}\n', "outside the text"),
        (b'["not", "an", "object"]\n', "line 1"),
    ],
)
def test_traces_that_cannot_be_read_are_2(
    refused: Refusal, tmp_path: Path, model: Path, content: bytes, message: str
) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(content)
    said = refused(2, "label", source, "-m", model, "-o", tmp_path / "out")
    assert message in said
    assert str(source) in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["nowhere.jsonl", "folder", "traces.csv"])
def test_a_source_that_is_no_trace_file_is_2(refused: Refusal, tmp_path: Path, model: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "traces.csv").write_text("id,prompt\n")
    assert name in refused(2, "label", tmp_path / name, "-m", model, "-o", tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 4, 200])
def test_truncated_parquet_is_2(refused: Refusal, tmp_path: Path, model: Path, keep: int) -> None:
    whole = tmp_path / "whole.parquet"
    pd.DataFrame([{name: tiny_runs.BOX[name] for name in ("id", "prompt", "target")}]).to_parquet(whole)
    assert app.main(["label", str(whole), "-m", str(model), "-o", str(tmp_path / "good"), "--quiet"]) == 0
    source = tmp_path / "cut.parquet"
    source.write_bytes(whole.read_bytes()[:keep])
    assert "cut.parquet" in refused(2, "label", source, "-m", model, "-o", tmp_path / "out")


LONG = {"id": "long", "prompt": "Where is the red box? " * 12, "target": "under the table"}
LONG_TARGET = {"id": "answer", "prompt": "Where?", "target": "It is under the table. " * 12}


@pytest.mark.parametrize("row", [LONG, LONG_TARGET], ids=["trace", "target"])
def test_longer_than_the_models_context_is_2_unless_asked_for(
    refused: Refusal, tmp_path: Path, model: Path, row: dict[str, str]
) -> None:
    source = tiny_runs.write_rows(tmp_path / "long.jsonl", [tiny_runs.SUM, row])
    command = ["label", source, "-m", model, "-o", tmp_path / "out", "--window", 8]
    said = refused(2, *command)
    assert f"cannot tokenise trace '{row['id']}'" in said
    assert f"more than the model's context of {CONTEXT}" in said
    assert "--beyond-context" in said
    assert app.main([*map(str, command), "--beyond-context", "--quiet"]) == 0
    run = kvlens.load(tmp_path / "out")
    assert run.traces.n_tokens[1] > CONTEXT
    assert np.isfinite(run.windows.effect_nats).all()


def test_a_text_shorter_than_its_target_is_2(refused: Refusal, tmp_path: Path, model: Path) -> None:
    (tmp_path / "short.txt").write_text("Where is the box?")
    said = refused(2, "label", tmp_path / "short.txt", "-m", model, "-o", tmp_path / "out")
    assert "--target-tokens" in said


# Models


def test_an_unknown_model_without_a_network_is_3(refused: Refusal, source: Path, tmp_path: Path) -> None:
    said = refused(3, "label", source, "-m", "nobody/has-this", "-o", tmp_path / "out")
    assert "nobody/has-this" in said
    assert "HF_HUB_OFFLINE" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_model_is_2(refused: Refusal, source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refused(2, "label", source, "-m", tmp_path / "empty", "-o", tmp_path / "out")
    assert "without config.json" in said
    assert "no such model folder" in refused(2, "label", source, "-m", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert "no .gguf file" in refused(2, "label", source, "-m", source, "-o", tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_3(refused: Refusal, source: Path, tmp_path: Path, value: float) -> None:
    folder = tiny_runs.save_model(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = refused(3, "label", source, "-m", folder, "-o", tmp_path / "out")
    assert "down_proj" in said
    assert not (tmp_path / "out").exists()


def test_cut_off_weights_are_2(refused: Refusal, source: Path, tmp_path: Path) -> None:
    folder = tiny_runs.save_model(tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(folder) in refused(2, "label", source, "-m", folder, "-o", tmp_path / "out")


# Options


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--preset unknown", 2, "'unknown'"),
        ("--units word", 2, "'word'"),
        ("--filler nothing", 2, "'nothing'"),
        ("--intervention delete", 2, "'delete'"),
        ("--window 0", 2, "'--window'"),
        ("--window many", 2, "'--window'"),
        ("--cells 3", 2, "layer 3 does not exist"),
        ("--cells 0:9", 2, "head 9 does not exist"),
        ("--cells x", 2, "'x' is no layer"),
        ("--lag 2 --intervention substitute", 2, "no sense"),
        ("--lag 2 --intervention knockout", 2, "lag 2"),
        ("--cells 0 --preset epikv", 2, "no sense"),
        ("--filler eos", 2, "puts no filler in"),
        ("--intervention substitute --filler pad", 2, "no pad token"),
        ("--units line --window 3", 2, "fixed width"),
        ("--screen some", 2, "'some'"),
        ("--screen 2", 2, "2.0"),
        ("--screen 0.2 --intervention knockout", 2, "evict alone"),
        ("--random-subsets 5 --intervention knockout", 2, "random subsets"),
        ("--limit 0", 2, "'--limit'"),
        ("--device cuda:99", 2, "cuda:99"),
        ("--dtype float64", 2, "float64"),
        ("--attention flash_attention_2 --device cpu --intervention knockout", 3, "flash_attention_2"),
        ("--no-such-option", 2, "--no-such-option"),
    ],
)
def test_options_that_cannot_be_are_told(
    refused: Refusal, source: Path, model: Path, tmp_path: Path, options: str, code: int, message: str
) -> None:
    assert message in refused(code, "label", source, "-m", model, "-o", tmp_path / "out", *options.split())
    assert not (tmp_path / "out").exists()


def test_a_chat_without_a_template_is_2(refused: Refusal, source: Path, tmp_path: Path) -> None:
    folder = tiny_runs.save_model(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    said = refused(2, "label", source, "-m", folder, "-o", tmp_path / "out", "--chat")
    assert "no chat template" in said


def test_no_right_answer_is_2(refused: Refusal, tmp_path: Path, model: Path) -> None:
    source = tiny_runs.write_rows(tmp_path / "wrong.jsonl", [tiny_runs.WRONG])
    said = refused(2, "label", source, "-m", model, "-o", tmp_path / "out", "--only-correct")
    assert "1 trace read, and none is known to be answered right" in said


def test_a_folder_that_another_process_writes_is_2_and_nothing_touched(
    refused: Refusal, source: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    lock = Lock(tmp_path / "out")
    try:
        assert "is being written by another process" in refused(2, "label", source, "-m", model, "-o", tmp_path / "out")
        assert [file.name for file in (tmp_path / "out").iterdir()] == [LOCK]
    finally:
        lock.release()
    assert app.main(["label", str(source), "-m", str(model), "-o", str(tmp_path / "out"), "--quiet"]) == 0


# Memory


def test_too_little_memory_is_3(
    refused: Refusal, monkeypatch: pytest.MonkeyPatch, source: Path, model: Path, tmp_path: Path
) -> None:
    compute = occlusion.forward_rows
    calls = []

    def forward_rows(*given: object) -> torch.Tensor:
        calls.append(given)
        if len(calls) > 3:  # the prefix, the full cache and the no-op fit, no window does
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return compute(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(occlusion, "forward_rows", forward_rows)
    command = ["label", source, "-m", model, "-o", tmp_path / "out", "--window", 6]
    said = refused(3, *command)
    assert "out of memory with one window at a time" in said
    monkeypatch.setattr(occlusion, "forward_rows", compute)
    assert app.main([*map(str, command), "--quiet"]) == 0


# Folders


def test_out_that_is_a_file_is_2(refused: Refusal, source: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "below"):
        assert "'" in refused(2, "label", source, "-m", model, "-o", out)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_strangers_folder_is_2_and_untouched(
    refused: Refusal, source: Path, model: Path, tmp_path: Path, force: tuple[str, ...]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    said = refused(2, "label", source, "-m", model, "-o", tmp_path / "out", *force)
    assert "thesis.tex" in said
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.fixture
def run(source: Path, model: Path, tmp_path: Path) -> Path:
    kvlens.label(source, str(model), tmp_path / "run", window=6)
    return tmp_path / "run"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"schema": "kvlens.labels/1"}', b"\xff\xfe"])
def test_a_damaged_run_json_is_2(refused: Refusal, run: Path, source: Path, model: Path, content: bytes) -> None:
    (run / "run.json").write_bytes(content)
    with pytest.raises(InputError):
        kvlens.load(run)
    assert str(run) in refused(2, "inspect", run)
    assert str(run) in refused(2, "label", source, "-m", model, "-o", run, "--window", 6)
    assert (run / "run.json").read_bytes() == content


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_table_is_2(refused: Refusal, run: Path, source: Path, model: Path, damage: str) -> None:
    table = run / "windows.parquet"
    content = bytearray(table.read_bytes())
    if damage == "gone":
        table.unlink()
    elif damage == "cut":
        table.write_bytes(content[:-10])
    else:
        content[len(content) // 2] ^= 1
        table.write_bytes(content)
    with pytest.raises(InputError, match=r"windows\.parquet"):
        kvlens.load(run)
    assert "windows.parquet" in refused(2, "inspect", run)
    command = ["label", source, "-m", model, "-o", run, "--window", 6]
    assert "--force" in refused(2, *command)
    assert app.main([*map(str, command), "--force", "--quiet"]) == 0
    kvlens.load(run)


def test_a_folder_without_a_run_is_2(refused: Refusal, tmp_path: Path) -> None:
    assert "no run.json" in refused(2, "inspect", tmp_path)


def test_a_part_damaged_between_two_starts_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, source: Path, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(budget, "choose_rows", lambda model, n_tokens: 30)
    kvlens.label(source, str(model), tmp_path / "whole", window=3)
    out = tmp_path / "out"

    def stop_after(done: int, total: int) -> None:
        if len(list(out.glob(".parts/*/*.part"))) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvlens.label(source, str(model), out, window=3, progress=stop_after)
    part = sorted(out.glob(".parts/*/*.part"))[1]
    content = bytearray(part.read_bytes())
    content[-3] ^= 16
    part.write_bytes(content)
    assert app.main(["label", str(source), "-m", str(model), "-o", str(out), "--window", "3", "--quiet"]) == 0
    (event,) = tiny_runs.state(out)["events"]
    assert (event["kind"], event["table"]) == ("damaged part", "windows")
    assert "checksum" in event["reason"]
    assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")


# Disks


def mounted(folder: Path, *options: str) -> bool:
    """Whether a small tmpfs now lies at `folder`; only the superuser of a machine that allows it can do that."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    if not mounted(disk, "-o", "size=96k"):
        pytest.skip("mounting a tmpfs needs the superuser")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_3_and_the_same_command_goes_on(
    refused: Refusal, small_disk: Path, source: Path, model: Path, tmp_path: Path
) -> None:
    command = ["label", source, "-m", model, "-o", small_disk / "out", "--window", 3]
    fill = small_disk / "fill"
    for size in (4096, 16384, 32768):
        fill.write_bytes(b"x" * (small_disk_free(small_disk) - size))
        said = refused(3, *command)
        assert "No space left on device" in said
        assert "free some space" in said
        with pytest.raises(InputError):
            kvlens.load(small_disk / "out")
        fill.unlink()
    assert app.main([*map(str, command), "--quiet"]) == 0
    kvlens.label(source, str(model), tmp_path / "whole", window=3)
    assert tiny_runs.hashes(small_disk / "out") == tiny_runs.hashes(tmp_path / "whole")


def small_disk_free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_bsize


def test_a_limit_on_file_size_is_3(source: Path, model: Path, tmp_path: Path) -> None:
    """The disk that is full for anybody, superuser or not: no file may grow beyond a few kilobytes."""
    command = ["label", str(source), "-m", str(model), "-o", str(tmp_path / "out"), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "kvlens", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 3
    assert "File too large" in Refusal.read(done.stdout, done.stderr)
    assert not list((tmp_path / "out").glob("*.parquet"))


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "sealed"
    if mounted(disk):
        remounted = subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True, check=False)
        if remounted.returncode == 0:
            yield disk
        subprocess.run(["umount", "-l", str(disk)], check=True)
        if remounted.returncode != 0:
            pytest.skip("this machine does not remount a tmpfs read-only")
    elif os.geteuid() == 0:
        pytest.skip("permissions do not hold the superuser back, and mounting is not allowed here")
    else:
        disk.chmod(0o555)
        yield disk
        disk.chmod(0o755)


def test_a_read_only_output_is_3(refused: Refusal, read_only: Path, source: Path, model: Path) -> None:
    for out in (read_only, read_only / "out"):
        said = refused(3, "label", source, "-m", model, "-o", out)
        assert str(read_only) in said
        assert "Read-only file system" in said or "Permission denied" in said


def test_a_finished_run_can_be_read_where_nothing_can_be_written(run: Path, read_only: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can put a run on a read-only disk")
    subprocess.run(["mount", "-o", "remount,rw", str(read_only)], check=True)
    subprocess.run(["cp", "-r", str(run), str(read_only / "run")], check=True)
    subprocess.run(["mount", "-o", "remount,ro", str(read_only)], check=True)
    assert app.main(["inspect", str(read_only / "run"), "--quiet"]) == 0
    assert len(kvlens.load(read_only / "run").windows)
