"""`kvlens ceilings`: how much any choice of kept keys could gain over the largest weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns, interval, number, table
from kvlens.errors import InputError
from kvlens.wording import counted


def command(
    traces: options.Traces,
    out: options.Out,
    model: options.Model = "smollm2-135m",
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="A,B,...", help="Keys kept, joined by commas.")
    ] = "4,8,16,32",
    rows_per_head: Annotated[
        int, typer.Option("--rows-per-head", min=1, metavar="N", help="Query rows of each head and layer, in a trace.")
    ] = 6,
    nulls: Annotated[
        Literal["all", "none"],
        typer.Option("--nulls", help="Also measure the rows with values that have nothing to do with the weights."),
    ] = "all",
    cross_entropy: Annotated[
        bool,
        typer.Option(
            "--cross-entropy", help="Also run the model with the kept keys alone in flat, random and all cells."
        ),
    ] = False,
    chat: options.Chat = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    seed: options.Seed = 0,
    limit: options.Limit = None,
    beyond_context: options.BeyondContext = False,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the best kept set of sampled attention rows exactly, and say how far the largest weights are from it."""
    from kvlens.studies.ceilings import ceilings

    say = Output(json, quiet)
    with say.progress("layers") as tick:
        run = ceilings(
            traces, model, out,
            budgets=_numbers(budgets), rows_per_head=rows_per_head, nulls=nulls, cross_entropy=cross_entropy, chat=chat,
            device=device, dtype=dtype, attention=attention, seed=seed, limit=limit, beyond_context=beyond_context,
            force=force, progress=tick, note=say.note,
        )  # fmt: skip
    summary = run.documents["summary"]
    document = {"run": run.path, "counts": run.meta["counts"], **summary}
    say.answer(document, text=_text(run.path, run.meta, summary), paths=[run.path])


FEW = 6  # documents


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise InputError(f"budgets {text!r} are no whole numbers", "join them by commas: --budgets 4,8,16,32")
    return [int(part) for part in parts]


def _text(path: str, meta: dict[str, Any], found: dict[str, Any]) -> str:
    check, model = found["check"], meta["model"]
    skipped = len(meta["counts"]["skipped"])
    lines = [
        columns(
            {
                "model": model["name"] + (f" ({model['note']})" if model["note"] else ""),
                "rows": f"{found['n_rows']:,} of {counted(found['n_documents'], 'document')}"
                + (f" ({skipped:,} left out)" if skipped else "")
                + (", few: intervals are rough" if found["n_documents"] < FEW else ""),
                "checked": f"{check['n_rows']:,} rows against the model's own output, {check['n_off']:,} off, "
                f"the worst at {check['worst']:.2f} of what is allowed",
            }
        ),
        "",
        table(*_by_budget(found["budgets"]), right=tuple(range(7))),
        "",
        table(*_nulls(found["budgets"]), right=(0, 2, 4)) if found["budgets"][0]["nulls"] else "no null controls",
        "",
        columns(_facts(found)),
        columns({"run": path}),
    ]
    return "\n".join(lines)


def _by_budget(budgets: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headers and rows of the real numbers: ceilings in per cent of the error of the largest weights."""
    headers = ["kept", "ceiling", "95 % interval", "kappa <= 1.5", "top optimal", "swaps optimal", "pi"]
    rows = []
    for line in budgets:
        real = line["real"]
        rows.append(
            [
                str(line["budget"]),
                percent(real["ceiling"]["median"]),
                _ends(real["ceiling"]),
                percent(real["share_kappa_close"]),
                percent(real["share_top_mass_optimal"]),
                percent(real["share_balanced_optimal"]),
                number(real["pi"]["median"], ".2f"),
            ]
        )
    return headers, rows


def _nulls(budgets: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headers and rows that put the real numbers beside every null's."""
    rows = []
    for line in budgets:
        for name, facts in {"real": line["real"], **line["nulls"]}.items():
            ceiling, auc = facts["ceiling"], facts["auc"]
            rows.append(
                [
                    str(line["budget"]) if name == "real" else "",
                    name,
                    percent(ceiling["median"]),
                    _ends(ceiling),
                    number(auc["mean"], ".2f"),
                    interval(auc["low"], auc["high"], ".2f"),
                ]
            )
    return ["kept", "values", "ceiling", "95 % interval", "AUC", "95 % interval"], rows


def _facts(found: dict[str, Any]) -> dict[str, str]:
    """What is said in a line each: predictors, cells, rules, shared sets, cross-entropy."""
    at = found["predictor_budget"]
    best = [f"{line['statistic']} {number(line['auc'], '.2f')}" for line in found["predictors"]]  # under .5: reversed
    rules = {rule: facts[str(at)] for rule, facts in found["rules"].items()}
    facts = {
        f"AUC at {at}": f"{', '.join(best)} (under .5: the other way round)",
        "flat cells": f"{found['cells']['n_flat']} of {found['cells']['n']} (median dropped mass above .25 at {at})",
        f"excess at {at}": ", ".join(f"{rule} {number(value['median'], '.2f')}" for rule, value in rules.items()),
    }
    if found["shared_sets"]:
        cost = found["shared_sets"][str(at)]["cost"]
        facts["shared set"] = f"{number(cost['median'], '.2f')} times the error of each head's own largest weights"
    for arm, value in found.get("cross_entropy", {}).get("arms", {}).items():
        added = f"{number(value['added_nats'], '+.3f')} nats a token {interval(value['low'], value['high'], '+.3f')}"
        held_out = counted(found["cross_entropy"]["n_documents"], "held-out document")
        facts[f"forced {arm}"] = f"{value['n_cells']:,} cells keep {at} keys, {held_out}: {added}"
    return facts


def _ends(facts: dict[str, Any]) -> str:
    """An interval in per cent; empty where there is none, as with one document."""
    return "" if facts["low"] is None else f"[{percent(facts['low'])}, {percent(facts['high'])}]"


def percent(value: float | None) -> str:
    """A share in per cent, with one digit after the point."""
    return "" if value is None else f"{100 * value:.1f} %"
