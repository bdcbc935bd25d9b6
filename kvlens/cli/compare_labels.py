"""`kvlens compare-labels`: how far two label runs agree."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns, interval, number, table

NAMES = {
    "spearman": "rank agreement (Spearman)",
    "top_tenth_overlap": "overlap of the top tenth by |effect|",
    "sign_agreement": "same sign, above both noise floors",
}


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="The folder of a label run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The folder of another label run of the same traces.")],
    out: options.Out,
    audit_only: options.AuditOnly = False,
    seed: options.Seed = 0,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare two label runs of the same traces: ranks, top tenth and signs, and what differs between the runs."""
    from kvlens.discover.agreement import compare_labels

    run = compare_labels(a, b, out, audit_only=audit_only, seed=seed, force=force)
    document = run.documents["agreement"]
    Output(json, quiet).answer({"run": run.path, **document}, text=_text(run.path, document), paths=[run.path])


def _text(path: str, found: dict[str, Any]) -> str:
    few = ", too few to trust the intervals" if found["few_traces"] else ""
    skipped = f", {found['n_skipped']:,} left out" if found["n_skipped"] else ""
    differ = [f"{name}: {values['a']} and {values['b']}" for name, values in found["differences"].items()]
    facts = {
        "a": found["a"],
        "b": found["b"],
        "differ in": "; ".join(differ) or "nothing that run.json tells",
        "traces": f"{found['n_traces']:,}, {found['n_tokens']:,} tokens in both{few}{skipped}",
    }
    lines = [columns(facts)]
    rows = []
    for name, words in NAMES.items():
        value = found[name]
        rows.append([words, number(value["mean"], ".2f") or "undefined", interval(value["low"], value["high"], ".2f")])
    lines += ["", table(["agreement", "mean", "95 % interval"], rows, right=(1,)), ""]
    return "\n".join([*lines, columns({"run": path})])
