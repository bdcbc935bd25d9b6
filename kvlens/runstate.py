"""What `run.json` says of a folder: is it empty, this run, another run, or no run at all?

1. Read: a folder that holds files but no state of ours is never touched. A state carries a seal over its values: one
   that was edited by hand says something that no run measured, and is refused.
2. Compare: schema, configuration, model fingerprint, input hash, seed and dtype make a run; versions, device and time
   do not.
3. Begin or go on: the state of a run that starts, or of one that is continued.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from kvlens.disk import LOCK, TEMPORARY, as_path, disk
from kvlens.errors import InputError
from kvlens.provenance import now, versions

STATE = "run.json"
SHOWN, LONGEST = 3, 60  # differences in a line, characters of a value


def held_state(path: Path) -> dict[str, Any] | None:
    """The `run.json` in `path`, or None in an empty folder.

    Raises: InputError when `path` holds files but no run that kvlens wrote.
    """
    refusal = "choose another folder; kvlens neither continues nor replaces what it did not write"
    with disk(f"reading '{path}'"):
        if not (path / STATE).exists():
            if others := [p.name for p in path.iterdir() if p.name != LOCK and not p.match(TEMPORARY)]:
                raise InputError(f"'{path}' is no kvlens run: it holds {sorted(others)[:3]} but no {STATE}", refusal)
            return None
        text = (path / STATE).read_bytes()
    try:
        state = json.loads(text)
        if isinstance(state, dict) and is_intact(state):
            return state
    except (ValueError, RecursionError):
        pass
    raise InputError(f"'{path}' is no kvlens run: its {STATE} was not written by kvlens, or changed since", refusal)


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """The state with its `seal`, the SHA-256 of all else in it."""
    rest = {name: value for name, value in state.items() if name != "seal"}
    text = json.dumps(rest, sort_keys=True, allow_nan=False)
    return rest | {"seal": hashlib.sha256(text.encode()).hexdigest()}


def is_intact(state: dict[str, Any]) -> bool:
    """Whether a `run.json` is as kvlens wrote it; what reads it need then not look twice at any value."""
    try:
        return bool(sealed(state)["seal"] == state.get("seal"))
    except (ValueError, RecursionError):  # NaN, which json reads and never wrote; nesting without end
        return False


def refuse_other_folder(path: str | Path) -> None:
    """Nothing; raises InputError where `path` holds what kvlens did not write: asked before long work begins."""
    folder = as_path(path, "output")
    with disk(f"reading '{folder}'"):
        there = folder.is_dir()
    if there:
        held_state(folder)


def start_afresh(path: Path, held: dict[str, Any], wanted: dict[str, Any], force: bool) -> bool:
    """True when `force` replaces the run in `path`; False when it is the same run and may go on.

    Raises: InputError when it is another run and `force` is not given.
    """
    differences = _differences(held, wanted)
    if differences and not force:
        raise InputError(
            f"'{path}' holds a run from a different configuration: {_first(differences)}",
            "choose another output folder, or add --force to replace that run",
        )
    return bool(differences) or (force and held["status"] == "complete")


def _differences(held: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What makes `held` another run than `wanted`, in words; versions, device and time do not count."""

    def identity(state: dict[str, Any]) -> dict[str, Any]:
        top = {name: state.get(name) for name in ("schema", "input_hash", "seed", "dtype")}
        model = {"model fingerprint": (state.get("model") or {}).get("fingerprint")}
        return top | model | (state.get("config") or {})

    there, here = identity(held), identity(wanted)
    names = [name for name in here | there if there.get(name) != here.get(name)]
    words = {
        "input_hash": "the traces are others, or more or fewer (--limit), or tokenised otherwise (input_hash)",
        "model fingerprint": f"the model is '{held['model']['name']}' there, '{wanted['model']['name']}' here, "
        "of another fingerprint",
    }
    return [words.get(name) or _difference(name, there.get(name), here.get(name)) for name in names]


def _first(differences: list[str]) -> str:
    """The first three, and how many more there are."""
    rest = len(differences) - SHOWN
    return "; ".join(differences[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _difference(name: str, there: Any, here: Any) -> str:
    """What sets two unequal values of a setting apart, in a line: of long ones the first inside, or the items."""
    if max(len(repr(there)), len(repr(here))) <= LONGEST:
        return f"{name} is {there!r} there and {here!r} here"
    if isinstance(there, dict) and isinstance(here, dict):
        shared = [key for key in here if key in there and here[key] != there[key]]
        if not shared:
            return _items(name, list(there), list(here))
        more = f" (and {len(shared) - 1} more in {name})" if len(shared) > 1 else ""
        return _difference(f"{name}.{shared[0]}", there[shared[0]], here[shared[0]]) + more
    if isinstance(there, list) and isinstance(here, list) and all(isinstance(one, str) for one in there + here):
        return _items(name, there, here)
    return f"{name} is {_short(there)} there and {_short(here)} here"


def _items(name: str, there: list[str], here: list[str]) -> str:
    """Which names only one of two lists has."""
    apart = {"there": [one for one in there if one not in here], "here": [one for one in here if one not in there]}
    said = [f"{_short(', '.join(names))} {where} alone" for where, names in apart.items() if names]
    return f"{name} has {', '.join(said)}" if said else f"{name} is in another order, or names one twice"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and " " in value else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def files_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables and documents of a finished run: the facts of each by its file's name."""
    tables = {f"{name}.parquet": facts for name, facts in state["tables"].items()}
    return tables | {f"{name}.json": facts for name, facts in state.get("documents", {}).items()}


def check_files(path: Path, state: dict[str, Any]) -> None:
    """Nothing for a finished run whose tables and documents are all there.

    Raises: InputError when one is missing or has another length.
    """
    for name, facts in files_of(state).items():
        file = path / name
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            raise InputError(f"'{file}' is missing or not as the run wrote it", "add --force to compute the run anew")


def fresh(wanted: dict[str, Any]) -> dict[str, Any]:
    """The state of a run that starts now."""
    progress: dict[str, Any] = {
        "wall_seconds": 0.0,
        "peak_bytes": None,
        "counts": {"skipped": []},
        "plan": None,
        "events": [],
    }
    begun = {"status": "running", "run_id": secrets.token_hex(8), "created": now(), "versions": versions()}
    return {"schema": wanted["schema"]} | begun | wanted | progress


def continued(held: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The state of a run that goes on; a changed machine or version is recorded, not refused."""
    here = {"device": wanted["device"], "attention": wanted["attention"], "versions": versions()}
    changed = {name: {"before": held[name], "now": value} for name, value in here.items() if held[name] != value}
    if changed:
        held["events"].append({"kind": "continued elsewhere", **changed})
    return held | here
