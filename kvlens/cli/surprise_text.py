"""A run of surprise as a table and as a document, for `kvlens surprise` and `kvlens inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens import surprise_facts
from kvlens.cli.output import columns, number, table

if TYPE_CHECKING:
    from kvlens.loading import Run


def document(run: Run, trace_id: str | None = None) -> dict[str, Any]:
    """Where the run comes from, and a row for each variant."""
    names = ("schema", "model", "config", "dtype", "device", "attention", "seed", "counts")
    rows = surprise_facts.by_variant(run, trace_id)
    return {name: run.meta[name] for name in names} | {"variants": rows.to_dict("records"), "run": run.path}


def text(run: Run, trace_id: str | None = None) -> str:
    """The same to read."""
    meta, cycle = run.meta, run.meta["config"]["cycle"]
    rows = surprise_facts.by_variant(run, trace_id)
    headers = ["variant", "tokens", "median score", "rho with the first", "bytes a token"]
    headers += ["refreshes", "evicted", "rho with the next refresh"] if cycle else []
    lines = []
    for row in rows.to_dict("records"):
        n_bytes = meta["results"]["n_bytes_a_token"][row["variant"]]
        line = [row["variant"], f"{row['n_tokens']:,}", number(row["median"]), number(row["agreement"]), f"{n_bytes:,}"]
        if cycle:
            line += [f"{row['n_refreshes']:,}", f"{100 * row['evicted']:.0f} %", number(row["staleness"])]
        lines.append(line)
    return f"{columns(surprise_facts.about(run))}\n\n{table(headers, lines, right=tuple(range(1, len(headers))))}\n"


def tokens_text(run: Run, trace_id: str | None, variant: str | None, n: int) -> str:
    """The tokens of the highest score, in a table."""
    import pandas as pd

    from kvlens.page_style import visible

    top = surprise_facts.top_tokens(run, trace_id, variant, n)
    evicts = "refresh" in top
    headers = ["score", "pos", *(["leaves at"] if evicts else []), "segment", *([] if trace_id else ["trace"]), "token"]
    rows = []
    for row in top.to_dict("records"):
        fate = []
        if evicts:
            fate = ["stays" if pd.isna(row["refresh"]) else f"refresh {row['refresh']}"]
        where = [] if trace_id else [visible(row["trace_id"])]
        rows.append([number(row["score"]), str(row["pos"]), *fate, row["segment"], *where, visible(row["token"])])
    return table(headers, rows, right=(0, 1))
