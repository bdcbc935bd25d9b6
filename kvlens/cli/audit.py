"""`kvlens audit`: what methods claim and what they hold, and what they cost in what the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlens.cli import options
from kvlens.cli.output import Output
from kvlens.errors import InputError, VerdictNo


def command(
    traces: options.Traces,
    out: options.Out,
    model: options.Model = "smollm2-135m",
    policy: Annotated[
        list[Path] | None,
        typer.Option("--policy", metavar="FILE", help="A policy that `kvlens export` wrote; may be given repeatedly."),
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option("--scorer", metavar="NAME", help="A scorer of kvlens, or all; may be given repeatedly."),
    ] = None,
    press: Annotated[
        list[str] | None,
        typer.Option("--press", metavar="NAME[:key=value]", help="A press of kvpress, or all; repeatedly."),
    ] = None,
    keep_fraction: options.KeepFraction = None,
    sinks: Annotated[int, typer.Option("--sinks", min=0, metavar="N", help="First tokens that stay under all.")] = 4,
    recent: Annotated[int, typer.Option("--recent", min=0, metavar="N", help="Last tokens that stay under all.")] = 32,
    question_last: Annotated[
        bool, typer.Option("--question-last", help="Compress before and after the question is seen, and compare.")
    ] = False,
    enforce: Annotated[
        bool, typer.Option("--enforce", help="Also evict what a press only marks, in three shapes of storage.")
    ] = False,
    chat: options.Chat = False,
    target_tokens: Annotated[
        int, typer.Option("--target-tokens", min=1, metavar="N", help="Target of plain texts, predicted afterwards.")
    ] = 48,
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
    """Compare methods at the bytes they really hold; exits 1 when one of them holds more than it claims."""
    from kvlens.auditing.audit import audit
    from kvlens.cli.audit_text import text

    say = Output(json, quiet)
    with say.progress("methods") as tick:
        run = audit(
            traces, model, out,
            policies=policy or (), scorers=scorer or (), presses=press or (), keep_fraction=keep_fraction,
            sinks=sinks, recent=recent, question_last=question_last, enforce=enforce, chat=chat,
            target_tokens=target_tokens, device=device, dtype=dtype, attention=attention, seed=seed, limit=limit,
            beyond_context=beyond_context, force=force, progress=tick, note=say.note,
        )  # fmt: skip
    found = run.documents["audit"]
    say.answer(found | {"run": run.path}, text=text(run), paths=[run.path])
    tried = [row for row in found["rows"] if row["source"] != "none"]
    if not any(row["n_texts"] for row in tried):
        raise InputError(f"no method could run: {tried[0]['method']} {tried[0]['verdict']:.300}", "see the table above")
    if found["n_claims_not_met"]:
        raise VerdictNo(f"{found['n_claims_not_met']} of {len(found['rows'])} rows hold more than they claim")
