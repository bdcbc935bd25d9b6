"""`kvlens label`: counterfactual importance labels of every window of every trace."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns


def command(
    traces: Annotated[str, typer.Argument(metavar="TRACES", help="A .jsonl, .parquet or .txt file, or hf:NAME.")],
    out: options.Out,
    model: options.Model = "smollm2-135m",
    intervention: Annotated[
        Literal["evict", "knockout", "substitute"] | None,
        typer.Option("--intervention", help="What happens to a window (default evict)."),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=1, metavar="N", help="Tokens in a window (default 1).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, metavar="N", help="Tokens between windows (default: the window).")
    ] = None,
    units: Annotated[
        Literal["sentence", "step", "line", "spans"] | None,
        typer.Option("--units", help="Windows from the text, not of a fixed width."),
    ] = None,
    cells: Annotated[
        str | None, typer.Option("--cells", metavar="LAYERS[:HEADS]", help="Only these, such as 10-20:0,3.")
    ] = None,
    lag: Annotated[
        int | None, typer.Option("--lag", min=0, metavar="K", help="Evict a window K tokens after it ended.")
    ] = None,
    per_target: Annotated[bool, typer.Option("--per-target", help="Keep the effect on each target token.")] = False,
    flips: Annotated[bool, typer.Option("--flips", help="Regenerate the answer: does it change?")] = False,
    only_correct: Annotated[bool, typer.Option("--only-correct", help="Leave out traces with a wrong answer.")] = False,
    preset: Annotated[
        Literal["epikv"] | None, typer.Option("--preset", help="The settings of a paper's labels.")
    ] = None,
    target_tokens: Annotated[
        int | None, typer.Option("--target-tokens", min=1, metavar="N", help="Target of plain texts (default 48).")
    ] = None,
    filler: Annotated[
        Literal["randmulti", "random", "pad", "eos"] | None,
        typer.Option("--filler", help="What substitute puts in (default randmulti)."),
    ] = None,
    random_subsets: Annotated[
        int | None, typer.Option("--random-subsets", min=0, metavar="K", help="Also K random keep-masks a trace.")
    ] = None,
    screen: Annotated[
        str | None, typer.Option("--screen", metavar="FRACTION|auto", help="Only windows that a gradient ranks high.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render the prompt with the model's chat template.")] = False,
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
    from kvlens import findings

    document = {**findings.summary(run), "counts": run.meta["counts"], **run.meta["results"]}
    text = columns({**findings.facts(run), "run": str(run.path)})
    say.answer(document, text=text, paths=[run.path])


def _fraction(text: str | None) -> float | str | None:
    """The fraction of `--screen`, or its word, which the run judges."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
