"""How far do two label runs agree on which tokens matter: other interventions, windows, precisions, screens?

1. Per trace, over the tokens that both label (prompt and reasoning; position 0 and what shares a window with it left
   out in both): Spearman of the effects; the share of the top tenth by |effect| of one run that is in the other's (.1
   is chance; effects within the noise floor are ties, broken at random); the share of tokens with the same sign among
   those above both runs' noise floors (.5 is chance).
2. Over traces: means with bootstrap intervals. Tokens inside a trace are not independent.
3. What differs between the two runs is said beside the numbers.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlens.discover.derived import open_derived
from kvlens.discover.inputs import (
    LEAST_TOKENS,
    LEAST_TRACES,
    counted_tokens,
    is_screened,
    label_run,
)
from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.schemas import AGREEMENT
from kvlens.stats import over_traces, spearman, top_chance

TOP = 0.1
MEASURES = ("spearman", "top_tenth_overlap", "sign_agreement")
SEGMENTS = ("prompt", "reasoning")


def compare_labels(
    a: Run | str | Path,
    b: Run | str | Path,
    out: str | Path = "runs/agreement",
    *,
    audit_only: bool = False,
    seed: int = 0,
    force: bool = False,
) -> Run:
    """The finished comparison at `out`: the table `agreement`, a row a trace, and `documents["agreement"]`.

    Args:
        a, b: two label runs of the same texts and tokens.
        audit_only: of a run made with a screen, use the audit windows.

    Raises: InputError when they are one run, have no trace in common, or tokenise one differently.
    """
    runs = [label_run(run, role) for run, role in ((a, "A"), (b, "B"))]
    if runs[0].meta["run_id"] == runs[1].meta["run_id"]:
        raise InputError(f"'{runs[0].path}' and '{runs[1].path}' are the same run", "give two label runs")
    screened = [is_screened(run) for run in runs]
    if audit_only and not any(screened):
        raise InputError("neither run was made with a screen, so there is no audit set", "drop --audit-only")
    tokens = [counted_tokens(run, audit_only and s, SEGMENTS) for run, s in zip(runs, screened, strict=True)]
    rows, skipped = _rows(runs, tokens)
    digest = hashlib.sha256()
    for run in runs:
        digest.update(
            run.meta["tables"]["tokens"]["sha256"].encode() + run.meta["tables"]["windows"]["sha256"].encode()
        )
    config = {"audit_only": audit_only}
    made: dict[str, Any] = {"config": config, "input_hash": digest.hexdigest(), "seed": seed, "force": force}
    with open_derived(out, runs[0], runs[1].path, schema=AGREEMENT, **made) as folder:
        if not folder.complete:
            for trace_id, reason in skipped.items():
                folder.skip(trace_id, reason)
            folder.write_part("agreement", "all", rows)
            counts = {"traces": len(rows), "tokens": int(rows.n_tokens.sum())}
            document = _document(runs, rows, len(skipped), seed)
            folder.finish({"agreement": ["all"]}, counts=counts, documents={"agreement": document})
    return load(out)


def _rows(runs: list[Run], tokens: list[dict[str, pd.DataFrame]]) -> tuple[pd.DataFrame, dict[str, str]]:
    """A row for each trace that both label, and by id why the others have none."""
    noise = [run.traces.set_index("trace_id").noise_nats.fillna(0.0) for run in runs]
    ids = [list(map(str, run.traces.trace_id)) for run in runs]
    common = [trace_id for trace_id in ids[0] if trace_id in set(ids[1])]
    if not common:
        raise InputError(
            f"'{runs[0].path}' and '{runs[1].path}' have no trace in common: {ids[0][:1]} and {ids[1][:1]} come first",
            "compare label runs of the same traces",
        )
    alone = set(ids[0]) ^ set(ids[1])
    skipped = {trace_id: "in one of the runs only" for trace_id in ids[0] + ids[1] if trace_id in alone}
    rows = []
    for trace_id in common:
        _same_tokens(runs, trace_id)
        pair = [one.get(trace_id) for one in tokens]
        known = [set() if one is None else set(one.pos) for one in pair]
        both = sorted(known[0] & known[1])
        if len(both) < LEAST_TOKENS:
            skipped[trace_id] = f"{len(both)} tokens are labelled in both, and {LEAST_TOKENS} are needed"
            continue
        x, y = (one.set_index("pos").effect_nats.loc[both].to_numpy(dtype=float) for one in pair if one is not None)
        floors = [float(floor[trace_id]) for floor in noise]
        sizes = [np.where(np.abs(v) > floor, np.abs(v), 0.0) for v, floor in zip((x, y), floors, strict=True)]
        above = (sizes[0] > 0) & (sizes[1] > 0)
        top_x, top_y = (top_chance(size, TOP) for size in sizes)
        rows.append(
            {
                "trace_id": trace_id,
                "n_tokens": len(both),
                "n_above_noise": int(above.sum()),
                "spearman": float(spearman(x[:, None], y)[0]),
                "top_tenth_overlap": float((top_x * top_y).sum() / top_x.sum()),
                "sign_agreement": float((np.sign(x) == np.sign(y))[above].mean()) if above.any() else np.nan,
            }
        )
    if not rows:
        first, reason = next(iter((i, skipped[i]) for i in common))
        raise InputError(f"no trace can be compared, such as {first!r}: {reason}", "label longer or other traces")
    return pd.DataFrame(rows), skipped


def _same_tokens(runs: list[Run], trace_id: str) -> None:
    """Nothing; raises InputError at the first token that differs."""
    ids, others = (run.tokens[run.tokens.trace_id == trace_id].sort_values("pos").token_id.to_numpy() for run in runs)
    hint = "compare runs of the same traces and tokenizer"
    n = min(len(ids), len(others))
    wrong = np.flatnonzero(ids[:n] != others[:n])
    where = f"trace {trace_id!r}"
    if len(wrong):
        pos = int(wrong[0])
        raise InputError(
            f"{where}, position {pos}: token_id {ids[pos]} in '{runs[0].path}' and {others[pos]} in '{runs[1].path}'",
            hint,
        )
    if len(ids) != len(others):
        raise InputError(
            f"{where} has {len(ids)} tokens in '{runs[0].path}' and {len(others)} in '{runs[1].path}'", hint
        )
    ends = [int((run.tokens[run.tokens.trace_id == trace_id].segment != "target").sum()) for run in runs]
    if ends[0] != ends[1]:
        raise InputError(
            f"{where}: the target starts at position {ends[0]} in '{runs[0].path}' and at {ends[1]} in "
            f"'{runs[1].path}'",
            "compare labels of the same target",
        )


def _document(runs: list[Run], rows: pd.DataFrame, n_skipped: int, seed: int) -> dict[str, Any]:
    """What `agreement.json` holds."""
    found = {}
    for name in MEASURES:
        mean = over_traces(rows[name].to_numpy(dtype=float), seed=seed)
        found[name] = {"mean": mean.mean, "low": mean.low, "high": mean.high, "n_traces": mean.n}
    return {
        "schema": AGREEMENT,
        "a": runs[0].path,
        "b": runs[1].path,
        "differences": differences(*(run.meta for run in runs)),
        **found,
        "n_traces": len(rows),
        "n_tokens": int(rows.n_tokens.sum()),
        "n_skipped": n_skipped,
        "few_traces": len(rows) < LEAST_TRACES,
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What differs between two runs by their `run.json`: the value in each, by name."""

    def facts(meta: dict[str, Any]) -> dict[str, Any]:
        model = {"model": meta["model"]["name"], "model fingerprint": meta["model"]["fingerprint"]}
        return {**meta["config"], **model, **{name: meta[name] for name in ("dtype", "device", "attention", "seed")}}

    here, there = facts(a), facts(b)
    return {
        name: {"a": here.get(name), "b": there.get(name)} for name in here | there if here.get(name) != there.get(name)
    }
