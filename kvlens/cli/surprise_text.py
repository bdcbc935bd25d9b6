"""A run of surprise as a table and as a document, for `kvlens surprise` and `kvlens inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens import surprise_facts
from kvlens.cli.output import columns, number, table

if TYPE_CHECKING:
    import pandas as pd

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
    first = surprise_facts.variants(run)[0]
    headers = ["variant", "scored", "median score", f"rho with {first}", "side bytes a token"]
    headers += ["refreshes", "evicted", "rho with the next refresh"] if cycle else []
    lines = []
    for row in rows.to_dict("records"):
        n_bytes = meta["results"]["n_bytes_a_token"][row["variant"]]
        line = [
            row["variant"],
            f"{row['n_tokens']:,}",
            number(row["median"]),
            number(row["rho_with_first"]),
            f"{n_bytes:,}",
        ]
        if cycle:
            line += [f"{row['n_refreshes']:,}", f"{100 * row['evicted']:.0f} %", number(row["rho_with_next"], "+.3f")]
        lines.append(line)
    return f"{columns(surprise_facts.about(run))}\n\n{table(headers, lines, right=tuple(range(1, len(headers))))}\n"


def tokens_text(run: Run, trace_id: str | None, n: int) -> str:
    """The tokens of the highest and of the lowest score under the run's first variant, in two tables."""
    variant = surprise_facts.variants(run)[0]
    parts = []
    for lowest, words in ((False, "says least about: highest"), (True, "says most about: lowest")):
        top = surprise_facts.top_tokens(run, trace_id, variant, n, lowest=lowest)
        parts.append(f"What the future {words} scores under {variant}\n\n{_tokens(top, trace_id)}")
    return "\n\n".join(parts)


def _tokens(top: pd.DataFrame, trace_id: str | None) -> str:
    """Tokens with their score in the whole text and, with refreshes, when they leave the cache and at which score."""
    import pandas as pd

    from kvlens.page_style import visible

    evicts = "refresh" in top
    fate = ["leaves at", "last score"] if evicts else []
    headers = ["score", "pos", *fate, "segment", *([] if trace_id else ["trace"]), "token"]
    rows = []
    for row in top.to_dict("records"):
        cells = [number(row["score"]), str(row["pos"])]
        if evicts:
            cells += ["stays" if pd.isna(row["refresh"]) else f"refresh {row['refresh']}", number(row["last_score"])]
        where = [] if trace_id else [visible(row["trace_id"])]
        rows.append([*cells, row["segment"], *where, visible(row["token"])])
    return table(headers, rows, right=(0, 1, 3) if evicts else (0, 1))
