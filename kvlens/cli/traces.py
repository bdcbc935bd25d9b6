"""`kvlens traces`: a model's own graded traces, from prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns
from kvlens.wording import counted

if TYPE_CHECKING:
    from kvlens.records import Trace


def command(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS", help="A .jsonl, .parquet or .txt file, or hf:NAME.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The .jsonl file to write.")],
    model: options.Model = "smollm2-135m",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, metavar="N", help="The longest text to generate.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="T", help="0 takes the likeliest token at every step.")
    ] = 0.0,
    chat: options.Chat = False,
    grade: Annotated[
        Literal["math", "exact", "contains", "token_f1", "rouge_l", "choice"],
        typer.Option("--grade", help="How the target is compared with the prompt's answer."),
    ] = "math",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    seed: options.Seed = 0,
    limit: options.Limit = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Let the model answer every prompt, split each text into reasoning and target, and grade it."""
    from kvlens.probe import own_traces

    say = Output(json, quiet)
    skipped: list[dict[str, str]] = []

    def on_skip(trace_id: str, reason: str) -> None:
        skipped.append({"id": trace_id, "reason": reason})
        say.note(f"no trace of {trace_id}: {reason}")

    with say.progress("traces") as tick:
        found = own_traces.traces(
            prompts, model, out,
            max_new_tokens=max_new_tokens, temperature=temperature, chat=chat, grade=grade, device=device, dtype=dtype,
            attention=attention, seed=seed, limit=limit, force=force, progress=tick, on_skip=on_skip,
            note=say.note,
        )  # fmt: skip
    document = {"path": out, **_facts(found), "skipped": skipped}
    if document["n_hit_length_cap"]:
        what = counted(document["n_hit_length_cap"], "trace")
        say.note(f"warning: {what} stopped at {max_new_tokens} tokens, unfinished; give more with --max-new-tokens")
    say.answer(document, text=_text(document), paths=[out])


def _facts(found: list[Trace]) -> dict[str, Any]:
    """What the traces say of themselves."""
    graded = [trace for trace in found if trace.meta["correct"] is not None]
    return {
        "model": found[0].meta["model"],
        "model_note": found[0].meta["model_note"],
        "n_traces": len(found),
        "n_graded": len(graded),
        "n_correct": sum(trace.meta["correct"] for trace in graded),
        "n_hit_length_cap": sum(trace.meta["hit_length_cap"] for trace in found),
    }


def _text(document: dict[str, Any]) -> str:
    note = f" ({document['model_note']})" if document["model_note"] else ""
    skipped = len(document["skipped"])
    facts = {
        "model": f"{document['model']}{note}",
        "traces": f"{document['n_traces']:,}" + (f", {counted(skipped, 'prompt')} without one" if skipped else ""),
        "correct": f"{document['n_correct']:,} of {document['n_graded']:,} graded",
        "cut off": f"{document['n_hit_length_cap']:,} at the longest text",
        "file": str(document["path"]),
    }
    return columns(facts)
