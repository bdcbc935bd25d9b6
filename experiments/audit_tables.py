"""The README's tables of methods side by side, from data/results alone; tables.py puts them into the README."""

from __future__ import annotations

from typing import Any


def score_cost(found: dict[str, Any]) -> list[str]:
    """What each method's score adds to a prefill, ours beside kvpress'; the cheapest first."""
    machine, methods = found["machine"], found["methods"]
    lines = [
        f"What a score costs at {found['n']:,} tokens, as a share of their prefill ({found['model']}, "
        f"{found['dtype']}, {machine['cpu']} on {machine['threads']} of {machine['cores']} threads; prefill "
        f"{found['prefill_seconds']:.1f} s; medians of {found['turns']} in one run, lowest and highest in brackets, "
        "`experiments/06_score_cost.py`). Ours: all that a policy adds while the prompt is read, and the scores at the "
        f"eviction. kvpress {found.get('kvpress', '(not installed)')}: its own `score` on the same tensors, for "
        "`h2o` the eager attention that it needs less the fused one, for `kvzip` its second pass.",
        "",
        "| method | ours | kvpress' | ours over kvpress' |",
        "|---|---|---|---|",
    ]
    for name, row in sorted(methods.items(), key=lambda item: float(item[1]["share_of_prefill"]["median"])):
        if "press" in row:
            beside = f"{percent(row['theirs_share_of_prefill'])} (`{row['press']}`) | {ratio(row['ours_over_theirs'])}"
        else:
            beside = "|"
        lines.append(f"| `{name}` | {percent(row['share_of_prefill'])} | {beside} |")
    above = [name for name, row in methods.items() if row.get("ours_over_theirs", {"median": 0})["median"] > 1]
    return [*lines, "", verdict(above, sum("press" in row for row in methods.values())), *checks(found)]


def percent(fact: dict[str, float]) -> str:
    """A share in percent, with its spread."""
    median, low, high = (100 * fact[name] for name in ("median", "low", "high"))
    digits = 3 if median < 0.1 else 2 if median < 10 else 0
    return f"{median:.{digits}f} % [{low:.{digits}f}, {high:.{digits}f}]"


def ratio(fact: dict[str, float]) -> str:
    """A ratio with its spread."""
    return f"{fact['median']:.2f} [{fact['low']:.2f}, {fact['high']:.2f}]"


def verdict(above: list[str], n: int) -> str:
    """Which of ours cost more than kvpress'."""
    if not above:
        return f"All {n} that kvpress has too cost at most what its own do."
    return f"Of {n} that kvpress has too, {n - len(above)} cost at most what its own do; more: {', '.join(above)}."


def checks(found: dict[str, Any]) -> list[str]:
    """Whether what is counted as scoring is what a real prefill takes longer."""
    said = [
        f"`{name}` {row['beyond_plain']['median']:.2f} s more than a plain one "
        f"[{row['beyond_plain']['low']:.2f}, {row['beyond_plain']['high']:.2f}], of which scoring says "
        f"{row['scoring']:.2f} s and eviction {row['evicting']:.2f} s"
        for name, row in found["checked"].items()
    ]
    return ["", f"A real prefill under the policy takes: {'; '.join(said)}."] if said else []
