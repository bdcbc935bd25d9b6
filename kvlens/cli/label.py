"""`kvlens label`: counterfactual importance labels of every window of every trace."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns


def command(
    traces: options.Traces,
    out: options.Out,
    model: options.Model = "smollm2-135m",
    intervention: Annotated[
        Literal["evict", "knockout", "substitute"] | None,
        typer.Option(
            "--intervention",
            help="evict hides a window at the end of the text (default), knockout from every later "
            "token, substitute replaces its text.",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=1, metavar="N", help="Tokens in a window (default 1).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, metavar="N", help="Tokens between windows (default: the window).")
    ] = None,
    units: Annotated[
        Literal["sentence", "clause", "step", "line", "spans"] | None,
        typer.Option("--units", help="Windows from the text, not of a fixed width."),
    ] = None,
    cells: Annotated[
        str | None,
        typer.Option(
            "--cells",
            metavar="LAYERS[:HEADS]",
            help="Hide the window in these layers and heads alone, such as 10-20:0,3 (default: all).",
        ),
    ] = None,
    lag: Annotated[
        int | None,
        typer.Option(
            "--lag", min=0, metavar="K", help="Evict a window K tokens after it ended, not at the end of the text."
        ),
    ] = None,
    per_target: Annotated[
        bool, typer.Option("--per-target", help="Also keep the effect on each target token.")
    ] = False,
    flips: Annotated[
        bool,
        typer.Option("--flips", help="Also let the model answer again without the window: does the answer change?"),
    ] = False,
    only_correct: Annotated[
        bool, typer.Option("--only-correct", help="Leave out traces whose target does not state the answer.")
    ] = False,
    preset: Annotated[
        Literal["epikv"] | None,
        typer.Option(
            "--preset",
            help="The labels of the EpiKV paper: substitute, windows of 32 at stride 16, flips, "
            "right answers only, no prompt.",
        ),
    ] = None,
    target_tokens: Annotated[
        int | None,
        typer.Option(
            "--target-tokens",
            min=1,
            metavar="N",
            help="How many last tokens of a plain text are its target (default 48).",
        ),
    ] = None,
    filler: Annotated[
        Literal["randmulti", "random", "pad", "eos"] | None,
        typer.Option("--filler", help="The tokens substitute puts in (default randmulti: random ones, all different)."),
    ] = None,
    random_subsets: Annotated[
        int | None,
        typer.Option(
            "--random-subsets",
            min=0,
            metavar="K",
            help="Also evict many tokens at once, K random sets a trace, for effects that windows alone miss.",
        ),
    ] = None,
    screen: Annotated[
        str | None,
        typer.Option(
            "--screen",
            metavar="FRACTION|auto",
            help="Measure this fraction of the windows, chosen by a gradient pass, and a random audit "
            "sample; auto widens it.",
        ),
    ] = None,
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
    """Hide every window of each trace's cache in turn and measure what its answer loses, in nats."""
    from kvlens.probe.labels import label

    say = Output(json, quiet)
    with say.progress("windows") as tick:
        run = label(
            traces, model, out,
            intervention=intervention, window=window, stride=stride, units=units, cells=cells, lag=lag,
            per_target=per_target or None, flips=flips or None, only_correct=only_correct or None, preset=preset,
            target_tokens=target_tokens, filler=filler, random_subsets=random_subsets, screen=_fraction(screen),
            chat=chat or None, device=device, dtype=dtype, attention=attention, seed=seed, limit=limit,
            beyond_context=beyond_context or None, force=force, progress=tick, note=say.note,
        )  # fmt: skip
    from kvlens.facts import facts, summary

    document = {**summary(run), "counts": run.meta["counts"], "results": run.meta["results"]}
    text = columns({**facts(run), "run": str(run.path)})
    say.answer(document, text=text, paths=[run.path])


def _fraction(text: str | None) -> float | str | None:
    """The fraction of `--screen`, or its word, which the run judges."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
