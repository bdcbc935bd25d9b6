"""Read finished runs: what did a run measure, and where does it come from?

1. `run.json` must say "complete" and name a known schema.
2. The SHA-256 of every table and document must be the one the run wrote.
3. The tables come back as pandas DataFrames and the documents as JSON values, with `run.json` as their provenance;
   several runs are stacked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from kvlens.disk import as_path, disk, sha256_file
from kvlens.errors import InputError
from kvlens.runstate import STATE, files_of, is_intact
from kvlens.schemas import SCHEMAS, read_parquet, to_pandas


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A finished run: `run.windows` or `run["windows"]` is a table, `run.meta` is what `run.json` says.

    `run.documents["bands"]` is what a run wrote as `bands.json`. Stacked runs have one more column, `run`, in each
    table; `meta["runs"]` holds each run's `run.json`, and `documents` each run's documents, by the run's name.
    """

    path: str
    meta: dict[str, Any]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def schema(self) -> str:
        """The schema and its version, such as `kvlens.labels/1`."""
        return str(self.meta["schema"])

    def __getitem__(self, table: str) -> pd.DataFrame:
        try:
            return self.tables[table]
        except KeyError:
            raise KeyError(f"no table '{table}' in {self!r}") from None

    def __getattr__(self, name: str) -> pd.DataFrame:
        tables = self.__dict__.get("tables", {})
        if name not in tables:
            raise AttributeError(f"a run has no attribute '{name}'; its tables are {list(tables)}")
        return tables[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.tables]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(table):,}" for name, table in self.tables.items())
        held = [f"{sizes} rows"] if sizes else []
        held += [f"{name}.json" for name in self.meta.get("documents", {})]
        return f"<Run {self.schema} '{self.path}': {', '.join(held)}>"


def load(run: str | Path | Sequence[str | Path]) -> Run:
    """The run in a folder, every table a DataFrame; a list of folders is stacked into one `Run`.

    Raises: InputError when a folder is no run, is unfinished, damaged or of an unknown schema, or when stacked runs
        differ in schema.
    """
    if isinstance(run, Sequence) and not isinstance(run, (str, bytes)):
        return _stack([_load_one(as_path(one, "run")) for one in run])
    return _load_one(as_path(run, "run"))


def _load_one(path: Path) -> Run:
    meta = read_meta(path)
    tables = {}
    for name in meta["tables"]:
        file = intact(path, meta, f"{name}.parquet")
        try:
            with disk(f"reading '{file}'"), open(file, "rb") as stream:  # pyarrow's own paths must be UTF-8
                tables[name] = to_pandas(read_parquet(stream))
        except pa.ArrowException as error:
            raise InputError(f"loading '{file}' failed: {error}", "run its command again with --force") from error
    documents = {name: _document(intact(path, meta, f"{name}.json")) for name in meta.get("documents", {})}
    return Run(str(path), meta, tables, documents)


def intact(path: Path, meta: dict[str, Any], name: str) -> Path:
    """A file of the finished run in `path`, once its checksum is known to be the one the run wrote.

    Raises: InputError when it is missing or another.
    """
    file = path / name
    with disk(f"reading '{file}'"):
        if file.is_file() and sha256_file(file) == files_of(meta)[name]["sha256"]:
            return file
    raise InputError(
        f"loading '{path}' failed: {name} is missing, damaged or changed since the run wrote it",
        "run its command again with --force, or restore the file",
    )


def _document(file: Path) -> dict[str, Any]:
    with disk(f"reading '{file}'"):
        return dict(json.loads(file.read_bytes()))


def read_meta(path: Path) -> dict[str, Any]:
    """What `run.json` says, once it is known to describe a finished run of a known schema.

    Raises: InputError when it does not.
    """
    failed = f"loading '{path}' failed"
    with disk(f"reading '{path / STATE}'"):
        found = (path / STATE).is_file()
    if not found:
        absent = "it is a file, not a folder" if path.exists() else "there is no such folder"
        reason = f"it has no {STATE}" if path.is_dir() else absent
        raise InputError(f"{failed}: {reason}", "give the folder that a kvlens command wrote (its -o)")
    try:
        with disk(f"reading '{path / STATE}'"):
            meta = dict(json.loads((path / STATE).read_bytes()))
        schema, status = str(meta["schema"]), meta["status"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{failed}: its {STATE} is damaged ({error})", "give a folder that kvlens wrote") from error
    if schema not in SCHEMAS:
        hint = "update kvlens" if schema.startswith("kvlens.") else "give a folder that kvlens wrote"
        raise InputError(f"{failed}: schema '{schema}' is not one of {sorted(SCHEMAS)}", hint)
    if status != "complete":
        raise InputError(f"{failed}: the run is not finished", "run its command again: it continues where it stopped")
    if not is_intact(meta):
        raise InputError(
            f"{failed}: its {STATE} was changed since the run wrote it", "restore it, or measure into another folder"
        )
    return meta


def _stack(runs: list[Run]) -> Run:
    """One run with the rows of all, told apart by the column `run`: the folder's name, or its path where names meet."""
    if not runs:
        raise InputError("loading runs failed: the list is empty", "give at least one run folder")
    if len(schemas := {run.schema for run in runs}) > 1:
        raise InputError(f"stacking runs failed: they have the schemas {sorted(schemas)}", "stack runs of one schema")
    names = [Path(run.path).name for run in runs]
    if len(set(names)) < len(names):
        names = [run.path for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"stacking runs failed: one folder is given twice in {names}", "give each run once")
    tables = {}
    for table in dict.fromkeys(table for run in runs for table in run.tables):
        parts = [(name, run[table]) for name, run in zip(names, runs, strict=True) if table in run.tables]
        frames = [frame.assign(run=name)[["run", *frame.columns]] for name, frame in parts]
        tables[table] = pd.concat(frames, ignore_index=True)
    meta = {"schema": runs[0].schema, "runs": {name: run.meta for name, run in zip(names, runs, strict=True)}}
    documents = {name: run.documents for name, run in zip(names, runs, strict=True)}
    return Run(", ".join(run.path for run in runs), meta, tables, documents)
