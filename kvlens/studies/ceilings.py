"""How much could any selection of cached keys gain, once softmax weights are forced? The run behind `kvlens ceilings`.

1. Read and tokenise the traces, load and check the model; a trace too short for the largest budget is left out.
2. Trace by trace: one forward pass on the model's own attention; the sampled rows of each layer are checked against
   what the layer put out, searched and dropped before the next layer runs (`probe/rows.py`, `row_tables.py`). A trace
   is a part: one that is there is never measured again.
3. With `cross_entropy`: the flat cells of one half of the traces, as many random cells, and all are made to put out
   m_A of the largest weights on the other half: does the error matter to the model?
4. Merge the parts, and sum them up beside their nulls (`summary.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlens import model as models
from kvlens.discover.ceilings import BUDGETS
from kvlens.discover.inputs import halves
from kvlens.discover.nulls import NULLS
from kvlens.discover.subsets import require_kernel
from kvlens.errors import InputError
from kvlens.linear import kernel
from kvlens.loading import Run
from kvlens.model import Model
from kvlens.probe import budget as memory
from kvlens.probe.forced import compare, random_cells, top_mass
from kvlens.probe.inputs import Note, Tick, ignore, start, traces_of
from kvlens.probe.row_block import RowBlock, RowCheck, require_match
from kvlens.probe.rows import ROWS_PER_HEAD, choose_queries, read_rows
from kvlens.probe.settings import check_values
from kvlens.records import Tokens, Trace
from kvlens.schemas import CEILINGS
from kvlens.stats import over_traces
from kvlens.store import RunFolder
from kvlens.studies.row_tables import TABLES, Tables, measure_block, predictor_budget
from kvlens.studies.summary import cell_table, summarise
from kvlens.wording import counted

MOST_BUDGET, MOST_ROWS = 256, 1024  # larger ones take gigabytes and minutes a row


def ceilings(
    traces: str | Path | Sequence[Trace],
    model: str | Model = models.DEFAULT_MODEL,
    out: str | Path = "runs/ceilings",
    *,
    budgets: Sequence[int] = BUDGETS,
    rows_per_head: int = ROWS_PER_HEAD,
    nulls: str = "all",
    cross_entropy: bool = False,
    chat: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    seed: int = 0,
    limit: int | None = None,
    beyond_context: bool = False,
    force: bool = False,
    progress: Tick | None = None,
    note: Note | None = None,
) -> Run:
    """The finished ceilings run at `out`: how close the largest weights come to the best kept set of every sampled row.

    Tables: `rows` (a line for each row and budget), `nulls`, `cells`, `statistics`, `excess`, `groups`, and with
    `cross_entropy` a table of that name; `documents["summary"]` is `summary.json`. Errors are in the units of values.

    Args:
        traces: a trace file or dataset (see `read_traces`), or traces at hand; prompt, reasoning and target all count.
        model: what `-m` takes, or a loaded `Model` (then device, dtype and attention are its own).
        budgets: keys kept.
        rows_per_head: query rows of each head, layer and trace.
        nulls: `all` or `none`.
        progress: called with (layers done, layers in all); note: told what lies ahead.

    Raises: InputError, EnvironmentLacks, ModelRefused; nothing already written is lost.
    Cost: one forward pass a trace, and 280,000 subsets a row for the four default budgets, four times with the nulls.
    Source: ContourKV (forced weights); the nulls, intervals and rivals are ours.
    """
    asked = _checked(budgets, rows_per_head, nulls, cross_entropy)
    kept: dict[str, Any] = {"chat": chat, "beyond_context": beyond_context}
    check_values({**kept, "seed": seed})
    require_kernel()
    ready = start(
        traces_of(traces, limit),
        model,
        out,
        {"target_tokens": 1, **kept},
        device=device,
        dtype=dtype,
        attention=attention,
    )
    queries, skipped = _choose(ready.model, ready.everything, asked, seed)

    def measure(run: RunFolder) -> None:
        for trace_id, reason in skipped.items():
            run.skip(trace_id, reason)
        chosen = [tokens for tokens in ready.everything if tokens.trace.id in queries]
        Survey(run, ready.model, asked, progress or ignore, note or ignore).do(chosen, queries)

    return ready.run(out, measure, schema=CEILINGS, config=asked | kept, seed=seed, force=force, note=note)


def _checked(budgets: Sequence[int], rows_per_head: int, nulls: str, cross_entropy: bool) -> dict[str, Any]:
    """The options as `run.json` keeps them. Raises: InputError for one that cannot be."""
    several = isinstance(budgets, (list, tuple)) and len(budgets) > 0
    if not several or not all(type(budget) is int and 1 <= budget <= MOST_BUDGET for budget in budgets):
        raise InputError(f"budgets {budgets!r} are no numbers of keys", f"give whole numbers from 1 to {MOST_BUDGET}")
    kept = sorted(set(budgets))
    if type(rows_per_head) is not int or not 1 <= rows_per_head <= MOST_ROWS:
        raise InputError(f"{rows_per_head!r} rows a head", f"give a whole number from 1 to {MOST_ROWS}")
    if nulls not in ("all", "none"):
        raise InputError(f"nulls {nulls!r} do not exist", "give all or none")
    if type(cross_entropy) is not bool:
        raise InputError(f"cross_entropy {cross_entropy!r} is of the wrong kind", "give True or False")
    names = list(NULLS) if nulls == "all" else []
    return {"budgets": kept, "rows_per_head": rows_per_head, "nulls": names, "cross_entropy": cross_entropy}


def _choose(
    model: Model, everything: Sequence[Tokens], asked: dict[str, Any], seed: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """By trace, the sampled queries; and why the other traces, which have too few, are left out.

    Raises: InputError when none is left, or one alone where held-out ones are asked for.
    """
    rows, least_keys = asked["rows_per_head"], max(asked["budgets"]) + 1
    narrow = min((window for window in model.sliding if window is not None), default=least_keys)
    if narrow < least_keys:
        raise InputError(
            f"a budget of {least_keys - 1} keys: a sliding window of {model.name} shows no query more than {narrow}",
            f"give budgets below {narrow}",
        )
    queries: dict[str, np.ndarray] = {}
    skipped: dict[str, str] = {}
    for tokens in everything:
        try:
            found = choose_queries(model, tokens, rows_per_head=rows, seed=seed, least_keys=least_keys)
        except InputError as error:
            refusal = error
            skipped[tokens.trace.id] = error.message
        else:
            queries[tokens.trace.id] = found
    if not queries:
        raise refusal
    if asked["cross_entropy"] and len(queries) < 2:
        raise InputError(
            f"the cross-entropy of held-out traces needs two traces or more, and there is {len(queries)} to use",
            "give more or longer ones, or leave the cross-entropy out",
        )
    return queries, skipped


class Survey:
    """What a ceilings run works with while it runs."""

    def __init__(self, run: RunFolder, model: Model, asked: dict[str, Any], progress: Tick, note: Note) -> None:
        self.run, self.model, self.progress, self.note = run, model, progress, note
        self.budgets: list[int] = asked["budgets"]
        self.rows_per_head: int = asked["rows_per_head"]
        self.nulls: list[str] = asked["nulls"]
        self.cross_entropy: bool = asked["cross_entropy"]
        self.seed = int(run.state["seed"])
        self.tables = [name for name in TABLES if name != "nulls" or self.nulls]

    def do(self, chosen: Sequence[Tokens], queries: dict[str, np.ndarray]) -> None:
        """Nothing; measures the traces that the run lacks, at these queries, and finishes it."""
        if self.run.plan is None:
            self.run.save_plan({"checks": {}})
        ahead = [tokens for tokens in chosen if not self._is_there(tokens)]
        missing = {tokens.trace.id for tokens in ahead}
        n_layers = self.model.n_layers
        if ahead:
            n_rows = (
                sum(queries[tokens.trace.id].size for tokens in ahead) * self.model.n_heads // self.model.n_kv_heads
            )
            under = f", each real and under {counted(len(self.nulls), 'null')}" if self.nulls else ""
            before = f", {len(chosen) - len(ahead):,} done before" if len(ahead) < len(chosen) else ""
            budgets = counted(len(self.budgets), "budget")
            self.note(f"{n_rows:,} rows of {counted(len(ahead), 'trace')} at {budgets}{under}{before}")
        for number, tokens in enumerate(chosen):
            self.progress(number * n_layers, len(chosen) * n_layers)
            if tokens.trace.id in missing:
                self._measure(tokens, queries[tokens.trace.id], number, len(chosen))
        self.progress(len(chosen) * n_layers, len(chosen) * n_layers)
        self._finish(chosen)

    def _is_there(self, tokens: Tokens) -> bool:
        """Whether an earlier start of this run measured the trace."""
        known = tokens.trace.id in self.run.plan["checks"]
        return known and all(self.run.has_part(table, tokens.trace.id) for table in self.tables)

    def _measure(self, tokens: Tokens, queries: np.ndarray, number: int, n_traces: int) -> None:
        """Nothing; writes the parts of one trace, whose rows are the model's own."""
        parts: list[Tables] = []

        def take(block: RowBlock) -> None:
            parts.append(measure_block(block, self.budgets, self.nulls, self.seed))
            self.progress(number * self.model.n_layers + len(parts), n_traces * self.model.n_layers)

        check = read_rows(self.model, tokens, queries, take)
        require_match(check, self.model)
        for table in self.tables:
            names = parts[0][table]
            columns = {name: np.concatenate([part[table][name] for part in parts]) for name in names}
            self.run.write_part(table, tokens.trace.id, columns)
        plan = self.run.plan
        self.run.save_plan(plan | {"checks": plan["checks"] | {tokens.trace.id: asdict(check)}})

    def _finish(self, chosen: Sequence[Tokens]) -> None:
        """Nothing; the cells, the cross-entropy and the summary, then the run is complete."""
        ids = [tokens.trace.id for tokens in chosen]
        keys = {table: list(ids) for table in self.tables}
        read = {
            table: pd.concat([self.run.read_part(table, trace_id) for trace_id in ids], ignore_index=True)
            for table in self.tables
        }
        at = predictor_budget(self.budgets)
        one = read["rows"][read["rows"].budget == at]
        summary = summarise(read, self.budgets, at, self.seed)
        self.run.write_part("cells", "all", cell_table(one))
        keys["cells"] = ["all"]
        checks = [RowCheck(**self.run.plan["checks"][trace_id]) for trace_id in ids]
        summary["check"] = asdict(sum(checks, RowCheck()))
        if self.cross_entropy:
            table, summary["cross_entropy"] = self._compare(chosen, one, at)
            self.run.write_part("cross_entropy", "all", table)
            keys["cross_entropy"] = ["all"]
        self.run.finish(
            keys,
            counts={"traces": len(ids), "rows": summary["n_rows"], "instances": summary["n_instances"]},
            peak_bytes=memory.peak_bytes(self.model.device),
            results={"linear_kernel": kernel()},
            documents={"summary": {"schema": CEILINGS, "model": self.run.state["model"], **summary}},
        )

    def _compare(self, chosen: Sequence[Tokens], one: pd.DataFrame, at: int) -> tuple[pd.DataFrame, dict[str, Any]]:
        """The cross-entropy of each held-out document under every arm, and what each arm costs in nats a token."""
        half = halves([tokens.trace.id for tokens in chosen], self.seed)
        choosing = {tokens.trace.id for tokens, first in zip(chosen, half, strict=True) if first}
        flat = np.zeros((self.model.n_layers, self.model.n_heads), dtype=bool)
        table = cell_table(one[one.trace_id.isin(choosing)])
        flat[table.loc[table.flat, "layer"], table.loc[table.flat, "head"]] = True
        arms = {"all": np.ones_like(flat)}
        if flat.any():
            arms = {"flat": flat, "random": random_cells(flat, self.seed)} | arms
        held_out = [tokens for tokens, first in zip(chosen, half, strict=True) if not first]
        self.note(
            f"cross-entropy of {counted(len(held_out), 'held-out trace')}, {at} keys kept in {flat.sum()} flat cells"
        )
        found = compare(self.model, held_out, top_mass(at), arms)
        rows = pd.DataFrame(
            {"trace_id": one.trace_id, "n_tokens": one.n_tokens, "unchanged_nats": one.unchanged, "arm": arm}
            | {"n_cells": int(arms[arm].sum()), "nats": nats}
            for one in found
            for arm, nats in one.replaced.items()
        )
        interval = partial(over_traces, seed=self.seed)
        costs = {}
        for arm, part in rows.groupby("arm", sort=False):
            mean = interval((part.nats - part.unchanged_nats).to_numpy())
            costs[str(arm)] = {"n_cells": int(part.n_cells.iloc[0]), "added_nats": float(mean.mean)}
            costs[str(arm)] |= {"low": float(mean.low), "high": float(mean.high)}
        return rows, {"budget": at, "n_documents": len(found), "arms": costs}
