"""The README's tables of counter-causal surprise, from data/results alone; tables.py puts them into the README."""

from __future__ import annotations

from typing import Any

SOURCES = {"project": "written here", "math": "others', MATH", "gsm8k": "others', GSM8K", "own": "the model's own"}
MIRRORED = ("full", "fast", "full,logprob,no_self", "fast,logprob,no_self")


def spread(fact: dict[str, float], form: str = "+.2f") -> str:
    """A mean with its interval."""
    return f"{fact['mean']:{form}} [{fact['low']:{form}}, {fact['high']:{form}}]"


def surprise(found: dict[str, Any]) -> list[str]:
    sources = found["sources"]
    names = list(next(iter(sources.values()))["rules"])
    heads = " | ".join(f"{SOURCES[name]}, n = {source['n_traces']}" for name, source in sources.items())
    lines = [
        f"Does surprise say which tokens matter? ({found['model']}, {found['dtype']}, {found['machine']['cpu']}, "
        "`experiments/04_surprise.py`.) Spearman with the effect of evicting one token (windows of 1), position and "
        "log-frequency (counted over the same traces) partialled out, mean over traces with a 95 % interval; position "
        "0 and the last 33 tokens, which gap=32 cannot score, are left out, and for units the last one besides.",
        "",
        f"| rule | {heads} |",
        "|---" * (len(sources) + 1) + "|",
    ]
    for name in names:
        facts = [source["rules"][name]["rho_position_frequency"] for source in sources.values()]
        if all(fact["n_traces"] for fact in facts):
            shown = f"`{name}`" if name.startswith(("full", "fast", "layers")) else name
            lines.append(f"| {shown} | " + " | ".join(spread(fact) for fact in facts) + " |")
    return [*lines, "", *sizes(sources), "", *kept_half(sources, names), "", *controls(found)]


RIVALS = ("key norm", "hidden change", "hidden change z", "attention mass")


def sizes(sources: dict[str, Any]) -> list[str]:
    """The same with the size of the effect."""
    lines = [
        "The same with the size of the effect, whatever its sign:",
        "",
        "| rule | " + " | ".join(SOURCES[name] for name in sources) + " |",
        "|---" * (len(sources) + 1) + "|",
    ]
    for name in (*MIRRORED, *RIVALS):
        facts = [source["rules"][name]["rho_size"] for source in sources.values()]
        lines.append(f"| {name} | " + " | ".join(map(spread, facts)) + " |")
    return lines


def kept_half(sources: dict[str, Any], names: list[str]) -> list[str]:
    """What half of the tokens keeps of the positive effects, as a decision: raw scores, position and all."""
    chosen = [*MIRRORED, "sliding window", *RIVALS, "log-frequency"]
    lines = [
        "The same rules as a decision: the share of all positive effects that the better half of the tokens holds "
        "(.50 by chance), scores as they are.",
        "",
        "| rule | " + " | ".join(SOURCES[name] for name in sources) + " |",
        "|---" * (len(sources) + 1) + "|",
    ]
    for name in (name for name in chosen if name in names):
        facts = [source["rules"][name]["kept_half"] for source in sources.values()]
        lines.append(f"| {name} | " + " | ".join(spread(fact, ".2f") for fact in facts) + " |")
    return lines


def controls(found: dict[str, Any]) -> list[str]:
    sources = found["sources"]
    rows = {
        "`full` ~ `fast`": "full ~ fast",
        "the same, controlled": "full ~ fast, controlled",
        "`full` ~ its mirror from the past": "full ~ full,past",
        "`fast` ~ its mirror from the past": "fast ~ fast,past",
        "`full` ~ rarity": "full ~ rarity",
        "`fast` ~ rarity": "fast ~ rarity",
    }
    lines = [
        "What the score goes with (Spearman in a trace; rarity is minus the log-frequency):",
        "",
        "| | " + " | ".join(SOURCES[name] for name in sources) + " |",
        "|---" * (len(sources) + 1) + "|",
    ]
    for label, key in rows.items():
        lines.append(f"| {label} | " + " | ".join(spread(s["pairs"][key]) for s in sources.values()) + " |")
    for name in MIRRORED:
        facts = [s["pairs"][f"{name} above its mirror"] for s in sources.values()]
        lines.append(f"| rho with labels, `{name}` minus its mirror's | " + " | ".join(map(spread, facts)) + " |")
    for name in ("full,logprob", "full,logprob,no_self", "fast,logprob"):
        for turn, words in (("", "future"), (",past", "past")):
            facts = [s["information"][f"{name}{turn}: gain"] for s in sources.values()]
            label = f"nats a token that the own {words} tells, `{name}`"
            lines.append(f"| {label} | " + " | ".join(map(spread, facts)) + " |")
    for variant in ("full", "fast"):
        for apart in ("1", "8"):
            facts = [s["staleness"][variant].get(apart) for s in sources.values()]
            label = f"`{variant}`: scores of held tokens, {apart} refresh{'' if apart == '1' else 'es'} later"
            lines.append(f"| {label} | " + " | ".join(spread(f, ".2f") if f else "" for f in facts) + " |")
    for variant in ("full", "fast"):
        for name in ("number", "punctuation", "word", "all"):
            facts = [s["what_stays"][variant].get(name) for s in sources.values()]
            label = f"`{variant}`: share that stays of {'all tokens' if name == 'all' else f'{name} tokens'}"
            lines.append(f"| {label} | " + " | ".join(spread(f, ".2f") if f else "" for f in facts) + " |")
    repeated = "; ".join(f"`{name}` {spread(fact, '+.3f')}" for name, fact in found["repetition"].items())
    return [
        *lines,
        "",
        f"A sentence followed later by itself against the same one followed by another ({found['n_seeds']} seeds), "
        f"difference of the mean score of its tokens (negative: the repetition predicts it): {repeated}.",
        "",
        f"Refreshes: every {found['every']} tokens to {found['budget']} and the first four. The nats that the own "
        "future tells are the difference in minus log p between a text's own later rows and another text's there.",
    ]


def surprise_speed(found: dict[str, Any]) -> list[str]:
    machine = found["machine"]
    lines = [
        f"What a pass costs ({found['model']}, {found['dtype']}, {machine['cpu']} on {machine['threads']} of "
        f"{machine['cores']} threads, {found['linear_kernel']}; medians of five in one run, "
        "`experiments/04_surprise_speed.py`). The plain form is an explicit n x n mask and the whole vocabulary.",
        "",
        "| tokens | fast over full | full over the plain form | the plain form as PyTorch comes | fast refresh, share "
        "of the prefill of the last quarter | off float64: ours, plain (largest) |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["speed"]:
        off = row["agreement"]
        lines.append(
            f"| {row['n']:,} | {row['fast_over_full']:.0f}x | {row['full_over_plain_same_kernel']:.2f}x | "
            f"{row['full_over_plain_as_pytorch_comes']:.2f}x | {100 * row['fast_share_of_prefill']:.1f} % | "
            f"{off['ours_to_float64']['largest']:.0e}, {off['plain_to_float64']['largest']:.0e} |"
        )
    for name, facts in found["memory"].items():
        peaks = ", ".join(f"{int(n):,}: {value / 1e6:.0f} MB" for n, value in facts["bytes"].items())
        lines += [
            "",
            f"Peak memory of `{name}` beside model, cache and state: {peaks}; exponent {facts['exponent']:.2f}.",
        ]
    return lines
