"""The only printer: the answer goes to stdout in one of three forms, everything else to stderr.

1. `answer`: text for people, `--json` exactly one JSON document, `--quiet` paths only.
2. `note`, `error`: one line each on stderr.
3. `progress`: a bar with rate and time left on a terminal; elsewhere a line every half minute.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens.wording import duration

Tick = Callable[[int, int], None]
SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True)
class Output:
    """How this command answers: for people, as JSON, or with paths only."""

    json: bool = False
    quiet: bool = False

    def answer(self, document: Any, *, text: str, paths: Sequence[str | Path] = ()) -> None:
        """Nothing; prints one answer: `document` with `--json`, `paths` with `--quiet`, else `text`."""
        if self.json:
            from kvlens.provenance import plain

            _write(sys.stdout, json.dumps(plain(document), indent=1, ensure_ascii=False, allow_nan=False))
        elif self.quiet:
            for path in paths:
                _write(sys.stdout, os.fspath(path))
        else:
            _write(sys.stdout, text)

    def stream(self, piece: str) -> None:
        """Nothing; a piece of an answer in text, as it comes; the other forms of an answer have no pieces."""
        if not (self.json or self.quiet):
            _write(sys.stdout, piece, end="")

    def note(self, line: str) -> None:
        """Nothing; tells people something beside the answer, unless they asked for quiet."""
        if not self.quiet:
            note(line)

    @contextmanager
    def progress(self, what: str) -> Iterator[Tick]:
        """A function `tick(done, total)` to call as the work goes on.

        The rate counts from the first call, so that parts which an earlier start finished do not flatter it.
        """
        if self.quiet:
            yield _silent
        elif sys.stderr is not None and sys.stderr.isatty():
            with _bar(what) as tick:
                yield tick
        else:
            yield _Lines(what)


def note(line: str) -> None:
    """Nothing; one line on stderr."""
    _write(sys.stderr, line)


@contextmanager
def telling_log(quiet: bool) -> Iterator[None]:
    """A block in which what the package logs (a model that is fetched) becomes notes, unless people asked for quiet."""
    log, handler = logging.getLogger("kvlens"), _Notes()
    level = log.level
    if not quiet:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def error(message: str, hint: str = "") -> None:
    """Nothing; the two lines of an error on stderr."""
    if message:
        note(f"error: {message}")
    if hint:
        note(f"hint: {hint}")


def flush() -> None:
    """Nothing; sends what is buffered, and is quiet when nobody reads it any more."""
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "", end="")


def drop_stdout() -> None:
    """Nothing; stdout leads nowhere from here on, so that the interpreter's own flush at the end stays quiet."""
    _drop(sys.stdout)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """The rows under their headers in aligned columns; the columns `right` are flush right."""
    from rich.cells import cell_len

    lines = [list(headers), *[list(row) for row in rows]]
    widths = [max(cell_len(line[column]) for line in lines) for column in range(len(headers))]

    def aligned(line: list[str]) -> str:
        cells = []
        for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
            gap = " " * (width - cell_len(cell))
            cells.append(gap + cell if column in right else cell + gap)
        return "  ".join(cells).rstrip()

    return "\n".join(aligned(line) for line in lines)


def columns(facts: Mapping[str, str]) -> str:
    """Each fact on its own line, the values aligned."""
    width = max([12, *map(len, facts)])
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in facts.items())


def number(value: float | str | None, form: str = "+.2f") -> str:
    """A number in that form, with a true minus; empty for what is unknown, "inf" (as documents have it) infinite."""
    return "" if value is None or math.isnan(value := float(value)) else f"{value:{form}}".replace("-", "−")


def interval(low: float | str | None, high: float | str | None, form: str = "+.2f") -> str:
    """An interval in that form; empty for what is unknown."""
    ends = [number(end, form) for end in (low, high)]
    return f"[{', '.join(ends)}]" if all(ends) else ""


def _write(stream: Any, text: str, end: str = "\n") -> None:
    """Nothing; a closed pipe or stream is no error, and a character that the terminal cannot show is replaced."""
    if stream is None:  # a service or `>&-` may start a program without it
        return
    try:
        try:
            stream.write(text + end)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write((text + end).encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _drop(stream)


def _drop(stream: Any) -> None:
    if stream is None:
        return
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _silent(_done: int, _total: int) -> None:
    """Progress that nobody wants to see."""


class _Notes(logging.Handler):
    """A log whose lines are notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


class _Clock:
    """Rate and time left, from the first call on."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def read(self, done: int, total: int) -> tuple[float, str]:
        """Items a second, and the time left in words."""
        at = time.monotonic()
        if self._first is None:
            self._first = (at, done)
        rate = (done - self._first[1]) / max(at - self._first[0], 1e-9)
        return rate, duration((total - done) / rate) + " left" if rate > 0 else ""


class _Lines:
    """Progress for a log file: a line every half minute."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._clock = _Clock()
        self._next = time.monotonic() + SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int) -> None:
        rate, left = self._clock.read(done, total)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS_BETWEEN_LINES
            pace = f", {rate:.1f}/s, {left}" if rate > 0 else ""
            note(f"{self._what}: {done:,} of {total:,}{pace}")


@contextmanager
def _bar(what: str) -> Iterator[Tick]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"))
    clock = _Clock()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None, pace="")

        def tick(done: int, total: int) -> None:
            rate, left = clock.read(done, total)
            bar.update(task, completed=done, total=total, pace=f"{rate:.1f}/s {left}" if rate else "")

        yield tick
