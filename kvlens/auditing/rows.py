"""What does an audit say in the end? Each text's numbers summed up, one row a method and kind of visibility.

1. Bytes and kept tokens are summed over texts, peak bytes are the highest; KL and agreement are means over all targets'
   tokens. Texts on which a method could not run do not count, and are numbered. A note counts the texts it is of.
2. A claim is met when it is met on every text.
3. Where every text was tried before and after its question was seen, `differences` has what seeing it changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlens.auditing.bytes import NOT_MET, REFUSED, TOLERANCE, verdict
from kvlens.auditing.methods import Method, PolicyMethod
from kvlens.auditing.settings import Settings
from kvlens.auditing.visibility import AGNOSTIC, AWARE
from kvlens.schemas import AUDIT

SUMS = ("claimed_bytes", "claimed_side_bytes", "physical_bytes", "side_bytes", "full_bytes")
COLUMNS = {
    "claimed_bytes": "keys and values that the method says it keeps, and claimed_side_bytes",
    "claimed_side_bytes": "what it says its own state takes: statistics, queries, positions",
    "physical_bytes": "every storage it holds, side_bytes among them; the verdict sets it against claimed_bytes",
    "side_bytes": "every storage of its own state",
    "full_bytes": "keys and values of the full cache",
    "reduce": "of a policy: whether each head keeps its own tokens, each layer, or all the same; null for a press",
}
MEANS = ("kl_nats", "next_token_agreement")


def document(frames: Sequence[pd.DataFrame], methods: Mapping[str, Method], settings: Settings) -> dict[str, Any]:
    """The content of `audit.json`."""
    cases = pd.concat(frames, ignore_index=True)
    rows = [
        row(methods[str(method)], str(visibility), group)
        for (method, visibility), group in cases.groupby(["method", "visibility"], sort=False)
    ]
    return {
        "schema": AUDIT,
        "tolerance": TOLERANCE,
        "columns": COLUMNS,
        "settings": settings.config(),
        "n_claims_not_met": sum(one["verdict"] == NOT_MET for one in rows),
        "rows": rows,
        "differences": differences(rows),
    }


def row(method: Method, visibility: str, group: pd.DataFrame) -> dict[str, Any]:
    """1. and 2. for one method."""
    ran = group[group.refused.isna()]
    found: dict[str, Any] = {"method": method.name, "source": method.source, "storage": method.storage}
    found |= {"visibility": visibility, "n_texts": len(ran), "n_refused": len(group) - len(ran)}
    found |= {"reduce": method.policy.reduce if isinstance(method, PolicyMethod) else None, "note": _note(ran)}
    names = [*SUMS, "peak_bytes", "simulated", "kept_tokens_total", *MEANS]
    if ran.empty:
        return found | dict.fromkeys(names) | {"verdict": f"{REFUSED}: {group.refused.iloc[0]}"}
    weights = ran.n_target / ran.n_target.sum()
    found |= {name: int(ran[name].sum()) for name in SUMS}
    found["peak_bytes"] = None if ran.peak_bytes.isna().any() else int(ran.peak_bytes.max())
    found["simulated"] = bool(ran.simulated.any())
    found["kept_tokens_total"] = int(ran.kept_tokens.sum())
    found |= {name: float((ran[name] * weights).sum()) for name in MEANS}
    verdicts = [verdict(int(c), int(p)) for c, p in zip(ran.claimed_bytes, ran.physical_bytes, strict=True)]
    return found | {"verdict": NOT_MET if NOT_MET in verdicts else verdicts[0]}


def _note(ran: pd.DataFrame) -> str | None:
    """The first note, and of how many texts it is where not of all."""
    notes = ran.note.dropna()
    if notes.empty:
        return None
    return str(notes.iloc[0]) + ("" if len(notes) == len(ran) else f" (on {len(notes)} of {len(ran)} texts)")


def differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """3. What each method says worse of the target when it compresses before it has seen the question."""
    by_kind = {(one["method"], one["visibility"]): one for one in rows if one["n_texts"]}
    found = []
    for name in dict.fromkeys(one["method"] for one in rows):
        before, after = by_kind.get((name, AGNOSTIC)), by_kind.get((name, AWARE))
        if before is None or after is None:
            continue
        change = {f"{mean}_before_less_after": before[mean] - after[mean] for mean in MEANS}
        found.append({"method": name, **change})
    return found
