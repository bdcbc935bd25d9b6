"""`kvlens surprise`: which cached tokens the future predicts least, and which would stay."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns


def command(
    traces: options.Traces,
    out: options.Out,
    model: options.Model = "smollm2-135m",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="WORDS",
            help="A pass and what is read off it, words joined by commas, such as fast or full,logprob; may be given "
            "several times (default: full, then fast). A wrong word lists what there is.",
        ),
    ] = None,
    budget: Annotated[
        int | None, typer.Option("-J", "--budget", min=1, metavar="N", help="Also evict: tokens a refresh leaves.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, metavar="H", help="Tokens between refreshes (default: J / 4).")
    ] = None,
    frozen: Annotated[
        int | None, typer.Option("--frozen", min=0, metavar="N", help="First tokens kept beside J (default: 4).")
    ] = None,
    recent: Annotated[
        int | None, typer.Option("--recent", min=0, metavar="N", help="Last tokens kept among J (default: 0).")
    ] = None,
    chat: options.Chat = False,
    target_tokens: Annotated[
        int, typer.Option("--target-tokens", min=1, metavar="N", help="Target of plain texts, left out of the pass.")
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
    """Score each token by how little the tokens after it predict it; with -J, evict by that score as the text grows."""
    from kvlens.observables.surprise_variant import read_variant

    for words in variant or ():
        read_variant(words)  # a slip is told before torch is loaded
    from kvlens.cli.surprise_text import document, text
    from kvlens.probe.surprise import VARIANTS, surprise

    say = Output(json, quiet)
    with say.progress("traces") as tick:
        run = surprise(
            traces, model, out,
            variants=variant or VARIANTS, budget=budget, every=every, frozen=frozen, recent=recent, chat=chat,
            target_tokens=target_tokens, device=device, dtype=dtype, attention=attention, seed=seed, limit=limit,
            beyond_context=beyond_context, force=force, progress=tick, note=say.note,
        )  # fmt: skip
    say.answer(document(run), text=f"{text(run)}\n{columns({'run': run.path})}", paths=[run.path])
