"""The README's tables of the experiments on ceilings: what was found, and how fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]
RULES_OF_THE_PAPER = {"top_mass": "1.02 to 1.03 at 8", "streaming": "1.4 to 2.1 at 8"}


def ceilings(found: Facts) -> list[str]:
    model, cells = found["model"], found["cells"]
    return [
        f"Ceilings on real rows and under null controls ({model['name']} ({model['note']}), {found['dtype']}, "
        f"{found['n_rows']:,} rows of all {cells['n']} heads in {found['n_documents']} documents, "
        f"{found['n_instances']:,} exact searches, {found['machine']['cpu']}; `experiments/03_ceilings.py`): the "
        "median share by which the error of the largest weights could fall, with a 95 % interval over documents.",
        "",
        *_beside_nulls(found, _ceiling),
        "",
        "How well dropped mass tells which rows are closable (AUC):",
        "",
        *_beside_nulls(found, _area),
        "",
        "Beside the figures of ContourKV (other, larger models):",
        "",
        *_beside_paper(found),
        "",
        _predictors(found),
        "",
        _cross_entropy(found["cross_entropy"]),
    ]


def _beside_nulls(found: Facts, shown: Callable[[Facts], str]) -> list[str]:
    """One number by budget, of the real rows and of every null."""
    names = list(found["budgets"][0]["nulls"])
    lines = ["| keys kept | real values | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for line in found["budgets"]:
        cells = [shown(line["real"]), *(shown(line["nulls"][name]) for name in names)]
        lines.append(f"| {line['budget']} | " + " | ".join(cells) + " |")
    return lines


def _beside_paper(found: Facts) -> list[str]:
    """What the paper has numbers of too, and what stands beside it here."""
    paper, budgets = found["paper"], found["budgets"]
    pi = ", ".join(f"{value:g}" for value in paper["pi"].values())
    top = ", ".join(f"{_share(value)} at {budget}" for budget, value in paper["share_top_mass_optimal"].items())
    rows: list[tuple[str, Callable[[Facts], str], str]] = [
        ("largest weights are optimal", lambda real: _share(real["share_top_mass_optimal"]), top),
        ("balancing swaps reach the optimum", lambda real: _share(real["share_balanced_optimal"]), ""),
        (
            "swaps with any key beat the pool's optimum",
            lambda real: _share(real["share_beaten_outside_pool"]),
            "15 %",
        ),
        ("ceiling with those swaps", lambda real: _share(real["ceiling_all_keys"]["median"]), ""),
        ("kappa at most 1.5", lambda real: _share(real["share_kappa_close"]), "89 to 90 %"),
        ("pi, free weights on keys that Frank-Wolfe finds", lambda real: f"{real['pi_search']['median']:.2f}", pi),
        ("pi, free weights on the best set", lambda real: f"{real['pi']['median']:.2f}", ""),
        ("pi, the better of the two", lambda real: f"{real['pi_either']['median']:.2f}", ""),
    ]
    lines = ["| | " + " | ".join(f"{line['budget']} kept" for line in budgets) + " | paper |"]
    lines.append("|---|" + "---|" * (len(budgets) + 1))
    for name, shown, theirs in rows:
        lines.append(f"| {name} | " + " | ".join(shown(line["real"]) for line in budgets) + f" | {theirs} |")
    for rule, by_budget in found["rules"].items():
        medians = " | ".join(f"{value['median']:.2f}" for value in by_budget.values())
        name = f"error over the best: {rule.replace('_', ' ')}"
        lines.append(f"| {name} | {medians} | {RULES_OF_THE_PAPER.get(rule, '')} |")
    costs = " | ".join(f"{value['cost']['median']:.2f}" for value in found["shared_sets"].values())
    return [*lines, f"| one set for a KV group, over each head's largest weights | {costs} | 1.06 to 1.22 |"]


def _predictors(found: Facts) -> str:
    over_rows, within = (_ranked(found["predictors"], name) for name in ("auc", "within_cells_auc"))
    check, cells = found["check"], found["cells"]
    return (
        f"AUC for closable rows at {found['predictor_budget']} keys (under .5: the other way round), over all rows: "
        f"{over_rows}; comparing rows of one head only: {within}. {cells['n_flat']} of {cells['n']} cells are flat. "
        f"{check['n_rows']:,} captured rows were held against the model's own output, {check['n_off']} were off."
    )


def _ranked(lines: list[Facts], name: str) -> str:
    order = sorted(lines, key=lambda line: -abs(line[name] - 0.5))
    return ", ".join(f"{line['statistic'].replace('_', ' ')} {line[name]:.2f}" for line in order)


def _cross_entropy(found: Facts) -> str:
    arms = ", ".join(
        f"{arm} cells ({value['n_cells']}) {value['added_nats']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"
        for arm, value in found["arms"].items()
    )
    return (
        f"Cross-entropy of {found['n_documents']} held-out documents with {found['budget']} keys a row kept, in nats a "
        f"token over the full cache's: {arms}."
    )


def _ceiling(facts: Facts) -> str:
    one = facts["ceiling"]
    return f"{_share(one['median'])} [{_share(one['low'])}, {_share(one['high'])}]"


def _area(facts: Facts) -> str:
    area = facts["auc"]
    return f"{area['mean']:.2f} [{area['low']:.2f}, {area['high']:.2f}]"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def search_speed(found: Facts) -> list[str]:
    """The tables of experiments/03_subset_speed.py."""
    rows, machine, panel = found["rows"], found["machine"], found["panel"]
    lines = [
        f"The exact search ({rows['model']}, {rows['dtype']}; {found['n_threads']} threads each, {machine['cpu']}; "
        "medians of five in one run, `experiments/03_subset_speed.py`) against the plain vectorised numpy form over a "
        "ready table of subsets; what a row takes is counted from its pool on.",
        "",
        "| keys kept | subsets | faster than numpy in float32 | in float64 | same set as itertools |",
        "|---|---|---|---|---|",
    ]
    for budget, line in found["enumeration"].items():
        agreed = found["agreement"][budget]
        lines.append(
            f"| {budget} | {line['subsets']:,} | {line['faster_than_float32']:.0f}x | "
            f"{line['faster_than_float64']:.0f}x | {agreed['same_set']} of {agreed['n_rows']} rows, errors at most "
            f"{agreed['largest_relative_difference']:.0e} apart |"
        )
    seconds = panel["seconds"]
    lines += [
        "",
        f"On average {found['enumeration_faster_than_float32_mean']:.0f}x and "
        f"{found['enumeration_faster_than_float64_mean']:.0f}x. The paper's panel of {panel['n_instances']:,} "
        f"instances takes {seconds['enumeration']:.0f} s of enumeration, with {seconds['pools']:.0f} s for the pools, "
        f"{seconds['balancing']:.0f} s for balancing and {seconds['free_weights']:.0f} s for free weights apart, in "
        f"{panel['peak_bytes'] / 1e9:.2f} GB. Larger pools by branch and bound, one row at a time:",
        "",
        "| candidates | kept | subsets | proven optimal | s a row: median, most |",
        "|---|---|---|---|---|",
    ]
    for line in found["larger"]:
        lines.append(
            f"| {line['candidates']} | {line['budget']} | {line['subsets']:.1e} | {line['share_proven']:.0%} of "
            f"{line['n_rows']} | {line['seconds_median']:.3f}, {line['seconds_most']:.2f} |"
        )
    return lines


def rows_speed(found: Facts) -> list[str]:
    """The line of experiments/03_rows_speed.py."""
    seconds, memory = found["seconds"], found["memory"]
    return [
        f"Reading {seconds['check']['n_rows']:,} rows at {seconds['n_tokens']:,} tokens takes "
        f"{seconds['over_plain_same_linear_kernel']:.2f}x the plain SDPA pass with the same linear kernel "
        f"({seconds['over_plain']:.2f}x as PyTorch comes); memory beside the stored rows "
        f"({memory['stored_bytes'] / 1e6:.0f} MB) is {memory['beside_stored_over_plain_same_linear_kernel']:.2f}x what "
        f"the plain pass adds, {memory['whole_process_beside_stored_over_plain']:.2f}x of the whole process "
        f"({found['model']}, {found['dtype']}, {found['machine']['threads']} thread; `experiments/03_rows_speed.py`).",
    ]
