"""The README's tables of policies at work, from data/results alone; tables.py puts them into the README."""

from __future__ import annotations

from typing import Any


def needle(found: dict[str, Any]) -> list[str]:
    """By policy, how many of the ten questions are answered."""
    rows = found["rows"]
    budgets = sorted({row["budget"] for row in rows if row["scorer"] != "full cache"})
    full = next(row for row in rows if row["scorer"] == "full cache")
    first, n = budgets[0], full["n"]
    by = {(row["scorer"], row["reduce"], row["visibility"], row["budget"]): row for row in rows}
    names = [name for name in dict.fromkeys((row["scorer"], row["reduce"]) for row in rows) if name[0] != "full cache"]
    names.sort(key=lambda name: -sum(by[*name, "query_agnostic", budget]["right"] for budget in budgets))
    heads = " | ".join(f"{budget:,}" for budget in budgets)
    lines = [
        f"A fact stated early in a text of {found['length']:,} tokens, asked for at its end: how many of {n} are "
        f"answered ({found['model']}, {found['dtype']}, `experiments/05_needle.py`; the full cache answers "
        f"{full['right']}). All scorers protect {found['protect']['sinks']} sinks and the last "
        f"{found['protect']['recent']} tokens and evict once, after prefill. *Agnostic*: before the question was seen; "
        "*aware*: after, never to be ranked with the others.",
        "",
        f"| scorer, kept set for | agnostic, budget {heads} | aware, {first:,} |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    for name in names:
        cells = [str(by[*name, "query_agnostic", budget]["right"]) for budget in budgets]
        aware = by[*name, "query_aware", first]["right"]
        shown = f"`{name[0]}`, {'all heads' if name[1] == 'all' else 'each head'}"
        lines.append(f"| {shown} | " + " | ".join(cells) + f" | {aware} |")
    return [*lines, "", verdict(by, names, budgets, n)]


def verdict(by: dict[Any, Any], names: list[tuple[str, str]], budgets: list[int], n: int) -> str:
    """Whether any query-agnostic policy answers eight at the smallest budget, and what the best one takes."""

    def best(budget: int) -> tuple[int, str]:
        right, name = max((by[*name, "query_agnostic", budget]["right"], name) for name in names)
        return right, f"`{name[0]}` ({'all heads' if name[1] == 'all' else 'each head'})"

    right, name = best(budgets[0])
    if right >= 0.8 * n:
        return f"At a budget of {budgets[0]:,} the best query-agnostic policy, {name}, answers {right} of {n}."
    for budget in budgets[1:]:
        more, other = best(budget)
        if more >= 0.8 * n:
            break
    return (
        f"At a budget of {budgets[0]:,} no query-agnostic policy answers {0.8 * n:.0f} of {n}: the best, {name}, "
        f"answers {right}. {other} answers {more} at {budget:,}."
    )


def runtime(found: dict[str, Any]) -> list[str]:
    """What policies cost and save."""
    memory, machine = found["memory"], found["machine"]
    budget = found["budget"]
    lines = [
        f"What a policy costs and saves ({found['model']}, {found['dtype']}, {machine['cpu']} on {machine['threads']} "
        f"of {machine['cores']} threads, torch {machine['torch']}, `experiments/05_runtime.py`; medians of steps taken "
        "in turn in one run, 95 % interval over rounds). The full cache is transformers' own, under SDPA.",
        "",
        "| | measured |",
        "|---|---|",
    ]
    rows = [*_steps(found), *_whole(found)]
    lines += [f"| {what} | {value} |" for what, value in rows]
    chunks = [value / 1e6 for value in memory["bytes"]["chunks"]]
    return [
        *lines,
        "",
        f"Peak memory beside the model while 16,384 tokens are prefilled in chunks of 1,024 at budget {budget} (beyond "
        f"the trained context, a memory experiment): {chunks[0]:,.0f} MB in the first chunk, {chunks[1]:,.0f} in the "
        f"second, {min(chunks[2:]):,.0f} to {max(chunks[2:]):,.0f} after it.",
    ]


def _steps(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Decode steps and bytes."""
    steps, budget, same = found["steps"], found["budget"], found["identity"]
    rows = [("nothing evicted: logits bit-equal to no policy's", f"{sum(same.values())} of {len(same)} scorers")]
    for name, value in found["overhead"].items():
        rows.append((f"a step under `epikv` that evicts nothing, {name}, over a plain one", _ratio(value)))
    for name in ("epikv", "surprise_fast", "sliding_window", "h2o"):
        what = f"a step over 4,096 cached tokens, over one of `{name}` at budget {budget}"
        rows.append((what, _ratio(steps[f"full over {name}"])))
    rows.append(("the same, `epikv` evicting at every step", _ratio(steps["full over epikv, every step"])))
    for kind in ("ragged", "padded"):
        what = f"a step over {kind} heads that keep {budget} in the mean, over uniform ones"
        rows.append((what, _ratio(steps[f"{kind} over uniform"])))
    for name in ("epikv", "surprise_fast", "h2o"):
        value = steps["bytes"][name]
        share = f"{value['physical_over_full']:.3f} (budget {value['budget_over_length']:.3f})"
        rows.append((f"stored bytes over the full cache's, `{name}`, its state included, `every:128`", share))
    value = steps["bytes"]["epikv, every step"]
    rows.append(("the same, `epikv` evicting at every step", f"{value['physical_over_full']:.3f}"))
    return rows


def _whole(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Prefill, eviction and whole texts."""
    rows = []
    ways = {"materialised": "H2O that reads eager attention", "h2o": "`h2o`", "surprise_fast": "`surprise_fast`"}
    for name, word in (ways | {"full": "no policy"}).items():
        what = f"prefill of 4,096 tokens and first eviction, {word} over `epikv`"
        rows.append((what, _ratio(found["prefill"][f"{name} over epikv"])))
    extra = found["memory"]["extra_over_full_bytes"]
    for name in ("materialised", "epikv", "surprise_fast"):
        word = ways.get(name, f"`{name}`")
        rows.append((f"its peak memory beyond that of no policy, {word}", f"{extra[name] / 1e6:,.0f} MB"))
    for name, value in found["one_eviction"].items():
        what = f"one eviction of `{name}` at 4,096 over a decode step: selection and compaction; scoring"
        rows.append((what, f"{value['evicting_over_step']:.2f}x; {value['scoring_over_step']:.2f}x"))
    for name in ("epikv", "surprise_fast"):
        what = f"end to end, 4,096 + 512 tokens, `{name}` over the full cache"
        rows.append((what, _ratio(found["end_to_end"][f"{name} over full"])))
    return rows


def _ratio(value: dict[str, float]) -> str:
    return f"{value['ratio']:.2f}x [{value['low']:.2f}, {value['high']:.2f}]"
