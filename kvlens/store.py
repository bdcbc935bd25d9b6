"""Run folders: how does a measurement end up in one folder that is complete, explained and never half written?

1. Open: a folder is new, or holds the same run unfinished (continue), or finished (nothing to do), or another run
   (refused without `force`), or something that is no run (always refused).
2. Parts: each piece of work writes one sealed part per table under `.parts/<run_id>/`; a part that is there and
   intact is never computed again, a damaged one is.
3. State: `run.json` names the run and keeps its plan, events, skipped items and wall seconds while it runs.
4. Finish: the parts are merged in the given key order into `<table>.parquet`, documents become `<name>.json`, then
   `run.json` says "complete", then the parts go. Killed at any instant, the same command does what is left and ends
   in the same bytes.
5. Read back: `loading.load`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from kvlens.disk import TEMPORARY, Damaged, Lock, as_path, disk, read_sealed, sha256_file, write_sealed, write_whole
from kvlens.errors import EnvironmentLacks, InputError, KvlensError
from kvlens.provenance import now, plain
from kvlens.runstate import STATE, check_files, continued, fresh, held_state, sealed, start_afresh
from kvlens.schemas import DOCUMENTS, SCHEMAS, read_parquet, table_schema, to_arrow, to_pandas

if TYPE_CHECKING:
    import pandas as pd

PARTS = ".parts"
ROWS_PER_GROUP = 65_536
SAVE_EVERY_SECONDS = 5.0


def open_run(
    out: str | Path,
    *,
    schema: str,
    config: Mapping[str, Any],
    model: Mapping[str, str],
    input_hash: str,
    seed: int,
    dtype: str,
    device: str = "cpu",
    attention: str = "",
    force: bool = False,
) -> RunFolder:
    """The run folder at `out`: new, continued, or (`.complete`) finished before by the same configuration.

    `model` has `name`, `fingerprint` and `note`; only its fingerprint takes part in the comparison. With `force` a
    folder of another run, or a finished one of this run, starts afresh; an unfinished one of this run is continued.

    Raises: InputError when `out` is no folder, no run, another run, or being written by another process;
        EnvironmentLacks when the disk refuses.
    """
    if type(force) is not bool or type(seed) is not int or seed < 0:
        raise InputError(f"seed {seed!r} or force {force!r} is of the wrong kind", "give a seed from 0 on, and a bool")
    path = as_path(out, "output")
    facts = {"schema": schema, "config": config, "model": model, "input_hash": input_hash, "seed": seed, "dtype": dtype}
    wanted = plain({**facts, "device": device, "attention": attention})
    with disk(f"creating '{path}'"):
        path.mkdir(parents=True, exist_ok=True)
    held = held_state(path)
    if held and not start_afresh(path, held, wanted, force) and held["status"] == "complete":
        return _finished(path, held)
    lock = Lock(path)
    try:
        held = held_state(path)  # another process may have written it before we held the lock
        if held is None or start_afresh(path, held, wanted, force):
            run = RunFolder(path, fresh(wanted), lock)
        elif held["status"] == "complete":
            lock.release()
            return _finished(path, held)
        else:
            run = RunFolder(path, continued(held, wanted), lock)
        run.clear_leftovers()
        return run
    except BaseException:
        lock.release()
        raise


class RunFolder:
    """A run being written, or (`complete`) one that needs nothing more; `with` holds its lock and its clock."""

    def __init__(self, path: Path, state: dict[str, Any], lock: Lock | None) -> None:
        self.path = path
        self.state = state
        self._lock = lock
        self._parts: Path = path / PARTS / state["run_id"]
        self._started = self._saved = time.monotonic()
        self._wall_before = float(state["wall_seconds"])
        if lock is not None:
            self._save()
            with disk(f"creating '{self._parts}'"):
                self._parts.mkdir(parents=True, exist_ok=True)

    @property
    def complete(self) -> bool:
        return bool(self.state["status"] == "complete")

    @property
    def plan(self) -> Any:
        """The plan saved by an earlier start of this run, or None."""
        return self.state["plan"]

    def save_plan(self, plan: Any) -> None:
        """Nothing; keeps `plan` (JSON values), so that a continued run packs its work in the same way."""
        self.state["plan"] = plain(plan)
        self._save()

    def add_event(self, kind: str, **facts: Any) -> None:
        """Nothing; records something that happened to the run, such as an out-of-memory split."""
        self.state["events"].append(plain({"kind": kind, **facts}))
        self._save()

    def skip(self, item: str, reason: str) -> None:
        """Nothing; counts `item` as left out; saying so again on a continued run changes nothing."""
        entry = {"id": item, "reason": reason}
        if entry not in self.state["counts"]["skipped"]:
            self.state["counts"]["skipped"].append(entry)
            self._save()

    def note_peak(self, peak_bytes: int) -> None:
        """Nothing; keeps the highest peak seen over all starts of this run."""
        self.state["peak_bytes"] = max(int(peak_bytes), self.state["peak_bytes"] or 0)

    def write_part(self, table: str, key: str, frame: pd.DataFrame | Mapping[str, Any]) -> None:
        """Nothing; stores the rows of `table` that belong to `key`, whole or not at all.

        `frame` may be a dict of columns; a scalar stands for a constant column, NaN for null, and a nullable column
        may be left out.
        """
        sink = pa.BufferOutputStream()
        pq.write_table(to_arrow(frame, self._schema(table)), sink, compression="zstd")
        write_sealed(self._part_path(table, key), sink.getvalue().to_pybytes())
        if time.monotonic() - self._saved > SAVE_EVERY_SECONDS:
            self._save()  # so that a kill loses seconds of the clock, not hours

    def has_part(self, table: str, key: str) -> bool:
        """True when the part is there and intact; a damaged one is dropped, recorded, and so computed again."""
        try:
            read_sealed(self._part_path(table, key))
        except FileNotFoundError:
            return False
        except Damaged as error:
            self._part_path(table, key).unlink(missing_ok=True)
            self.add_event("damaged part", table=table, key=key, reason=str(error))
            return False
        return True

    def read_part(self, table: str, key: str) -> pd.DataFrame:
        """The rows of one part.

        Raises: EnvironmentLacks when it is missing or damaged.
        """
        return to_pandas(self._read(table, key))

    def finish(
        self,
        keys: Mapping[str, Sequence[str]],
        *,
        counts: Mapping[str, int] | None = None,
        peak_bytes: int | None = None,
        results: Mapping[str, Any] | None = None,
        documents: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing; merges each table's parts in the order of `keys[table]` and marks the run complete.

        `documents` (JSON values, by name) are written whole, each as `NAME.json`.

        Raises: EnvironmentLacks when the disk refuses or a part was lost since it was written; the same command
            then computes what is missing.
        """
        tables: dict[str, dict[str, Any]] = {}
        for table, order in keys.items():
            target = self.path / f"{table}.parquet"
            tables[table] = {"rows": self._merge(target, table, order), **_facts(target)}
        written = {}
        for name, content in (documents or {}).items():
            target = self.path / f"{name}.json"
            write_whole(target, json.dumps(plain(content), indent=1, allow_nan=False).encode() + b"\n")
            written[name] = _facts(target)
        if peak_bytes is not None:
            self.note_peak(peak_bytes)
        self.state["counts"] |= plain(counts or {})
        self.state |= {"tables": tables, "documents": written, "results": plain(results or {})}
        self.state |= {"finished": now(), "status": "complete"}
        self._save()
        shutil.rmtree(self.path / PARTS, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Nothing; gives up the lock. The folder stays as it is and can be opened again."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._lock is not None:
                self._save()
        except KvlensError:
            if kind is None:  # a full disk must not hide the error that brought us here
                raise
        finally:
            self.close()

    def clear_leftovers(self) -> None:
        """Nothing; removes what an earlier run or a kill left behind: only names that kvlens itself writes."""
        with disk(f"clearing '{self.path}'"):
            for folder in (self.path, self._parts):
                for leftover in folder.glob(TEMPORARY):
                    leftover.unlink(missing_ok=True)
            for other in (self.path / PARTS).iterdir():
                if other != self._parts:
                    shutil.rmtree(other)
            tables = {f"{name}.parquet" for schema in SCHEMAS.values() for name in schema}
            for file in tables | {f"{name}.json" for names in DOCUMENTS.values() for name in names}:
                (self.path / file).unlink(missing_ok=True)

    def _schema(self, table: str) -> pa.Schema:
        return table_schema(self.state["schema"], table, self.state["config"])

    def _part_path(self, table: str, key: str) -> Path:
        return self._parts / f"{table}-{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.part"

    def _read(self, table: str, key: str) -> pa.Table:
        try:
            return read_parquet(pa.BufferReader(read_sealed(self._part_path(table, key))))
        except (FileNotFoundError, Damaged) as error:
            raise EnvironmentLacks(
                f"reading the part '{key}' of table '{table}' in '{self.path}' failed: {error}",
                "run the same command again: it computes that part anew",
            ) from error

    def _merge(self, target: Path, table: str, order: Sequence[str]) -> int:
        """The number of rows written; row groups depend on the parts alone, so the bytes never depend on kills."""
        rows = 0

        def fill(stream: BinaryIO) -> None:
            nonlocal rows
            with pq.ParquetWriter(stream, self._schema(table), compression="zstd") as writer:
                for group in self._groups(table, order):
                    writer.write_table(group)
                    rows += group.num_rows

        write_whole(target, fill)
        return rows

    def _groups(self, table: str, order: Sequence[str]) -> Iterator[pa.Table]:
        pending: list[pa.Table] = []
        for key in order:
            pending.append(self._read(table, key))
            if sum(part.num_rows for part in pending) >= ROWS_PER_GROUP:
                yield pa.concat_tables(pending)
                pending = []
        if pending:
            yield pa.concat_tables(pending)

    def _save(self) -> None:
        self._saved = time.monotonic()
        self.state["wall_seconds"] = round(self._wall_before + self._saved - self._started, 3)
        self.state = sealed(self.state)
        write_whole(self.path / STATE, json.dumps(self.state, indent=1, allow_nan=False).encode() + b"\n")


def _finished(path: Path, state: dict[str, Any]) -> RunFolder:
    """The finished run; a kill just before the end may have left its parts, which go now."""
    check_files(path, state)
    shutil.rmtree(path / PARTS / state["run_id"], ignore_errors=True)
    return RunFolder(path, state, lock=None)


def _facts(file: Path) -> dict[str, Any]:
    """The size and checksum by which a finished file is known again."""
    with disk(f"reading '{file}'"):
        return {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
