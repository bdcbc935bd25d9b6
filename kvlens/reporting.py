"""Views of a labels run: which windows mattered (`findings.py`), as a page and in a notebook.

1. Scale: one symmetric scale for the whole page, ending at the 99th percentile of |effect|, so that a single extreme
   does not bleach the rest. Position 0 and what shares its window stand apart and stay out of every scale.
2. Write: self-contained HTML, each token tinted by its effect, its value on hover, all text escaped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from kvlens import surprise_page
from kvlens.disk import LOCK, as_path, write_whole
from kvlens.errors import InputError
from kvlens.facts import facts
from kvlens.findings import (
    FLIP_WORDS,
    beside_sink,
    labels_run,
    nats,
    positions,
    shortened,
    sink_effects,
    tokens_of,
    top_windows,
)
from kvlens.loading import Run, load
from kvlens.page_style import N_STEPS, step, step_class, style_sheet, visible
from kvlens.runstate import STATE
from kvlens.schemas import LABELS, SURPRISE
from kvlens.surprise_facts import chosen_traces, surprise_run, top_tokens

SCALE_QUANTILE = 0.99


def inspect(
    run: Run | str | Path, *, trace: str | None = None, n: int = 20, html: str | Path | None = None
) -> pd.DataFrame:
    """The `n` most important windows of a labels run (of one trace, or of all); `html` also writes the page there.

    Of a run of surprise, the `n` tokens of the highest score under its first variant.

    Raises: InputError when it is no finished run of either, has no such trace, or `n` is no count.
    """
    run = _viewable(run)
    of_surprise = run.schema == SURPRISE
    file = None if html is None else as_path(html, "html")
    if file is not None:
        _refuse_own_file(run, file)
    table = top_tokens(run, trace, None, n) if of_surprise else top_windows(run, trace, n)
    if file is not None:  # a path that is no UTF-8 is shown with its bytes spelt out
        text = (surprise_page.page if of_surprise else page)(run, None if trace is None else [trace])
        write_whole(file, text.encode("utf-8", "backslashreplace"))
    return table


def _viewable(run: Run | str | Path) -> Run:
    """The single run of labels or of surprise behind `run`; InputError where it is another."""
    run = run if isinstance(run, Run) else load(run)
    if run.schema == SURPRISE:
        return surprise_run(run)
    if run.schema != LABELS:
        raise InputError(
            f"viewing '{run.path}' failed: it holds a run of {run.schema.split('/')[0].removeprefix('kvlens.')}, "
            "not labels or surprise",
            "give the folder of a run of labels or of surprise",
        )
    return labels_run(run)


def _refuse_own_file(run: Run, html: Path) -> None:
    """Nothing, unless the page would replace a file of the run itself."""
    target = Path(os.path.realpath(html))
    of_a_run = target.name in (STATE, LOCK) or target.suffix == ".parquet"
    if of_a_run and target.parent == Path(os.path.realpath(run.path)):
        raise InputError(f"writing '{html}' failed: it is a file of the run itself", "give another --html file")
    if target.is_file() and target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"writing '{html}' failed: it exists and is no .html file", "give another --html file")


def page(run: Run | str | Path, trace_ids: Sequence[str] | None = None) -> str:
    """The run as one HTML page without any outside resource: the given traces, or all of them."""
    run = labels_run(run)
    ids = list(run.traces.trace_id) if trace_ids is None else list(trace_ids)
    scale = _scale(run, pd.concat([tokens_of(run, trace_id) for trace_id in ids])) if ids else 0.0
    about = facts(run, ids[0] if len(ids) == 1 else None)
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{_shown(value)}</dd>" for name, value in about.items())
    sections = "\n".join(_section(run, trace_id, scale, f"t{number}") for number, trace_id in enumerate(ids))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvlens: {_shown(Path(run.path).name)}</title>
<style>{style_sheet()}</style></head>
<body><main class="kvlens page"><header><h1>Which cached tokens mattered</h1>
<div class="soft">{_shown(run.path)}, {escape(run.schema)}</div><dl>{rows}</dl></header>
{_legend(scale)}
{_contents(run, ids) if len(ids) > 1 else ""}
{sections}
</main></body></html>
"""


def show(run: Run | str | Path, trace_id: str | None = None) -> View | SurpriseView:
    """One trace of a run of labels or of surprise (default: its first) as a notebook shows it."""
    run = _viewable(run)
    if run.schema == SURPRISE:
        return SurpriseView(run, chosen_traces(run, trace_id)[0])
    if trace_id is None and run.traces.empty:
        raise InputError(f"showing {run!r} failed: it has no traces", "look at counts.skipped in its run.json")
    return View(run, trace_id if trace_id is not None else str(run.traces.trace_id.iloc[0]))


@dataclass(frozen=True, eq=False, repr=False)
class View:
    """A trace to look at: tinted text in a notebook, a table of its top tokens elsewhere."""

    run: Run
    trace_id: str

    def __post_init__(self) -> None:
        tokens_of(self.run, self.trace_id)

    def _repr_html_(self) -> str:
        scale = _scale(self.run, tokens_of(self.run, self.trace_id))
        about = facts(self.run)
        line = ", ".join(about[name] for name in ("model", "intervention", "precision"))
        head = f'<style>{style_sheet()}</style><div class="soft">{_shown(line)}</div>{_legend(scale)}'
        return f'<div class="kvlens">{head}{_section(self.run, self.trace_id, scale, "")}</div>'

    def __repr__(self) -> str:
        top = top_windows(self.run, self.trace_id, 10)
        shown = top.assign(**{name: top[name].map(visible) for name in ("text", "before", "after")})
        return f"{visible(self.trace_id)}\n{shown.drop(columns='trace_id').to_string(index=False)}"


@dataclass(frozen=True, eq=False, repr=False)
class SurpriseView:
    """A trace of a run of surprise: its text under each variant in a notebook, its highest scores elsewhere."""

    run: Run
    trace_id: str

    def _repr_html_(self) -> str:
        return surprise_page.notebook_view(self.run, self.trace_id)

    def __repr__(self) -> str:
        top = top_tokens(self.run, self.trace_id, None, 10)
        shown = top.assign(token=top.token.map(visible)).drop(columns="trace_id")
        return f"{visible(self.trace_id)}\n{shown.to_string(index=False)}"


def _scale(run: Run, tokens: pd.DataFrame) -> float:
    """Where the colour scale ends, in nats; 0 when nothing is labelled."""
    sizes = tokens.effect_nats[~beside_sink(run, tokens)].abs().replace(np.inf, np.nan).dropna()
    return float(sizes.quantile(SCALE_QUANTILE)) if len(sizes) else 0.0


def _shown(text: str) -> str:
    return escape(visible(text))


def _legend(scale: float) -> str:
    steps = "".join(f'<span class="{step_class(number)}"></span>' for number in range(-N_STEPS, N_STEPS + 1))
    half, end = nats(scale / 2)[1:], nats(scale)[1:]
    ticks = "".join(f"<span>{tick}</span>" for tick in (f"≤ −{end}", f"−{half}", "0", f"+{half}", f"≥ +{end}"))
    return f"""<div class="legend"><div class="bar"><span>better without it</span><div class="steps">{steps}</div>
<span>the target needs it</span><div class="ticks">{ticks}</div></div>
<div class="keys"><span>Effect in nats (1 nat: a factor of 2.7): log p(target) with the window minus without it</span>
<span><span class="sink">position 0</span> usually an attention sink; with its window off the scale</span>
<span>no tint: less than {nats(scale / N_STEPS / 2)[1:]} nats, within the noise, or not labelled</span></div></div>"""


def _contents(run: Run, ids: list[str]) -> str:
    items = []
    for number, trace_id in enumerate(ids):
        tokens = tokens_of(run, trace_id)
        effects = tokens.effect_nats[~beside_sink(run, tokens)].dropna()
        largest = f", largest {nats(effects.loc[effects.abs().idxmax()])} nats" if len(effects) else ""
        note = f"{len(tokens):,} tokens{largest}"
        items.append(f'<li><a href="#t{number}">{_shown(trace_id)}</a> <span class="soft">{note}</span></li>')
    return f'<nav aria-label="Traces"><h2>Traces</h2><ol>{"".join(items)}</ol></nav>'


def _section(run: Run, trace_id: str, scale: float, anchor: str) -> str:
    """One trace: its numbers, its text by segment, its top tokens."""
    tokens = tokens_of(run, trace_id).sort_values("pos")
    tokens = tokens.assign(apart=beside_sink(run, tokens))
    trace = run.traces[run.traces.trace_id == trace_id].iloc[0]
    noise = 0.0 if pd.isna(trace.noise_nats) else float(trace.noise_nats)
    numbers = [f"{trace.n_tokens:,} tokens, {trace.n_target:,} of them target"]
    if pd.notna(trace.log_prob_full):
        numbers.append(f"log p(target) = {nats(trace.log_prob_full)} nats")
    numbers += [f"position 0: {nats(value)} nats" for value in sink_effects(run)[lambda s: s.index == trace_id]]
    pieces = []
    for segment, rows in tokens.groupby("segment", sort=False):
        spans = "".join(_spans(rows, scale, noise))
        pieces.append(f'<div class="piece {escape(segment)}"><div class="soft">{escape(segment)}</div>')
        pieces.append(f'<div class="tokens">{spans}</div></div>')
    head = f'<h2>{_shown(trace_id)}</h2><div class="soft">{escape("; ".join(numbers))}</div>'
    return f'<section id="{anchor}">{head}{"".join(pieces)}{_top_table(run, trace_id, scale, noise)}</section>'


def _spans(tokens: pd.DataFrame, scale: float, noise: float) -> Iterator[str]:
    """The tokens as HTML; the value is in `title`, a line break shows its sign and then breaks."""
    for row in tokens.itertuples():
        known = pd.notna(row.effect_nats)
        name = "sink" if row.apart else step_class(step(row.effect_nats, scale, noise) if known else 0)
        effect = f"{nats(row.effect_nats)} nats" if known else "target" if row.segment == "target" else "not labelled"
        flips = ", the answer flips" if pd.notna(row.flipped) and row.flipped else ""
        title = escape(f"{effect}{flips} · position {row.pos} · “{visible(row.token)}”")
        text = _shown(row.token).replace("↵", '<span class="nl">↵</span>\n') if "\n" in row.token else _shown(row.token)
        yield f'<span{f" class={name}" if name else ""} title="{title}">{text}</span>'


def _top_table(run: Run, trace_id: str, scale: float, noise: float) -> str:
    """The ten windows with the largest |effect|, for reading without colour."""
    rows = []
    top = top_windows(run, trace_id, 10)
    flips = bool(top.flipped.notna().any())
    for row in top.itertuples():
        tint = step_class(step(row.effect_nats, scale, noise))
        mark = f'<mark class="{tint}">{_shown(shortened(row.text))}</mark>'
        context = f"{_shown(row.before)}{mark}{_shown(row.after)}"
        cells = (
            f'<td class="number">{nats(row.effect_nats)}</td><td class="number">{positions(row.start, row.end)}</td>'
        )
        if flips:
            cells += f"<td>{FLIP_WORDS[row.flipped]}</td>"
        rows.append(f'<tr>{cells}<td>{escape(row.segment)}</td><td class="context">{context}</td></tr>')
    if not rows:
        return ""
    answer = "<th>answer</th>" if flips else ""
    head = f'<th class="number">nats</th><th class="number">position</th>{answer}<th>segment</th><th>in context</th>'
    return f"""<details open><summary>Where it mattered most</summary>
<table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></details>"""
