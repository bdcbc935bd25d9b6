"""Whole files or none: how does a run survive a kill, a full disk, a flipped bit or a second process?

1. Write: the bytes go to a temporary name in the same folder, reach the disk, then take their final name.
2. Seal: scratch files carry a SHA-256 of their content in front, so that damage is seen when they are read.
3. Lock: one process at a time writes a folder; the kernel drops the lock of a process that dies.
4. Say: an `OSError` becomes one line that names the action, the path and the reason.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvlens.errors import EnvironmentLacks, InputError, KvlensError

TEMPORARY = ".kvlens-*.tmp"
LOCK = ".lock"
LONGEST_NAME = 255  # bytes in one name, on every file system in use
_DIGEST_BYTES = 32
_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Damaged(ValueError):
    """A sealed file whose content is not what was written."""


def explain(error: OSError, action: str) -> KvlensError:
    """The error to show for `error`: `InputError` for a wrong path, else `EnvironmentLacks`."""
    message = f"{action} failed: {error.strerror or error}"
    if error.errno in _WRONG_PATH:
        return InputError(message, "give a path whose parent is a folder and which is not taken")
    if error.errno in _NO_SPACE:
        return EnvironmentLacks(message, "free some space, then run the same command again: finished parts are kept")
    return EnvironmentLacks(message, "check the permissions and the state of that disk, or choose another folder")


@contextmanager
def disk(action: str) -> Iterator[None]:
    """A block whose `OSError` says that `action` failed and why."""
    try:
        yield
    except OSError as error:
        raise explain(error, action) from error


def as_path(value: object, what: str) -> Path:
    """`value` as a path. Raises: InputError where it is none; `what` says what it is for."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise InputError(f"{what} {value!r:.80} is no path", "give a path as text or a pathlib.Path")
    path = Path(value)
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        raise InputError(f"{what} {str(path)[:60]!r}... is no path: File name too long", "give a shorter name")
    return path


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Nothing; afterwards `path` holds all of `content`, or what it held before.

    Raises: InputError or EnvironmentLacks when the disk refuses.
    """
    path = Path(os.path.realpath(path))
    with disk(f"writing '{path}'"):
        if path.exists() and not path.is_file() and not path.is_dir():
            with open(path, "wb") as stream:  # a pipe or a device has no old content to protect
                _fill(stream, content)
            return
        temporary = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
        try:
            with open(temporary, "wb") as stream:
                _fill(stream, content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _fill(stream: BinaryIO, content: bytes | Callable[[BinaryIO], None]) -> None:
    if callable(content):
        content(stream)
    else:
        stream.write(content)


def _sync_folder(folder: Path) -> None:
    """Nothing; a rename is only safe from a power cut once its folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


def write_sealed(path: Path, payload: bytes) -> None:
    """Nothing; `path` holds `payload` behind its SHA-256."""
    write_whole(path, hashlib.sha256(payload).digest() + payload)


def read_sealed(path: Path) -> bytes:
    """The payload of a sealed file.

    Raises: FileNotFoundError when absent, Damaged when truncated, altered or unreadable.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(str(error)) from error
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise Damaged("its checksum does not match its content")
    return payload


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Lock:
    """The right to write a folder, held until `release` or the end of the process.

    The file names its holder for people; the lock itself is the kernel's, so one left behind by a
    killed process is free at once, and a process number used anew cannot keep it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._handle = self._take(folder)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def _take(self, folder: Path) -> int:
        """A handle on the locked file; tries again when the last holder removed it between our two calls."""
        while True:
            with disk(f"locking '{folder}'"):
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.stat(self._path)):
                        return handle
            except OSError as error:
                holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(handle)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise explain(error, f"locking '{folder}'") from error
                raise InputError(
                    f"'{folder}' is being written by another process (pid {holder})",
                    "wait until that run ends, or choose another output folder",
                ) from error
            os.close(handle)

    def release(self) -> None:
        """Nothing; removes the file while the lock is still held, so that no newcomer loses its own."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._handle)
