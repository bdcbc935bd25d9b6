"""Does a band move between two runs: another task, another model, another signal?

1. Both runs keep every trace's rank correlations, so both can be resampled, whole traces at a time (the same ones where
   both runs have the same traces).
2. In each resample a band is the heaviest cluster of its sign (`clusters.py`). Its start, its centre (weighted by mass,
   so that a neighbour that barely joins hardly counts) and its stop are fractions of the depth, so that models of
   unequal depth compare.
3. The difference, this run minus the other, has a percentile interval; the band moved when its centre's leaves out 0.
   A resample without such a cluster says nothing about its place: it is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvlens.discover.clusters import forming_threshold, heaviest
from kvlens.disk import as_path, disk, sha256_file
from kvlens.errors import InputError
from kvlens.loading import Run
from kvlens.schemas import BANDS
from kvlens.stats import LEVEL, N_DRAWS, resampled, t_statistics

EDGES = ("start", "centre", "stop")
MOST_LOST = 0.2  # of the resamples: more without the band, and its place is no longer an estimate


def read_bands(bands: Run | str | Path) -> dict[str, Any]:
    """The content of `bands.json` (given as the file, its folder or the run), with its `path` and `hash`.

    Raises: InputError when it is no such file.
    """
    path = as_path(bands.path if isinstance(bands, Run) else bands, "bands")
    file = path / "bands.json" if path.is_dir() or isinstance(bands, Run) else path
    hint = "give the folder that `kvlens bands` wrote, or its bands.json"
    with disk(f"reading '{file}'"):
        if not file.is_file():
            raise InputError(f"reading bands failed: there is no '{file}'", hint)
        content, digest = file.read_bytes(), sha256_file(file)
    try:
        found = dict(json.loads(content))
        schema = found["schema"]
        profile = np.array([trace["rho"] for trace in found["traces"]], dtype=float)
        complete = profile.ndim == 2 and profile.shape[1] == len(found["layers"]) and len(profile) > 0
        complete = complete and {band["sign"] for band in found["bands"]} <= {1, -1}
        complete = complete and {"signal", "intervention", "model", "n_traces"} <= found.keys()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"reading '{file}' failed: it is damaged or no bands ({error})", hint) from error
    if schema != BANDS or not complete:
        what = f"its schema is {schema!r}, not '{BANDS}'" if schema != BANDS else "its traces and layers do not fit"
        raise InputError(f"reading '{file}' failed: {what}", hint)
    return {**found, "path": str(file), "hash": digest}


def movement(this: Mapping[str, Any], other: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """For each sign, where the band is in both runs and how far it moved, in fractions of the depth."""
    profiles = [_profile(document) for document in (this, other)]
    ids = [[trace["trace_id"] for trace in document["traces"]] for document in (this, other)]
    paired = sorted(ids[0]) == sorted(ids[1])
    if paired:
        place = {trace_id: row for row, trace_id in enumerate(ids[1])}
        profiles[1] = profiles[1][[place[trace_id] for trace_id in ids[0]]]
    seeds = (seed, seed if paired else seed + 1)
    weights = [resampled(len(profile), N_DRAWS, s) for profile, s in zip(profiles, seeds, strict=True)]
    moves = []
    for sign, word in ((1, "positive"), (-1, "negative")):
        lacking = [
            name
            for name, document in (("this run", this), ("the other", other))
            if sign not in {band["sign"] for band in document["bands"]}
        ]
        if lacking:
            moves.append({"sign": sign, "moved": None, "reason": f"no {word} band in {' and '.join(lacking)}"})
        else:
            moves.append({"sign": sign, **_move(profiles, weights, sign)})
    about = {name: other[name] for name in ("path", "hash", "signal", "intervention", "model", "n_traces")}
    return {"other": about, "paired": paired, "moves": moves}


def _move(profiles: list[np.ndarray], weights: list[np.ndarray], sign: int) -> dict[str, Any]:
    """Where the band of this sign is in both runs, and the difference with its interval."""
    here, there = (_places(profile, w, sign) for profile, w in zip(profiles, weights, strict=True))
    if not np.isfinite(here[0] + there[0]).all():
        return {"moved": None, "reason": "over all traces no cluster stands out"}
    difference = here[1:] - there[1:]
    known = np.isfinite(difference).all(1)
    lost = float(1 - known.mean())
    found = {
        "this": dict(zip(EDGES, here[0].tolist(), strict=True)),
        "other": dict(zip(EDGES, there[0].tolist(), strict=True)),
        "share_of_draws_without_band": lost,
    }
    if lost > MOST_LOST:
        return found | {"moved": None, "reason": f"no cluster in {lost:.0%} of the resamples"}
    low, high = np.quantile(difference[known], [LEVEL / 2, 1 - LEVEL / 2], axis=0)
    for edge, name in enumerate(EDGES):
        found[name] = {"difference": here[0, edge] - there[0, edge], "low": low[edge], "high": high[edge]}
    return found | {"moved": bool(low[1] > 0 or high[1] < 0)}


def _places(
    profile: Float[np.ndarray, "trace layer"], weights: Float[np.ndarray, "draw trace"], sign: int
) -> Float[np.ndarray, "draw edge"]:
    """Start, centre and stop of the heaviest cluster in each draw, in fractions of the depth; NaN without one."""
    found = heaviest(sign * t_statistics(profile, weights), forming_threshold(len(profile)))
    places = np.stack([found.start, found.centre, found.stop], axis=1) / profile.shape[1]
    return np.where(found.mass[:, None] > 0, places, np.nan)


def _profile(document: Mapping[str, Any]) -> Float[np.ndarray, "trace layer"]:
    return np.array([trace["rho"] for trace in document["traces"]], dtype=float)
