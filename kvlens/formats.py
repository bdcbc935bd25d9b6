"""Which rows does a source hold? JSONL, Parquet, plain text and Hugging Face datasets in, (place, object) pairs out.

The place is what an error message cites: file and line, or row. By the source's form:

1. JSONL: one standard JSON object a line, UTF-8; blank lines are skipped. NaN and Infinity are no JSON.
2. Parquet: one row a trace.
3. Plain `.txt`: one row, `id` the file's stem and `text` its content.
4. `hf:NAME[:CONFIG][:SPLIT]`, read by the `datasets` package; NAME may be a local folder. One part after NAME is the
   split if it is called `train`, `validation`, `test` or `dev`, else the configuration (`hf:NAME::SPLIT` and
   `hf:NAME:CONFIG:` leave no doubt); the split defaults to `train`. Rows without an `id` are named
   `SPLIT-ROW`, counted from 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from kvlens.disk import disk
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.wording import extra

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
SPLIT_NAMES = ("train", "validation", "test", "dev")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of a file
FORMS = "a .jsonl, .parquet or .txt file, or hf:NAME[:CONFIG][:SPLIT]"

Row = tuple[str, dict[str, Any]]


def rows(source: str | Path) -> Iterator[Row]:
    """(place, object) for every row of `source`, read as they are asked for.

    Raises:
        InputError: no such file, a form that is not known, or a row that cannot be read (file and line named).
        EnvironmentLacks: the `datasets` package, the dataset or permission to read is missing.
    """
    if isinstance(source, str) and source.startswith("hf:"):
        return _dataset_rows(source)
    path = Path(source)
    with disk(f"reading '{path}'"):
        is_folder, exists = path.is_dir(), path.exists()
    if is_folder:
        raise InputError(f"cannot read traces from {path}: it is a folder", f"name {FORMS}")
    if not exists:
        raise InputError(f"cannot read traces from {path}: no such file", f"name {FORMS}")
    suffix = path.suffix.lower()
    readers = dict.fromkeys(JSONL_SUFFIXES, _jsonl_rows) | dict.fromkeys(PARQUET_SUFFIXES, _parquet_rows)
    reader = (readers | {".txt": _plain_rows}).get(suffix)
    if reader is None:
        raise InputError(f"cannot read traces from {path}: the form {suffix or '(no suffix)'!r} is not known", FORMS)
    return _reading(path, reader)


def _reading(path: Path, reader: Callable[[Path], Iterator[Row]]) -> Iterator[Row]:
    """`reader`'s rows, with what the system refuses turned into an error that says so."""
    try:
        yield from reader(path)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot read {path}: {error.strerror or error}", "check the file and its permission"
        ) from error


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            raw = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if raw.strip():
                yield place, _json_object(place, raw)


def _json_object(place: str, raw: bytes) -> dict[str, Any]:
    text = _utf8(place, raw)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if not raw.endswith(b"\n") and isinstance(error, json.JSONDecodeError):
            refuse(place, f"the last line is cut off, or is not JSON ({error.msg})", "write the file again, to its end")
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        refuse(place, f"invalid JSON: {reason}", "write one standard JSON object a line")
    if not isinstance(value, dict):
        refuse(place, f"expected a JSON object, found {kind_of(value)}", "write one JSON object a line")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not standard JSON")


def _utf8(place: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(place, f"invalid UTF-8 at byte {error.start + 1} of the line", "save the file as UTF-8")


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as stream, pq.ParquetFile(stream) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                refuse(str(path), f"it has more than one column named {twice[0]!r}", "give every column its own name")
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in _parquet_objects(path, batch, number):
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowInvalid, OSError) as error:  # a damaged page is an OSError without an errno
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"cannot read {path}: no whole Parquet file ({reason})", "write the file again") from error


def _parquet_objects(path: Path, batch: Any, above: int) -> list[dict[str, Any]]:
    """The rows of one batch; `above` rows of the file come before it."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        place = f"{path}, rows {above + 1} to {above + batch.num_rows}"
        refuse(place, f"a string holds invalid UTF-8 ({error.reason})", "save the text as UTF-8")
    except (ValueError, OverflowError) as error:  # nanoseconds or a year that Python's dates cannot hold
        refuse(f"{path}, rows {above + 1} to {above + batch.num_rows}", f"a value cannot be read ({error})")


def _plain_rows(path: Path) -> Iterator[Row]:
    lines = path.read_bytes().removeprefix(BYTE_ORDER_MARK).splitlines(keepends=True)
    text = "".join(_utf8(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1))
    if not text.strip():
        raise InputError(f"cannot read traces from {path}: it is empty", "name a file with text in it")
    yield str(path), {"id": path.stem, "text": text}


def _dataset_rows(source: str) -> Iterator[Row]:
    name, config, split = _dataset_name(source)
    try:
        import datasets
    except ImportError as error:
        hint = extra("lens")
        raise EnvironmentLacks(f"cannot read {source}: the datasets package is missing", hint) from error
    try:
        table = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"cannot read {source}: {reason}"
        if Path(name).exists() or isinstance(error, ValueError):
            raise InputError(message, "check NAME, CONFIG and SPLIT of hf:NAME[:CONFIG][:SPLIT]") from error
        raise EnvironmentLacks(message, "check the name and the network, or name a local file") from error
    for number, row in enumerate(table):
        named = {} if row.get("id") is not None else {"id": f"{split}-{number}"}
        yield f"{source}, row {number}", dict(row) | named


def _dataset_name(source: str) -> tuple[str, str | None, str]:
    """(name, configuration, split) of `hf:NAME[:CONFIG][:SPLIT]`."""
    name, *rest = source.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise InputError(f"cannot read {source}: not of the form hf:NAME[:CONFIG][:SPLIT]", "for example hf:NAME::test")
    if len(rest) == 1:
        rest = ["", *rest] if rest[0] in SPLIT_NAMES else [*rest, ""]
    config, split = rest or ["", ""]
    return name, config or None, split or "train"


def refuse(place: str, reason: str, hint: str = "see the trace fields in the README") -> NoReturn:
    """Raise the error for the row or file at `place`."""
    raise InputError(f"cannot read {place}: {reason}", hint)


def kind_of(value: Any) -> str:
    """What a value read from a row is called in an error message."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}" if isinstance(value, int | float) else type(value).__name__)
