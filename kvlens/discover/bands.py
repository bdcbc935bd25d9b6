"""In which layers does a signal go with importance? Bands discovered on one half of the traces, confirmed on the other.

1. Per trace and layer: Spearman of the signal with the label over the reasoning tokens that count, position partialled
   out. The trace is the unit from here on.
2. Per layer, over all traces: the mean with a bootstrap interval over traces, and p by sign flips (of this layer
   alone: what holds over all layers is said by the bands).
3. Discover on a seeded half of the traces: cluster-based permutation over layers (`clusters.py`). Stability: the same
   search with each trace left out in turn.
4. Confirm on the other half: the mean over the band's layers. A band is confirmed when its interval leaves out 0 on the
   band's own side. The verdict is "bands" when one is. The discovered rho is too large (it was selected), the confirmed
   one is not.
5. Under twelve traces nothing can be confirmed: all traces discover, and the verdict says so.

`pooled_rho`, over the tokens of all traces at once and with the trend over positions left in, is what papers show; no
decision uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvlens.discover.clusters import FORMING_LEVEL, Cluster, depths, find_bands, stability
from kvlens.discover.derived import open_derived, sources
from kvlens.discover.inputs import (
    LEAST_TOKENS,
    LEAST_TRACES,
    Labelled,
    Pair,
    halves,
    read_pair,
)
from kvlens.discover.movement import movement, read_bands
from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.schemas import BANDS
from kvlens.stats import (
    LEVEL,
    N_DRAWS,
    POSITION_DEGREE,
    OverTraces,
    over_traces,
    partial_spearman,
    sign_flip_p,
    spearman,
)
from kvlens.wording import counted

DEFAULT_SIGNAL = "hidden_change_rolling"
BEFORE, AFTER = "hidden_change", "hidden_change_z"


def bands(
    labels: Run | str | Path,
    signals: Run | str | Path,
    out: str | Path = "runs/bands",
    *,
    signal: str = DEFAULT_SIGNAL,
    compare: Run | str | Path | None = None,
    audit_only: bool = False,
    seed: int = 0,
    force: bool = False,
) -> Run:
    """The finished bands run at `out`; its `documents["bands"]` is `bands.json`.

    Args:
        labels, signals: a label run and a signals run of the same model and traces.
        signal: a per-layer signal of that run.
        compare: a bands run, or its `bands.json`: does the band move between the two?
        audit_only: of a label run made with a screen, use the audit windows.

    Raises: InputError when the runs do not fit or no trace is left; EnvironmentLacks without scipy.
    Cost: seconds; reads one signal (three for the trend over positions) into memory.
    """
    pair = read_pair(labels, signals, audit_only=audit_only)
    check_per_layer(pair, signal)
    profile = _profile(pair, signal)
    other = None if compare is None else read_bands(compare)
    config = {"signal": signal, "audit_only": audit_only, "compare": None if other is None else other["hash"]}
    made: dict[str, Any] = {"config": config, "input_hash": pair.input_hash(), "seed": seed, "force": force}
    with open_derived(out, pair.labels, pair.signals_path, schema=BANDS, **made) as run:
        if not run.complete:
            document = _document(pair, profile, other, seed)
            for trace_id, reason in profile.skipped.items():
                run.skip(trace_id, reason)
            counts = {"traces": document["n_traces"], "tokens": document["n_tokens"]}
            run.finish({}, counts=counts, results=sources(pair), documents={"bands": document})
    return load(out)


def check_per_layer(pair: Pair, signal: str) -> None:
    """Nothing; raises InputError when the signals run has no such signal, or one without layers."""
    known = [name for name in pair.fields if pair.per_layer(name)]
    if signal not in known:
        what = "is no signal with layers" if signal in list(pair.fields) else "is not there"
        hint = f"it has {', '.join(known)}" if known else "observe per-layer signals, such as hidden_change_rolling"
        raise InputError(f"signal {signal!r} {what} in '{pair.signals_path}'", hint)


@dataclass(frozen=True)
class Profile:
    """One signal with the traces in which it has a rank correlation with the label, and why others have none."""

    signal: str
    values: Float[np.ndarray, "row layer"]
    traces: list[Labelled]
    rho: Float[np.ndarray, "trace layer"]
    skipped: dict[str, str]

    def usable(self) -> list[Bool[np.ndarray, " pos"]]:
        """By trace, which of its tokens have a finite signal in every layer."""
        return [usable_rows(trace, self.values) for trace in self.traces]


def _profile(pair: Pair, signal: str) -> Profile:
    """The rank correlations of a signal. Raises: InputError when no trace has any."""
    values = pair.read(signal)
    rho = np.array([rho_of(trace, values) for trace in pair.traces])
    defined = np.isfinite(rho).any(1)
    if not defined.any():
        raise InputError(
            f"signal {signal!r} has no rank correlation with the label in any of {len(rho)} traces: it is constant, "
            "missing, or explained by position",
            "choose another signal",
        )
    reason = f"{signal} is constant, missing or explained by position in every layer"
    skipped = {trace.trace_id: reason for trace, usable in zip(pair.traces, defined, strict=True) if not usable}
    kept = [trace for trace, usable in zip(pair.traces, defined, strict=True) if usable]
    return Profile(signal, values, kept, rho[defined], pair.skipped | skipped)


def _document(pair: Pair, profile: Profile, other: Mapping[str, Any] | None, seed: int) -> dict[str, Any]:
    """What `bands.json` holds."""
    rho, traces = profile.rho, profile.traces
    discover = halves([trace.trace_id for trace in traces], seed)
    if len(traces) < LEAST_TRACES:
        discover[:] = True
    found = []
    for cluster in find_bands(rho[discover], seed):
        share, layers = stability(rho[discover], cluster, seed)
        found.append({**tested(rho, discover, cluster, seed), "stability": {"found": share, "layers": layers}})
    every_layer = _layers(profile, seed)
    document = {
        "schema": BANDS,
        "signal": profile.signal,
        "intervention": ", ".join(sorted(pair.labels.windows.intervention.unique())),
        "model": {**pair.labels.meta["model"], "n_layers": rho.shape[1]},
        "verdict": "bands" if any(band["confirmed"] for band in found) else "no band",
        "reason": _reason(found, len(traces), int(discover.sum())),
        "bands": found,
        "n_traces": len(traces),
        "n_discover": int(discover.sum()),
        "n_confirm": int((~discover).sum()),
        "n_tokens": int(sum(usable.sum() for usable in profile.usable())),
        "n_tokens_without_signal": int(sum((~usable).sum() for usable in profile.usable())),
        "n_skipped": len(profile.skipped),
        **_sizes(every_layer),
        "layers": every_layer,
        "position_trend": _trends(pair, profile, seed),
        "traces": [
            {"trace_id": trace.trace_id, "half": "discover" if half else "confirm", "rho": row}
            for trace, half, row in zip(traces, discover, rho, strict=True)
        ],
        "settings": {
            "seed": seed,
            "position_degree": POSITION_DEGREE,
            "forming_level": FORMING_LEVEL,
            "family_wise_level": LEVEL,
            "n_draws": N_DRAWS,
        },
    }
    if other is not None:
        document["compare"] = movement(document, other, seed)
    return document


def usable_rows(trace: Labelled, values: Float[np.ndarray, "row layer"]) -> Bool[np.ndarray, " pos"]:
    """Which of the trace's tokens have a finite signal in every layer."""
    return np.asarray(np.isfinite(values[trace.rows]).all(1))


def rho_of(trace: Labelled, values: Float[np.ndarray, "row layer"]) -> Float[np.ndarray, " layer"]:
    """The rank correlation of each layer with the label in one trace, position partialled out; NaN without meaning."""
    usable = usable_rows(trace, values)
    if usable.sum() < LEAST_TOKENS:
        return np.full(values.shape[1], np.nan)
    return partial_spearman(values[trace.rows[usable]], trace.effect[usable], trace.pos[usable])


def tested(
    rho: Float[np.ndarray, "trace layer"], discover: Bool[np.ndarray, " trace"], cluster: Cluster, seed: int
) -> dict[str, Any]:
    """One band: where it is, how it was found, and whether the other half of the traces shows it."""
    with np.errstate(invalid="ignore"):
        layers = rho[:, cluster.start : cluster.stop]
        mean = np.nansum(layers, 1) / np.isfinite(layers).sum(1)
    confirm = OverTraces(*[np.array(np.nan)] * 4) if discover.all() else over_traces(mean[~discover], seed=seed)
    depth_start, depth_stop = depths(cluster.start, cluster.stop, rho.shape[1])
    return {
        "sign": cluster.sign,
        "start": cluster.start,
        "stop": cluster.stop,
        "depth_start": depth_start,
        "depth_stop": depth_stop,
        "p_value": cluster.p_value,
        "discover_rho": over_traces(mean[discover], seed=seed).mean,
        "confirm_rho": confirm.mean,
        "confirm_low": confirm.low,
        "confirm_high": confirm.high,
        "confirmed": bool(confirm.low > 0 if cluster.sign > 0 else confirm.high < 0),
    }


def _reason(found: list[dict[str, Any]], n_traces: int, n_discover: int) -> str:
    """Why the verdict is what it is."""
    where = f"in {counted(n_discover, 'trace')}"
    some = f"{len(found)} found {where}" if found else f"none found {where}"
    if n_traces < LEAST_TRACES:
        return f"cannot confirm with {counted(n_traces, 'trace')}: {LEAST_TRACES} are needed ({some})"
    confirmed = sum(band["confirmed"] for band in found)
    return f"{some}, {confirmed} confirmed in {n_traces - n_discover} others" if found else some


def _sizes(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The layer with the largest mean, which was chosen for it, and how wide intervals are: what could be missed."""
    largest = max(layers, key=lambda row: abs(row["mean_rho"]) if np.isfinite(row["mean_rho"]) else -1.0)
    widths = np.array([(row["high"] - row["low"]) / 2 for row in layers])
    known = widths[np.isfinite(widths)]
    return {
        "largest": {name: largest[name] for name in ("layer", "mean_rho", "low", "high")},
        "half_width": float(np.median(known)) if len(known) else None,
    }


def _layers(profile: Profile, seed: int) -> list[dict[str, Any]]:
    """The numbers of each layer over all traces."""
    pairs = list(zip(profile.traces, profile.usable(), strict=True))
    rows = np.concatenate([trace.rows[usable] for trace, usable in pairs])
    effects = np.concatenate([trace.effect[usable] for trace, usable in pairs])
    columns = {**_columns(over_traces(profile.rho, seed=seed)), "p_value": sign_flip_p(profile.rho, seed)}
    return _by_layer(columns | {"pooled_rho": spearman(profile.values[rows], effects)})


def _trends(pair: Pair, profile: Profile, seed: int) -> dict[str, list[dict[str, Any]]]:
    """By signal, Spearman of each layer with the position: of this signal, and before and after the z-score."""
    both = all(name in pair.fields and pair.per_layer(name) for name in (BEFORE, AFTER))
    found = {}
    for name in dict.fromkeys([*((BEFORE, AFTER) if both else ()), profile.signal]):
        values = profile.values if name == profile.signal else pair.read(name)
        rows = []
        for trace in profile.traces:
            usable = usable_rows(trace, values)
            rows.append(spearman(values[trace.rows[usable]], trace.pos[usable].astype(float)))
        found[name] = _by_layer(_columns(over_traces(np.array(rows), seed=seed)))
    return found


def _columns(found: OverTraces) -> dict[str, np.ndarray]:
    return {"mean_rho": found.mean, "low": found.low, "high": found.high, "n_traces": found.n}


def _by_layer(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """One object a layer from one array a column."""
    n_layers = len(next(iter(columns.values())))
    return [{"layer": layer, **{name: column[layer] for name, column in columns.items()}} for layer in range(n_layers)]
