"""`kvlens inspect`: which windows mattered in a label run, which tokens the future predicts, what methods held."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns, table

if TYPE_CHECKING:
    import pandas as pd

    from kvlens.loading import Run


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a run of labels, surprise or audit.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the page to this file.")
    ] = None,
    trace: Annotated[str | None, typer.Option("--trace", metavar="ID", help="Look at this trace only.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, metavar="N", help="How many windows or tokens to list.")] = 20,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the windows or tokens that stand out, or an audit's methods; --html also writes a page of the former."""
    from kvlens import facts, reporting
    from kvlens.cli import audit_text, surprise_text
    from kvlens.loading import load
    from kvlens.schemas import AUDIT, SURPRISE

    run = load(path)
    if run.schema == AUDIT and html is None and trace is None:
        Output(json, quiet).answer(run.documents["audit"] | {"run": path}, text=audit_text.text(run), paths=[path])
        return
    top = reporting.inspect(run, trace=trace, n=n, html=html)
    if run.schema == SURPRISE:
        document = {**surprise_text.document(run, trace), "tokens": top.to_dict("records"), "html": html}
        text = f"{surprise_text.text(run, trace)}\n{surprise_text.tokens_text(run, trace, max(1, n // 2))}"
    else:
        document = {**facts.summary(run, trace), "windows": top.to_dict("records"), "html": html}
        text = _text(run, top, trace)
    text += f"\n\nrun   {path}"
    if html is not None:
        text += f"\npage  {html.resolve().as_uri()}"
    Output(json, quiet).answer(document, text=text, paths=[path] if html is None else [html])


def _text(run: Run, top: pd.DataFrame, trace: str | None) -> str:
    """The run's facts and the table of windows in their context."""
    from kvlens import facts, findings
    from kvlens.page_style import visible

    known = columns({name: visible(value) for name, value in facts.facts(run, trace).items()})
    if top.empty:
        return f"{known}\n\nno window to rank: each holds position 0 or has no label; label smaller or closer ones"
    flips = ["answer"] if top.flipped.notna().any() else []
    headers = ["nats", "pos", *flips, "segment", *([] if trace else ["trace"]), "in context"]
    rows = []
    for row in top.itertuples():
        context = f"{visible(row.before)}[{visible(findings.shortened(row.text))}]{visible(row.after)}"
        where = [findings.nats(row.effect_nats), findings.positions(row.start, row.end)]
        where += [findings.FLIP_WORDS[row.flipped]] if flips else []
        rows.append([*where, row.segment, *([] if trace else [visible(row.trace_id)]), context])
    return f"{known}\n\n{table(headers, rows, right=(0, 1))}"
