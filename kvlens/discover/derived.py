"""Runs that are made from other runs: where do they lie, and where do they come from?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlens.discover.inputs import Pair
from kvlens.disk import as_path
from kvlens.errors import InputError
from kvlens.loading import Run
from kvlens.store import RunFolder, open_run


def open_derived(
    out: str | Path,
    labels: Run,
    *others: str | Path,
    schema: str,
    config: Mapping[str, Any],
    input_hash: str,
    seed: int,
    force: bool,
) -> RunFolder:
    """The run folder of what is made from a label run and the runs at `others`: model and precision are the labels'.

    Raises: as `open_run`, and InputError where `out` would replace one of the runs it is made from.
    """
    target = os.path.realpath(as_path(out, "output"))
    if same := [path for path in (labels.path, *others) if os.path.realpath(path) == target]:
        raise InputError(f"'{out}' is to be written, but it holds '{same[0]}', to be read", "give another folder")
    meta = labels.meta
    return open_run(
        out,
        schema=schema,
        config=config,
        model=meta["model"],
        input_hash=input_hash,
        seed=seed,
        dtype=meta["dtype"],
        force=force,
    )


def sources(pair: Pair) -> dict[str, Any]:
    """Where the two runs lie and what made them, for a run's `results`."""
    metas = {"labels": (pair.labels.path, pair.labels.meta), "signals": (str(pair.signals_path), pair.signals_meta)}
    kept = ("schema", "run_id", "config", "input_hash", "seed", "dtype")
    return {role: {"path": path, **{name: meta[name] for name in kept}} for role, (path, meta) in metas.items()}
