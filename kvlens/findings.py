"""Which windows of a label run mattered?

The windows by |effect|, with their sign and a few words around each; of windows that overlap only the strongest is
listed. Position 0 is often an attention sink, whose effect says nothing about its text: its window is left out.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.schemas import LABELS

CONTEXT_CHARACTERS = 32
WINDOW_CHARACTERS = 64
FLIP_WORDS = {True: "changes", False: "stays", None: ""}  # the model's answer without a window
COLUMNS = ("trace_id", "start", "end", "segment", "effect_nats", "flipped", "before", "text", "after")


def labels_run(run: Run | str | Path) -> Run:
    """The labels run behind `run`, loaded when it is a path.

    Raises: InputError when it is of another schema, or several runs stacked.
    """
    run = run if isinstance(run, Run) else load(run)
    if run.schema != LABELS or "runs" in run.meta:
        what = "several runs" if "runs" in run.meta else f"a run of {run.schema.split('/')[0].removeprefix('kvlens.')}"
        raise InputError(f"viewing '{run.path}' failed: it holds {what}, not labels", "give the folder of a label run")
    if lacking := {"windows", "tokens", "traces"} - set(run.tables):
        raise InputError(f"viewing '{run.path}' failed: it has no table {sorted(lacking)}", "run its command again")
    return run


def tokens_of(run: Run, trace_id: str) -> pd.DataFrame:
    """One trace's rows of the table `tokens`. Raises: InputError with names like it when there is no such trace."""
    known = list(map(str, run.traces.trace_id))
    if not isinstance(trace_id, str) or trace_id not in known:  # pandas cannot compare with a name that is no UTF-8
        near = get_close_matches(str(trace_id), known, n=3, cutoff=0.3) or known[:3]
        raise InputError(f"'{run.path}' has no trace '{trace_id}'", f"its traces are named like {', '.join(near)}")
    return run.tokens[run.tokens.trace_id == trace_id]


def top_windows(run: Run | str | Path, trace_id: str | None = None, n: int = 20) -> pd.DataFrame:
    """The `n` labelled windows with the largest |effect|, in nats, of one trace or of all; never that of position 0.

    Columns: trace_id, start, end (positions, end exclusive), segment (of its first token), effect_nats, flipped (None
    where no answers were compared), and the text `before`, of (`text`) and `after` the window. A window that overlaps a
    stronger one is left out.

    Raises: InputError when it is no label run, has no such trace, or `n` is no count.
    """
    run = labels_run(run)
    if type(n) is not int or n < 1:
        raise InputError(f"cannot list {n!r} windows", "give a whole number from 1 on")
    windows = run.windows
    if trace_id is not None:
        tokens_of(run, trace_id)
        windows = windows[windows.trace_id == trace_id]
    ranked = windows[(windows.window_start > 0) & windows.effect_nats.notna()]
    ranked = ranked.iloc[np.argsort(-ranked.effect_nats.abs().to_numpy(), kind="stable")]
    texts: dict[str, _Text] = {}
    rows: list[tuple[Any, ...]] = []
    columns = (ranked[name].tolist() for name in ("window_start", "window_end", "effect_nats", "flipped"))
    for name, start, end, effect, flipped in zip(map(str, ranked.trace_id), *columns, strict=True):
        if len(rows) == n:
            break
        if name not in texts:
            texts[name] = _Text(run.tokens[run.tokens.trace_id == name])
        text = texts[name]
        if not text.listed[start:end].any():
            text.listed[start:end] = True
            flip = None if pd.isna(flipped) else bool(flipped)
            rows.append((name, start, end, text.segments[start], effect, flip, *text.around(start, end)))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"flipped": object})


class _Text:
    """A trace's text with the character where each token starts, and which tokens are listed already."""

    def __init__(self, tokens: pd.DataFrame) -> None:
        tokens = tokens.sort_values("pos")
        self.text = "".join(tokens.token)
        self.edges = np.concatenate([[0], tokens.token.str.len().cumsum()]).astype(int)
        self.segments = tokens.segment.tolist()
        self.listed = np.zeros(len(tokens), dtype=bool)

    def around(self, start: int, end: int) -> tuple[str, str, str]:
        """The text before, of and after positions [start, end)."""
        lo, hi = int(self.edges[start]), int(self.edges[end])
        before = self.text[max(0, lo - CONTEXT_CHARACTERS) : lo]
        return before, self.text[lo:hi], self.text[hi : hi + CONTEXT_CHARACTERS]


def beside_sink(run: Run, tokens: pd.DataFrame) -> pd.Series:
    """Which of these rows of `run.tokens` are position 0, or share a window with it and so carry its effect."""
    first = run.windows[run.windows.window_start == 0].groupby("trace_id").window_end.max()
    return tokens.pos < tokens.trace_id.map(first).fillna(1)


def sink_effects(run: Run | str | Path) -> pd.Series:
    """The effect in nats of the window that holds position 0, by trace_id; traces without one are absent."""
    windows = labels_run(run).windows
    first = windows[(windows.window_start == 0) & windows.effect_nats.notna()]
    return first.drop_duplicates("trace_id", keep="last").set_index("trace_id").effect_nats


def nats(value: float) -> str:
    """A signed effect in three digits, with a true minus sign."""
    return f"{value:+#.3g}".rstrip(".").replace("-", "−")


def positions(start: int, end: int) -> str:
    """The positions of a window, both ends included."""
    return str(start) if end - start == 1 else f"{start}–{end - 1}"


def shortened(text: str) -> str:
    """A window's text as a table shows it: its middle left out where it is long."""
    if not text:
        return "a later byte of the character before"
    if len(text) <= WINDOW_CHARACTERS:
        return text
    return f"{text[: WINDOW_CHARACTERS // 2]} … {text[-WINDOW_CHARACTERS // 4 :]}"
