"""The README's tables of methods side by side, from data/results alone; tables.py puts them into the README."""

from __future__ import annotations

from typing import Any

ENFORCED = ("ragged", "padded", "uniform_cap")
N_ASKED = 8


def audit(found: dict[str, Any]) -> list[str]:
    """What methods claim and hold, and what the target loses: those that mark, those that share, the best others."""
    rows = [row for row in found["rows"] if row["claimed_bytes"] is not None and row["method"] != "full"]
    marked = {row["method"] for row in rows if row["simulated"]}
    shapes = [row for row in rows if row["method"].partition("+")[0] in marked and row["source"] == "press"]
    plain = [row for row in rows if row["source"] == "scorer"]
    shared = [row for row in rows if row["source"] == "policy"]
    presses = [row for row in rows if row["source"] == "press" and row not in shapes]
    n = rows[0]["n_texts"]
    near = [row for row in presses if row["claimed_bytes"] < 1.5 * found["keep_fraction"] * row["full_bytes"]]
    kept = [row for row in [*plain, *shared, *presses] if row["verdict"] == "holds"]
    losses = sorted(row["kl_nats"] for row in plain)
    lines = [
        f"{n} texts of {found['length']:,} tokens ({found['model']}, {found['dtype']}, `experiments/06_audit.py`), "
        f"{found['keep_fraction']:.0%} of the context to stay, {found['protect']['sinks']} first and "
        f"{found['protect']['recent']} last tokens protected, evicted once, question unseen. Claimed and held: keys "
        "and values, as shares of the full cache's; beside them the method's own state. KL of the target's tokens to "
        "the full cache's prediction: mean, and lowest and highest text. "
        f"{len(kept)} of {len(plain) + len(shared) + len(presses)} methods that evict hold what they claim; "
        f"{len(marked)} presses mark and hold everything.",
        "",
        *_table("presses that mark, as they ship and evicted", shapes),
        *_table("ours, one budget for all heads", sorted(plain, key=_loss)[:N_ASKED]),
        f"The best {N_ASKED} of {len(plain)} scorers; all lie between {losses[0]:.3f} and {losses[-1]:.3f}, `random` "
        f"at {next(row['kl_nats'] for row in plain if row['method'] == 'random'):.3f}.",
        "",
        *_table("ours, an allocator shares the budget", sorted(shared, key=_loss)),
        *_table("presses that evict", sorted(near, key=_loss)[:N_ASKED]),
        f"The best {N_ASKED} of {len(near)} presses that claim about the budget"
        + "".join(
            f"; `{row['method']}` keeps {row['claimed_bytes'] / row['full_bytes']:.0%} at {row['kl_nats']:.3f} nats"
            for row in presses
            if row not in near
        )
        + ".",
        "",
        *asked(found),
    ]
    return lines


def _loss(row: dict[str, Any]) -> float:
    return float(row["kl_nats"])


def _table(title: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"| {title} | claimed | held | own state | KL, nats [texts] | same next token |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        claimed, held, side = (
            100 * n_bytes / row["full_bytes"]
            for n_bytes in (
                row["claimed_bytes"] - row["claimed_side_bytes"],
                row["physical_bytes"] - row["side_bytes"],
                row["side_bytes"],
            )
        )
        by_text = row["kl_nats_by_text"]
        lines.append(
            f"| `{row['method'].removeprefix('policy:')}` | {claimed:.1f} % | {held:.1f} % | {side:.1f} % | "
            f"{row['kl_nats']:.3f} [{min(by_text):.3f}, {max(by_text):.3f}] | {row['next_token_agreement']:.2f} |"
        )
    return [*lines, ""]


def asked(found: dict[str, Any]) -> list[str]:
    """What seeing the question changes, for the methods that it changes most."""
    by = {(row["method"], row["visibility"]): row for row in found["asked"] if row["claimed_bytes"] is not None}
    names = [name for name, kind in by if kind == "query_agnostic" and (name, "query_aware") in by]
    names.sort(key=lambda name: -abs(by[name, "query_agnostic"]["kl_nats"] - by[name, "query_aware"]["kl_nats"]))
    n = next(iter(by.values()))["n_texts"]
    lines = [
        f"The same budget with a question about an early sentence ({n} texts): KL of the answer, compressed before and "
        f"after the question was seen; the {N_ASKED} methods of {len(names)} that it changes most.",
        "",
        "| method | before | after |",
        "|---|---|---|",
    ]
    for name in names[:N_ASKED]:
        cells = []
        for kind in ("query_agnostic", "query_aware"):
            row = by[name, kind]
            texts = row["kl_nats_by_text"]
            cells.append(f"{row['kl_nats']:.2f} [{min(texts):.2f}, {max(texts):.2f}]")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, ""]


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
