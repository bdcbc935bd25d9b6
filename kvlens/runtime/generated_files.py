"""Which files does a generated text leave, and may they be written? Settled before the model begins.

1. `files_of`: a report and events, each in a file of its own that is not read and is no stranger's.
2. `write`: the report as JSON, the events as Parquet, whole files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from kvlens.disk import as_path, disk, write_whole
from kvlens.errors import InputError

if TYPE_CHECKING:
    from kvlens.runtime.generate import Generated

SCHEMA = "kvlens.generated/1"
EVENTS = pa.schema(
    [
        ("step", pa.int32()),
        ("row", pa.int32()),
        ("layer", pa.int16()),
        ("kv_head", pa.int16()),
        ("pos", pa.int32()),
        ("event", pa.string()),
        ("score", pa.float32()),
        ("tenure", pa.int32()),
    ]
)
_STARTS = {"report": json.dumps({"schema": SCHEMA}, indent=1).removesuffix("\n}").encode(), "events": b"PAR1"}


def files_of(report: object, events: object, policy: object, force: bool) -> dict[str, Path]:
    """The files to write by what they hold. Raises: InputError where one cannot be, or is somebody else's."""
    asked = {"report": report, "events": events}
    files = {what: as_path(path, what) for what, path in asked.items() if path is not None}
    if "events" in files and policy is None:
        raise InputError("there are no events without a policy", "add --policy FILE, or leave --events out")
    if len(files) == 2 and same_file(files["report"], files["events"]):
        raise InputError(f"report and events are both '{report}'", "give each a file of its own")
    if isinstance(policy, (str, Path)):
        check_apart(files, policy, "policy")
    for what, path in files.items():
        with disk(f"writing '{path}'"):
            if path.is_dir() or not path.parent.is_dir():
                reason = "it is a folder" if path.is_dir() else f"there is no folder '{path.parent}'"
                raise InputError(f"writing '{path}' failed: {reason}", "name a file in a folder that is there")
            if path.is_file() and not force:
                with path.open("rb") as stream:
                    start = stream.read(len(_STARTS[what]))
                if start != _STARTS[what]:
                    raise InputError(
                        f"'{path}' is there and was not written as {what}", "choose another file, or add --force"
                    )
    return files


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two paths are of one file, through links too."""
    return os.path.realpath(one) == os.path.realpath(other)


def check_apart(files: Mapping[str, Path], source: str | Path, what: str) -> None:
    """Nothing; raises InputError where a file to write is one that is read, whatever was asked by force."""
    for name, path in files.items():
        if same_file(path, source):
            raise InputError(f"{name} and {what} are both '{path}'", "give each a file of its own")


def write(found: Generated, files: Mapping[str, Path]) -> None:
    """2. Raises: InputError or EnvironmentLacks when the disk refuses."""
    if "report" in files:
        text = json.dumps(found.document(), indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(files["report"], text.encode() + b"\n")
    if "events" in files and found.events is not None:
        table = pa.Table.from_pandas(found.events, schema=EVENTS, preserve_index=False)
        write_whole(files["events"], lambda stream: pq.write_table(table, stream))
