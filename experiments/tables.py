"""Write the measured numbers into README.md: the part between the two markers, from data/results alone.

Run: python experiments/tables.py     A test runs it too and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audit_tables import audit, score_cost
from ceiling_tables import ceilings, rows_speed, search_speed
from runtime_tables import needle, runtime
from surprise_tables import SOURCES, surprise, surprise_speed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results"
START, END = "<!-- numbers: written by experiments/tables.py -->", "<!-- end of numbers -->"


def result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def speed(found: dict[str, Any]) -> list[str]:
    machine = found["machine"]
    evict, knockout = found["evict_512"], found["knockout_512"]
    rate, small, large = found["batched_rate"], found["captum_128"], found["captum_512"]
    half, memory = found["bf16"], found["memory_4096"]

    def row(what: str, baseline: str, value: dict[str, Any], unit: str = "x") -> str:
        names = ("speedup", "share_of_plain_rate")
        same = ("speedup_over_same_linear_kernel", "share_of_plain_rate_same_linear_kernel")
        first = next(value[name] for name in names if name in value)
        second = next(value[name] for name in same if name in value)
        return f"| {what} | {baseline} | {first:.2f}{unit} | {second:.2f}{unit} |"

    full, captum = "one full forward a window", "captum's FeatureAblation"
    return [
        f"{found['model']}, {found['dtype']}, window 1, {machine['cpu']} on {machine['threads']} of {machine['cores']} "
        f"threads, torch {machine['torch']}; medians of five in one run (`experiments/01_label_speed.py`). "
        f"The engine's linear layers run on: {found['linear_kernel']}. "
        "The last column gives the baseline the same kernel.",
        "",
        "| labels of | baseline | faster | same kernel |",
        "|---|---|---|---|",
        row("`evict`, 512 + 32 tokens", full, evict),
        row("`knockout`, 512 + 32 tokens", full, knockout),
        row("`evict`, tokens a second", "8 rows of 32 tokens, no prefix", rate, "x its rate"),
        row("`substitute`, 128 + 32 tokens", captum, small["substitute"]),
        row("`evict`, 128 + 32 tokens", captum, small["evict"]),
        row("`evict`, 512 + 32 tokens", captum, large["evict"]),
        "",
        f"Largest difference from the full forward: {evict['largest_difference_nats']:.1e} nats (`evict`), "
        f"{knockout['largest_difference_nats']:.1e} (`knockout`). Extra peak memory of a batch of 64 windows at 4,096 "
        f"tokens: {memory['extra_peak_bytes'] / 1e6:.0f} MB, where 64 copies of the prefix would take "
        f"{memory['prefix_copies_bytes'] / 1e9:.1f} GB. bfloat16 takes {1 / half['speedup_bf16_over_fp32']:.2f} of "
        f"float32's time here; its effects differ from float32's by "
        f"{half['bf16_against_fp32_nats']['median']:.2g} nats in the median "
        f"(rank agreement {half['spearman']:.2f}), the median |effect| being "
        f"{half['median_abs_effect_fp32_nats']:.2g}.",
    ]


def planted(found: dict[str, Any]) -> list[str]:
    lines = [
        f"Planted traces ({found['n_traces']} for each row, {found['model']}, {found['dtype']}, "
        "`experiments/01_planted.py`): AUC of needed values against distractors, "
        "mean over traces with a 95 % interval.",
        "",
        "| target | `knockout` | `evict` | `substitute` |",
        "|---|---|---|---|",
    ]
    for target, name in (("steps", "restates every step"), ("value", "the final value alone")):
        cells = [found["auc"][f"{target} {kind}"] for kind in ("knockout", "evict", "substitute")]
        shown = " | ".join(f"{cell['mean']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]" for cell in cells)
        lines.append(f"| {name} | {shown} |")
    return [
        *lines,
        "",
        "With the final value alone this model computes nothing from the chain, so hiding it changes nothing.",
    ]


def screen(found: dict[str, Any]) -> list[str]:
    lines = [
        f"The gradient screen ({found['model']}, {found['dtype']}, `evict`, window 1, every window measured, "
        "`experiments/01_screen.py`): recall of the true top tenth in the screen's top quarter, and rank agreement.",
        "",
        "| traces | n | recall at .25: median, least | Spearman: median, least | recall by plain \\|S\\| |",
        "|---|---|---|---|---|",
    ]
    for source, rules in found["sources"].items():
        used, plain = rules["|S| + layer norm"], rules["|S|"]
        recall, rank, other = used["recall"]["0.25"], used["spearman"], plain["recall"]["0.25"]
        lines.append(
            f"| {source} | {rules['n_traces']} | {recall['median']:.2f}, {recall['least']:.2f} | "
            f"{rank['median']:.2f}, {rank['least']:.2f} | {other['median']:.2f}, {other['least']:.2f} |"
        )
    return lines


def band_power(found: dict[str, Any]) -> list[str]:
    lines = [
        "Band discovery on simulated traces (`experiments/02_band_power.py`; 40 traces of 200 to 600 tokens): "
        "in how many runs a band is found, and confirmed by the other half of the traces.",
        "",
        "| planted | found | confirmed | edges off by, median | rho confirmed, mean |",
        "|---|---|---|---|---|",
    ]
    for name, counts in found["planted"].items():
        first, last = counts["edge_error_median"]
        lines.append(
            f"| {name} | {counts['found']} of {counts['n_runs']} | {counts['found_and_confirmed']} | "
            f"{first:g}, {last:g} layers | {counts['confirm_rho_mean']:.3f} |"
        )
    lines += ["", "| no band | found | confirmed | the same with position partialled out as a line, a cubic |"]
    lines += ["|---|---|---|---|"]
    for name, counts in found["null"].items():
        degrees = found["by_position_degree"].get(name, {})
        others = ", ".join(f"{one['discovered']} of {one['n_runs']}" for one in degrees.values())
        lines.append(f"| {name} | {counts['discovered']} of {counts['n_runs']} | {counts['confirmed']} | {others} |")
    shuffled = found["null_by_shuffling_within_traces"]
    lines += [
        "",
        f"With labels shuffled within traces as the null, {shuffled['discovered']} of {shuffled['n_runs']} runs of "
        "noise have a band; kvlens flips the signs of whole traces instead.",
    ]
    return lines


def observe(found: dict[str, Any]) -> list[str]:
    lines = [
        f"What `observe` costs over a plain SDPA forward with logits and the same linear kernel ({found['model']}, "
        f"{found['dtype']}, {found['machine']['cpu']} on {found['machine']['threads']} of {found['machine']['cores']} "
        "threads; medians of five in one run, `experiments/02_observe_speed.py`).",
        "",
        "| tokens | hidden states | keys and values | surprisal | all without attention | all |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("tokens_512", "tokens_1024"):
        ratios = found[name]["over_plain_same_linear_kernel"]
        cells = [ratios[kind] for kind in ("hidden", "keys_values", "surprisal", "without_attention", "all")]
        lines.append(f"| {found[name]['n_tokens']:,} | " + " | ".join(f"{cell:.2f}x" for cell in cells) + " |")
    return lines


PAIRS = ("evict / knockout", "evict / substitute", "knockout / substitute")


def real_bands(found: dict[str, Any]) -> list[str]:
    lines = [
        f"Bands on real traces ({found['model']}, {found['dtype']}, windows of {found['window']} at stride "
        f"{found['stride']}, `experiments/02_bands.py`). Verdicts in the order `evict`, `knockout`, `substitute`; the "
        "correlations are the largest of any layer under `evict`: mean over traces with position partialled out and "
        "its interval (of the layer alone, chosen for its size), and pooled over tokens with the trend left in. Traces "
        "of too few tokens, or without a correlation, are left out here and not in the agreement.",
        "",
        "| traces | n | hidden change, mean of 64 | largest | pooled | z-score | key variance | attention mass |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, source in found["sources"].items():
        verdicts = [
            ", ".join("yes" if rows[signal]["verdict"] == "bands" else "no" for rows in source["bands"].values())
            for signal in ("hidden_change_rolling", "hidden_change_z", "key_var", "attention_mass")
        ]
        one = source["bands"]["evict"]["hidden_change_rolling"]
        largest, pooled = one["largest"], one["largest_pooled"]
        size = f"{largest['mean_rho']:+.2f} [{largest['low']:+.2f}, {largest['high']:+.2f}]"
        lines.append(
            f"| {SOURCES[name]} | {one['n_traces']} | {verdicts[0]} | {size} | {pooled['pooled_rho']:+.2f} | "
            f"{verdicts[1]} | {verdicts[2]} | {verdicts[3]} |"
        )
    lines += ["", "Rank agreement (Spearman) of the interventions, mean over traces with a 95 % interval:", ""]
    lines += ["| traces | n | " + " | ".join(PAIRS) + " |", "|---|---|---|---|---|"]
    for name, source in found["sources"].items():
        pairs = [source["agreement"][pair] for pair in PAIRS]
        shown = (
            f"{p['spearman']['mean']:.2f} [{p['spearman']['low']:.2f}, {p['spearman']['high']:.2f}]" for p in pairs
        )
        lines.append(f"| {SOURCES[name]} | {pairs[0]['n_traces']} | " + " | ".join(shown) + " |")
    return lines


def block() -> str:
    tables = (
        ("01_label_speed", speed),
        ("01_planted", planted),
        ("01_screen", screen),
        ("02_observe_speed", observe),
        ("02_bands", real_bands),
        ("02_band_power", band_power),
        ("03_ceilings/summary", ceilings),
        ("03_subset_speed", search_speed),
        ("03_rows_speed", rows_speed),
        ("04_surprise", surprise),
        ("04_surprise_speed", surprise_speed),
        ("05_needle", needle),
        ("05_runtime", runtime),
        ("06_audit", audit),
        ("06_score_cost", score_cost),
    )
    parts = [write(found) for name, write in tables if (found := result(name))]
    return "\n\n".join("\n".join(lines) for lines in parts)


def updated(readme: str) -> str:
    """README's text with the part between the markers written anew."""
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n\n{block()}\n\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text()))
