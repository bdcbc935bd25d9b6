"""An audit in words: one table for each kind of visibility, since the two are not compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlens.auditing.visibility import AGNOSTIC, AWARE
from kvlens.cli.output import columns, number, table
from kvlens.loading import Run
from kvlens.wording import counted, size

WORDS = {
    AGNOSTIC: "compressed before the question was seen (query_agnostic)",
    AWARE: "compressed after what is asked was seen (query_aware)",
}
HEADERS = (
    *("method", "reduce", "claimed", "held", "side claimed", "side held", "peak", "KL nats", "agree"),
    "verdict",
)
LEGEND = (
    "claimed, held: keys and values, and their share of the full cache's. side: the method's own state beside them\n"
    "(statistics, queries, positions). A claim is met where held + side held is within 5 % of claimed + side claimed."
)


def text(run: Run) -> str:
    """What `kvlens audit` answers."""
    found = run.documents["audit"]
    parts = []
    for kind, words in WORDS.items():
        rows = [one for one in found["rows"] if one["visibility"] == kind]
        if not rows:
            continue
        full = max((one["full_bytes"] or 0 for one in rows), default=0)
        parts.append(f"{words}; every token's keys and values: {size(full)} on {counted(rows[0]['n_texts'], 'text')}")
        parts.append(table(HEADERS, [_line(one) for one in rows], right=tuple(range(2, len(HEADERS) - 1))))
    parts.append(LEGEND)
    if found["differences"]:
        headers = ("method", "KL nats before − after", "agreement before − after")
        lines = [
            [
                one["method"],
                number(one["kl_nats_before_less_after"], "+.4f"),
                number(one["next_token_agreement_before_less_after"], "+.3f"),
            ]
            for one in found["differences"]
        ]
        parts.append("what it is worth to compress after the question\n" + table(headers, lines, right=(1, 2)))
    return "\n\n".join([*parts, columns({"run": run.path})])


def _line(row: Mapping[str, Any]) -> list[str]:
    if row["claimed_bytes"] is None:
        return [row["method"], row.get("reduce") or "", *[""] * (len(HEADERS) - 3), row["verdict"]]
    said = row["verdict"] + (" (simulated)" if row["simulated"] else "")
    said += f", {row['n_refused']} refused" if row["n_refused"] else ""
    said += f"; {row['note']}" if row.get("note") else ""
    side = row.get("claimed_side_bytes")  # audits of an earlier kvlens did not tell it from the rest
    peak = "" if row["peak_bytes"] is None else size(row["peak_bytes"])
    return [
        row["method"],
        row.get("reduce") or "",
        _share(row["claimed_bytes"] - (side or 0), row["full_bytes"]),
        _share(row["physical_bytes"] - row["side_bytes"], row["full_bytes"]),
        "in claimed" if side is None else size(side),
        size(row["side_bytes"]),
        peak,
        number(row["kl_nats"], ".4f"),
        number(row["next_token_agreement"], ".3f"),
        said,
    ]


def _share(n_bytes: int, full: int) -> str:
    return f"{size(n_bytes)} ({n_bytes / full:.0%})"
