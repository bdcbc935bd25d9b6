"""`kvlens inspect`: which tokens mattered in a label run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, table

if TYPE_CHECKING:
    import pandas as pd

    from kvlens.loading import Run


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a label run.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the page to this file.")
    ] = None,
    trace: Annotated[str | None, typer.Option("--trace", metavar="ID", help="Look at this trace only.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many tokens to list.")] = 20,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the tokens that mattered most in a label run; with --html also write them as a page."""
    from kvlens import reporting

    run = reporting.labels_run(path)
    top = reporting.inspect(run, trace=trace, n=n, html=html)
    document = {**reporting.summary(run), "tokens": top.to_dict("records"), "html": html}
    text = _text(run, top, trace)
    if html is not None:
        text += f"\n\npage: {html}"
    Output(json, quiet).answer(document, text=text, paths=[path] if html is None else [html])


def _text(run: Run, top: pd.DataFrame, trace: str | None) -> str:
    """The run's facts, where the sink stands, and the table of tokens in their context."""
    from kvlens import reporting
    from kvlens.page_style import visible

    lines = [f"{name.ljust(12)}  {value}" for name, value in reporting.facts(run).items()]
    sinks = reporting.sink_effects(run)
    sinks = sinks if trace is None else sinks[sinks.index == trace]
    if len(sinks):
        lines.append(f"{'position 0'.ljust(12)}  {reporting.nats(sinks.median())} nats (an attention sink, not ranked)")
    headers = ["nats", "pos", "segment", "in context"] if trace else ["nats", "pos", "segment", "trace", "in context"]
    rows = []
    for row in top.itertuples():
        context = f"{visible(row.before)}[{visible(row.token)}]{visible(row.after)}"
        where = [reporting.nats(row.effect_nats), str(row.pos), row.segment]
        rows.append([*where, context] if trace else [*where, visible(row.trace_id), context])
    return "\n".join([*map(visible, lines), "", table(headers, rows, right=(0, 1))])
