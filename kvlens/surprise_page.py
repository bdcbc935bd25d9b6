"""A run of surprise to look at: each trace's text under each variant, what leaves struck out, and the refreshes.

1. Tint: a token's place among the scores of its text, orange for the half that the future says least about, blue for
   the half it says most about; the deepest tints are the ends.
2. Struck out: tokens that a refresh evicts; when, and at which score, is said on hover.
3. A table of the refreshes: how many tokens were held, how many left, and which text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from kvlens.loading import Run
from kvlens.page_style import N_STEPS, step_class, style_sheet, visible
from kvlens.surprise_facts import about, chosen_traces, fates, steps_of, surprise_run, variants

LEFT_CHARACTERS = 120
STRUCK = ".kvlens .left{text-decoration:line-through;text-decoration-thickness:2px}"


def page(run: Run | str | Path, trace_ids: Sequence[str] | None = None) -> str:
    """The run as one HTML page without any outside resource: the given traces, or all of them.

    Raises: InputError for what is no single run of surprise, or a trace that it has not.
    """
    run = surprise_run(run)
    asked = [None] if trace_ids is None else trace_ids
    ids = [trace_id for one in asked for trace_id in chosen_traces(run, one)]
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{_shown(value)}</dd>" for name, value in about(run).items())
    links = "".join(f'<li><a href="#t{number}">{_shown(trace_id)}</a></li>' for number, trace_id in enumerate(ids))
    contents = f'<nav aria-label="Traces"><h2>Traces</h2><ol>{links}</ol></nav>' if len(ids) > 1 else ""
    sections = "\n".join(section(run, trace_id, f"t{number}") for number, trace_id in enumerate(ids))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvlens: {_shown(Path(run.path).name)}</title>
<style>{style_sheet()}{STRUCK}</style></head>
<body><main class="kvlens page"><header><h1>Which cached tokens the future predicts</h1>
<div class="soft">{_shown(run.path)}, {escape(run.schema)}</div><dl>{rows}</dl></header>
{_legend(run)}
{contents}
{sections}
</main></body></html>
"""


def section(run: Run, trace_id: str, anchor: str = "") -> str:
    """One trace under every variant."""
    trace = run.traces[run.traces.trace_id == trace_id].iloc[0]
    numbers = f"{trace.n_context:,} tokens of prompt and reasoning"
    pieces = "".join(_variant(run, trace_id, variant) for variant in variants(run))
    mark = f' id="{anchor}"' if anchor else ""
    return f'<section{mark}><h2>{_shown(trace_id)}</h2><div class="soft">{numbers}</div>{pieces}</section>'


def notebook_view(run: Run, trace_id: str) -> str:
    """The same for a notebook cell."""
    line = ", ".join(list(about(run).values())[:2])
    head = f'<style>{style_sheet()}{STRUCK}</style><div class="soft">{_shown(line)}</div>{_legend(run)}'
    return f'<div class="kvlens">{head}{section(run, trace_id)}</div>'


def _legend(run: Run) -> str:
    steps = "".join(f'<span class="{step_class(number)}"></span>' for number in range(-N_STEPS, N_STEPS + 1))
    struck = (
        '<span><span class="left">struck out</span> evicted by a refresh</span>' if "refreshes" in run.tables else ""
    )
    return f"""<div class="legend"><div class="bar"><span>the future predicts it: leaves first</span>
<div class="steps">{steps}</div><span>it does not: stays longest</span></div>
<div class="keys"><span>Tint: a token's rank among the scores of its text, under one variant</span>{struck}
<span>no tint: the middle, or nothing comes after it</span></div></div>"""


def _variant(run: Run, trace_id: str, variant: str) -> str:
    """The text under one variant, and its refreshes."""
    tokens = fates(run, trace_id, variant)
    rank, most = tokens.score.rank(), max(int(tokens.score.count()) - 1, 1)
    tokens = tokens.assign(step=((2 * rank - tokens.score.count() - 1) / most * N_STEPS).round().fillna(0).astype(int))
    pieces = [f'<h3 class="soft">{escape(variant)}</h3>']
    for segment, rows in tokens.groupby("segment", sort=False):
        spans = "".join(_spans(rows))
        pieces.append(f'<div class="piece {escape(str(segment))}"><div class="soft">{escape(str(segment))}</div>')
        pieces.append(f'<div class="tokens">{spans}</div></div>')
    if "refreshes" in run.tables:
        pieces.append(_refreshes(steps_of(run, trace_id, variant)))
    return "".join(pieces)


def _spans(tokens: pd.DataFrame) -> Iterator[str]:
    """The tokens as HTML, score and fate in `title`."""
    for row in tokens.itertuples():
        known = not np.isnan(row.score)
        words = [f"score {row.score:+.2f}" if known else "nothing comes after it"]
        left = "refresh" in tokens and not pd.isna(row.refresh)
        if left:
            words.append(
                f"left at refresh {row.refresh}" + ("" if pd.isna(row.last_score) else f" ({row.last_score:+.2f})")
            )
        title = escape(f"{', '.join(words)} · position {row.pos} · “{visible(row.token)}”")
        names = " ".join(name for name in (step_class(int(row.step)), "left" if left else "") if name)
        text = _shown(row.token).replace("↵", '<span class="nl">↵</span>\n') if "\n" in row.token else _shown(row.token)
        yield f'<span{f" class={chr(34)}{names}{chr(34)}" if names else ""} title="{title}">{text}</span>'


def _refreshes(steps: pd.DataFrame) -> str:
    """The refreshes as a table."""
    if steps.empty:
        return '<div class="soft">no refresh: the text is no longer than what is held</div>'
    rows = "".join(
        f'<tr><td class="number">{row.refresh}</td><td class="number">{row.n_seen:,}</td>'
        f'<td class="number">{row.n_held:,}</td><td class="number">{row.n_left:,}</td>'
        f'<td class="context">{_shown(_cut(row.left))}</td></tr>'
        for row in steps.itertuples()
    )
    head = "".join(f'<th class="number">{name}</th>' for name in ("refresh", "tokens seen", "held before", "evicted"))
    return f"""<details><summary>Refreshes</summary>
<table><thead><tr>{head}<th>what was evicted</th></tr></thead><tbody>{rows}</tbody></table></details>"""


def _cut(text: str) -> str:
    return text if len(text) <= LEFT_CHARACTERS else f"{text[:LEFT_CHARACTERS]} …"


def _shown(text: str) -> str:
    return escape(visible(str(text)))
