"""A file that grows line by line: how does it survive a kill, a full disk or a second process?

1. Open: the file is locked for this process (the kernel drops the lock of one that dies) and split into whole lines and
   a tail without a newline, which a kill can leave. Nothing is changed yet.
2. `repair` cuts the tail off, `clear` everything: whoever opened the file decides whose lines these are.
3. `append` writes one line; it is on the disk when the call returns, and gone again when the disk refuses.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from kvlens.disk import disk, explain
from kvlens.errors import InputError


class LineFile:
    """The lines of the file at `path`, made where there is none; a file that stays empty is removed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk(f"writing '{path}'"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._handle)
            if not isinstance(error, BlockingIOError):
                raise explain(error, f"locking '{path}'") from error
            raise InputError(
                f"'{path}' is being written by another process", "wait until that ends, or choose another file"
            ) from error
        with disk(f"reading '{path}'"), open(os.dup(self._handle), "rb") as stream:
            *lines, self.tail = stream.read().split(b"\n")
        self.lines: list[bytes] = lines

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.lines and not self.tail:
            with suppress(OSError):
                self.path.unlink()
        os.close(self._handle)

    def repair(self) -> None:
        """Nothing; the file ends with its last whole line."""
        self._cut(sum(len(line) + 1 for line in self.lines))
        self.tail = b""

    def clear(self) -> None:
        """Nothing; the file is empty."""
        self.lines, self.tail = [], b""
        self._cut(0)

    def append(self, line: str) -> None:
        """Nothing; `line` (without a newline in it) is the file's last line, on the disk.

        Raises: InputError or EnvironmentLacks when the disk refuses; the file is then as it was.
        """
        content = line.encode("utf-8")
        length = os.lseek(self._handle, 0, os.SEEK_END)
        try:
            left = memoryview(content + b"\n")
            while left:
                left = left[os.write(self._handle, left) :]
            os.fsync(self._handle)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, length)
            raise explain(error, f"writing '{self.path}'") from error
        self.lines.append(content)

    def _cut(self, length: int) -> None:
        with disk(f"writing '{self.path}'"):
            os.ftruncate(self._handle, length)
            os.fsync(self._handle)
