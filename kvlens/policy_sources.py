"""What does a source say of a policy? Which method scores, with which parameters, on which model, by what evidence.

1. A bands run: the middle layers of its confirmed bands, or the bands themselves where the method takes bands.
2. A ranking: the weights of its `fitted.json`.
3. `bands="paper"`: the published depths, which are the method's defaults; or the method's own name.

A run whose verdict is "no band" says nothing: VerdictNo, exit 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvlens.discover.combine import FITTED
from kvlens.discover.movement import read_bands
from kvlens.disk import as_path, disk
from kvlens.errors import InputError, VerdictNo
from kvlens.loading import Run, intact, read_meta
from kvlens.runstate import STATE
from kvlens.schemas import BANDS, RANKING
from kvlens.scorers import table
from kvlens.scorers.fitted import parameters_of

BANDED, FIT = "epikv", "fitted"
PUBLISHED = "kvlens export --bands paper takes the published depths"
DEPTHS = {1: "depth_a", -1: "depth_b"}  # by the sign of a band: its middle
EDGES = {1: "band_a", -1: "band_b"}  # its start and stop
SIGNS = {1: "positive", -1: "negative"}
CHANGE = ("hidden_change", "hidden_change_rolling", "hidden_change_z")
SOURCE_HINT = "give what `kvlens bands` or `kvlens signals` wrote: the folder, its bands.json or its fitted.json"
MOST_SOURCE_BYTES = 2**26


@dataclass(frozen=True)
class Origin:
    """What a source says: the method, its parameters, the model it was measured on, the evidence."""

    scorer: str
    parameters: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    evidence: tuple[dict[str, Any], ...] = ()


def origin(source: object, bands: object, scorer: object, given: Mapping[str, Any]) -> Origin:
    """What the one source that was named says."""
    if scorer is not None and not isinstance(scorer, str):
        raise InputError(f"scorer {scorer!r:.80} is no name", f"the scorers are {', '.join(table.TABLE)}")
    if scorer == "oracle":
        raise InputError(
            "oracle replays labels of the very text it is asked of: it is offline only and exports nothing",
            "export a scorer that reads what a decoder has",
        )
    if bands is not None and (source is not None or bands != "paper"):
        what = "bands and a source were both given" if source is not None else f"bands {bands!r:.80} are not known"
        raise InputError(what, "give a bands run, or --bands paper for the published depths")
    if source is None and bands is None:
        if scorer is None:
            raise InputError("nothing to export was named", "give a bands or signals run, --bands paper or --scorer")
        return Origin(scorer)
    if bands is not None:
        _refuse_without_depths(scorer or BANDED)
        return Origin(scorer or BANDED)  # the published depths are its defaults
    file, document, digest = _read_source(source)
    if document["schema"] == BANDS:
        return _of_bands(file, scorer or BANDED, given)
    if scorer not in (None, FIT):
        raise InputError(f"'{file}' holds fitted weights, which scorer {scorer} does not take", "leave --scorer out")
    return _of_fit(file, document, digest)


def _read_source(source: Any) -> tuple[Path, dict[str, Any], str]:
    """The document that a run or a file is, with its path and SHA-256."""
    path = as_path(source.path if isinstance(source, Run) else source, "source")
    failed = f"'{path}' is no source of a policy"
    with disk(f"reading '{path}'"):
        if path.is_dir():
            meta = read_meta(path)
            names = {BANDS: "bands.json", RANKING: "fitted.json"}
            if meta["schema"] not in names:
                raise InputError(f"{failed}: it is a run of schema '{meta['schema']}'", SOURCE_HINT)
            path = intact(path, meta, names[meta["schema"]])
        if not path.is_file():
            raise InputError(f"{failed}: there is no such file or folder", SOURCE_HINT)
        with path.open("rb") as stream:
            content = stream.read(MOST_SOURCE_BYTES + 1)
    if len(content) > MOST_SOURCE_BYTES:
        raise InputError(f"{failed}: it has more than {MOST_SOURCE_BYTES:,} bytes", SOURCE_HINT)
    try:
        document = json.loads(content)
        schema = document["schema"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{failed}: it is no JSON object with a schema", SOURCE_HINT) from error
    if schema not in (BANDS, FITTED):
        raise InputError(f"{failed}: its schema is {schema!r:.80}", SOURCE_HINT)
    return path, document, hashlib.sha256(content).hexdigest()


def refuse_source(source: object, target: Path) -> None:
    """Nothing; raises InputError where `out` is what is read, or a file of that run."""
    path = source.path if isinstance(source, Run) else source
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        return
    there = os.path.realpath(path)
    same = os.path.realpath(target) == there
    of_the_run = os.path.dirname(os.path.realpath(target)) == there and target.name in (
        STATE,
        "bands.json",
        "fitted.json",
    )
    if same or of_the_run:
        raise InputError(f"'{target}' is to be written, but the source is read from there", "give another --out")


def _of_bands(file: Path, scorer: str, given: Mapping[str, Any]) -> Origin:
    """The middle layers of the confirmed bands of both signs, or the bands themselves, as fractions of the depth.

    The middle is the lower of two; of the paper's bands, [7, 14) and [18, 26) of 32, these are its layers 10 and 21.
    """
    _refuse_without_depths(scorer)
    found = read_bands(file)
    if found["signal"] not in CHANGE:
        raise InputError(
            f"'{file}' holds bands of {found['signal']!r:.40}, and {scorer} reads how the hidden state moves",
            f"give bands of {' or '.join(CHANGE)}",
        )
    if found.get("verdict") == "no band":
        raise VerdictNo(f"'{file}' found no band: {found.get('reason', '')!s:.200}", PUBLISHED)
    try:
        best = _confirmed(found["bands"], len(found["layers"]))
        numbers = {name: found[name] for name in ("signal", "intervention", "verdict", "n_traces", "n_tokens")}
        model = {"fingerprint": found["model"]["fingerprint"], "n_layers": len(found["layers"])}
        numbers["model"] = found["model"]["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"reading '{file}' failed: it is damaged or no bands ({error})", SOURCE_HINT) from error
    takes = EDGES if _takes(scorer, EDGES) else DEPTHS
    lacking = [sign for sign, name in takes.items() if sign not in best and name not in given]
    if lacking:
        raise VerdictNo(
            f"'{file}' confirmed no {' and no '.join(SIGNS[sign] for sign in lacking)} band, and {scorer} takes the "
            "difference of a positive and a negative one",
            f"--set {takes[lacking[0]]}=... says the other one by hand, as fractions of the depth; {PUBLISHED}",
        )
    kept = ("sign", "start", "stop", "confirm_rho", "confirm_low", "confirm_high")
    numbers["bands"] = [{name: band.get(name) for name in kept} for band in best.values()]
    n_layers = len(found["layers"])
    parameters: dict[str, Any] = {
        takes[sign]: [band["start"] / n_layers, band["stop"] / n_layers]
        if takes is EDGES
        else ((band["start"] + band["stop"] - 1) // 2) / n_layers
        for sign, band in best.items()
    }
    evidence = {"schema": BANDS, "sha256": found["hash"], "path": _shown(file), "numbers": numbers}
    return Origin(scorer, parameters, model, (evidence,))


def _confirmed(bands: list[dict[str, Any]], n_layers: int) -> dict[int, dict[str, Any]]:
    """By sign, the confirmed band with the largest correlation in the half that confirms."""
    best: dict[int, dict[str, Any]] = {}
    for band in bands:
        if band["confirmed"] is not True:
            continue
        if not (type(band["start"]) is type(band["stop"]) is int and 0 <= band["start"] < band["stop"] <= n_layers):
            raise ValueError(f"no band of {n_layers} layers: {band['start']!r:.20} to {band['stop']!r:.20}")
        if band["sign"] not in best or abs(band["confirm_rho"]) > abs(best[band["sign"]]["confirm_rho"]):
            best[band["sign"]] = band
    return best


def _refuse_without_depths(scorer: str) -> None:
    """Nothing; raises InputError for a method that takes no two depths."""
    if scorer not in table.TABLE:
        table.make(scorer, {})  # says which there are
    if not _takes(scorer, DEPTHS) and not _takes(scorer, EDGES):
        raise InputError(f"scorer {scorer} takes no depths of bands", f"leave --scorer out for {BANDED}")


def _takes(scorer: str, names: Mapping[int, str]) -> bool:
    """Whether the method has these parameters."""
    return {part.name for part in fields(table.TABLE[scorer])} >= set(names.values())


def _of_fit(file: Path, document: dict[str, Any], digest: str) -> Origin:
    """The features with their weights, as `fitted.json` has them."""
    try:
        features, about, held_out = document["features"], document["model"], document["held_out"]
        if not features:
            raise VerdictNo(f"'{file}' holds no causal signal, so no score", PUBLISHED)
        numbers = {name: document[name] for name in ("intervention", "n_traces", "n_tokens")}
        numbers |= {"model": about["name"], "features": [feature["signal"] for feature in features]}
        if held_out is not None:
            numbers |= {name: held_out[name] for name in ("score", "beyond_position")}
        model = {"fingerprint": about["fingerprint"], "n_layers": about["n_layers"]}
        parameters = parameters_of(document)
    except (KeyError, TypeError) as error:
        raise InputError(f"reading '{file}' failed: it is damaged ({error})", SOURCE_HINT) from error
    evidence = {"schema": FITTED, "sha256": digest, "path": _shown(file), "numbers": numbers}
    return Origin(FIT, parameters, model, (evidence,))


def _shown(file: Path) -> str:
    """A path as text; bytes that are no UTF-8 are spelt out."""
    return os.fsencode(file).decode("utf-8", "backslashreplace")
