"""What does a run of surprise say, beyond a score a token? Read off its tables, for table, page and figures alike.

1. `by_variant`: how each variant's scores run, and how far they agree with those of the first variant.
2. `fates`: for each token of a trace, whether it stays to the end or at which refresh it leaves.
3. `staleness`: how far the order of the tokens held at a refresh is still that of an earlier one.

Rank correlations are Spearman's inside a trace; what is said of several traces is their mean.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pandas as pd

from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.schemas import SURPRISE
from kvlens.stats import spearman
from kvlens.wording import counted

LEAST_TOKENS = 8  # for a rank correlation to mean anything


def surprise_run(run: Run | str | Path) -> Run:
    """The run of surprise behind `run`, loaded when it is a path.

    Raises: InputError when it is of another schema, or several runs stacked.
    """
    run = run if isinstance(run, Run) else load(run)
    if run.schema != SURPRISE or "runs" in run.meta:
        raise InputError(f"viewing '{run.path}' failed: it is no single run of surprise", "give the folder of one")
    return run


def variants(run: Run) -> list[str]:
    """The variants of a run, by name, in the order they were asked for."""
    return list(run.meta["config"]["variants"])


def chosen_variant(run: Run, variant: str | None) -> str:
    """This variant of the run, by default its first. Raises: InputError where it has none of that name."""
    names = variants(run)
    if variant is not None and variant not in names:
        raise InputError(f"'{run.path}' has no variant {variant!r:.80}", f"its variants are {'; '.join(names)}")
    return names[0] if variant is None else variant


def chosen_traces(run: Run, trace_id: str | None) -> list[str]:
    """This trace of the run, by default all. Raises: InputError with names like it where there is none."""
    known = list(map(str, run.traces.trace_id))
    if trace_id is None:
        return known
    if not isinstance(trace_id, str) or trace_id not in known:
        near = get_close_matches(str(trace_id), known, n=3, cutoff=0.3) or known[:3]
        raise InputError(f"'{run.path}' has no trace '{trace_id}'", f"its traces are named like {', '.join(near)}")
    return [trace_id]


def about(run: Run) -> dict[str, str]:
    """What a reader must know before a number of this run, in words."""
    meta = run.meta
    model, cycle = meta["model"], meta["config"]["cycle"]
    facts = {
        "model": model["name"] + (f" ({model['note']})" if model.get("note") else ""),
        "precision": f"{meta['dtype']} on {meta['device']}, attention {meta['attention'] or 'default'}",
        "traces": f"{counted(len(run.traces), 'trace')}, {len(run.tokens):,} tokens of prompt and reasoning",
    }
    if cycle is not None:
        facts["refreshed"] = (
            f"every {cycle['every']:,} tokens to {cycle['budget']:,} ({cycle['recent']:,} recent among them) and the "
            f"first {cycle['frozen']:,}"
        )
    return facts | {"made": f"{meta['finished']} with kvlens {meta['versions']['kvlens']}, seed {meta['seed']}"}


def by_variant(run: Run, trace_id: str | None = None) -> pd.DataFrame:
    """A row for each variant: n_tokens with a score, its median, and `rho_with_first`, the first variant's scores.

    With refreshes also `n_refreshes`, the share of tokens `evicted` by the last one (of those that had gone in), and
    `rho_with_next`, that of held tokens' scores with those at the next refresh.
    """
    ids, rows = chosen_traces(run, trace_id), []
    first = variants(run)[0]
    for name in variants(run):
        scores = run.scores[(run.scores.variant == name) & run.scores.trace_id.isin(ids)]
        known = scores.score.dropna()
        row = {"variant": name, "n_tokens": len(known), "median": float(known.median()) if len(known) else np.nan}
        row["rho_with_first"] = _mean([agreement(run, one, first, name) for one in ids])
        if "refreshes" in run.tables:
            last = [_last(run, one, name) for one in ids]
            row["n_refreshes"] = int(sum(step.refresh.iloc[0] + 1 for step in last if len(step)))
            n_seen = sum(int(step.n_seen.iloc[0]) for step in last if len(step))
            row["evicted"] = 1 - sum(int(step.kept.sum()) for step in last) / n_seen if n_seen else 0.0
            steps = staleness(run, name, ids)
            row["rho_with_next"] = _mean(steps.rho[steps.apart == 1].tolist())
        rows.append(row)
    return pd.DataFrame(rows)


def agreement(run: Run, trace_id: str, one: str, other: str) -> float:
    """Spearman's rho of two variants over the tokens of a trace that both score; NaN under eight of them."""
    chosen_traces(run, trace_id)
    scores = run.scores[run.scores.trace_id == trace_id]
    one, other = chosen_variant(run, one), chosen_variant(run, other)
    table = scores.pivot(index="pos", columns="variant", values="score")
    return _rho(table[one].to_numpy(), table[other].to_numpy())


def fates(run: Run, trace_id: str, variant: str) -> pd.DataFrame:
    """A row for each token of the trace: pos, token, segment, score, and the refresh it left at (<NA>: it stays).

    `last_score` is the score at the last refresh that saw it; `refresh` and `last_score` are there with refreshes only.
    """
    chosen_traces(run, trace_id)
    variant = chosen_variant(run, variant)
    tokens = run.tokens[run.tokens.trace_id == trace_id].sort_values("pos")
    scores = run.scores[(run.scores.trace_id == trace_id) & (run.scores.variant == variant)]
    found = tokens[["pos", "token", "segment"]].merge(scores[["pos", "score"]], on="pos", how="left")
    if "refreshes" not in run.tables:
        return found
    steps = _steps(run, trace_id, variant)
    last = steps.sort_values("refresh").groupby("pos").tail(1).set_index("pos")
    left = last.refresh[~last.kept].astype("Int32")
    return found.assign(refresh=found.pos.map(left).astype("Int32"), last_score=found.pos.map(last.score))


def steps_of(run: Run, trace_id: str, variant: str) -> pd.DataFrame:
    """A row for each refresh: refresh, n_seen, n_held before it, n_left, and the text that left."""
    steps = _steps(run, trace_id, variant)
    texts = run.tokens[run.tokens.trace_id == trace_id].set_index("pos").token
    rows = []
    for (refresh, n_seen), step in steps.groupby(["refresh", "n_seen"]):
        gone = step.pos[~step.kept].sort_values()
        rows.append((int(refresh), int(n_seen), len(step), len(gone), _pieces(texts, gone.to_numpy())))
    return pd.DataFrame(rows, columns=["refresh", "n_seen", "n_held", "n_left", "left"])


def staleness(run: Run, variant: str, trace_ids: list[str] | None = None) -> pd.DataFrame:
    """A row for each trace and distance: Spearman's rho of scores that many refreshes apart, over tokens held at both.

    Columns: trace_id, apart (refreshes), rho (mean over the trace's pairs of refreshes), n_pairs.
    """
    rows = []
    for trace_id in chosen_traces(run, None) if trace_ids is None else trace_ids:
        steps = _steps(run, trace_id, variant)
        table = steps.pivot(index="pos", columns="refresh", values="score").to_numpy(dtype=float)
        for apart in range(1, table.shape[1]):
            found = [_rho(table[:, k], table[:, k + apart]) for k in range(table.shape[1] - apart)]
            known = [rho for rho in found if not np.isnan(rho)]
            if known:
                rows.append((trace_id, apart, float(np.mean(known)), len(known)))
    return pd.DataFrame(rows, columns=["trace_id", "apart", "rho", "n_pairs"])


def top_tokens(run: Run, trace_id: str | None, variant: str | None, n: int, *, lowest: bool = False) -> pd.DataFrame:
    """The `n` tokens of the highest score: the future says least about them; or those of the lowest, which leave first.

    Raises: InputError where n is no count.
    """
    if type(n) is not int or n < 1:
        raise InputError(f"cannot list {n!r} tokens", "give a whole number from 1 on")
    name = chosen_variant(run, variant)
    found = [fates(run, one, name).assign(trace_id=one) for one in chosen_traces(run, trace_id)]
    ranked = pd.concat(found, ignore_index=True).dropna(subset="score")
    return ranked.sort_values("score", ascending=lowest, kind="stable").head(n).reset_index(drop=True)


def _steps(run: Run, trace_id: str, variant: str) -> pd.DataFrame:
    """The refreshes of one trace under one variant. Raises: InputError where there are none, or no such variant."""
    if "refreshes" not in run.tables:
        raise InputError(f"'{run.path}' has no refreshes", "run kvlens surprise with a budget: -J N")
    chosen_traces(run, trace_id)
    variant = chosen_variant(run, variant)
    return run.refreshes[(run.refreshes.trace_id == trace_id) & (run.refreshes.variant == variant)]


def _last(run: Run, trace_id: str, variant: str) -> pd.DataFrame:
    steps = _steps(run, trace_id, variant)
    return steps[steps.refresh == steps.refresh.max()]


def _pieces(texts: pd.Series, positions: np.ndarray) -> str:
    """The text of these positions, those that do not follow each other set apart."""
    groups = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return " … ".join("".join(texts.loc[group]) for group in groups if len(group))


def _rho(one: np.ndarray, other: np.ndarray) -> float:
    known = ~(np.isnan(one) | np.isnan(other))
    if known.sum() < LEAST_TOKENS:
        return float("nan")
    return float(spearman(one[known, None].astype(float), other[known].astype(float))[0])


def _mean(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")
