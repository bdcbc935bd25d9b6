"""Which tokens of a trace form a sentence, a clause, a step, a line or a span, and where does a model's answer start?

`units` cuts that text at the ends of sentences, clauses, steps or lines and at piece borders; a token belongs to the
unit of its first visible character. The rules, chosen to be simple:
- line: ends with its newline.
- step: starts after a blank line, or at a line that opens with `Step 3` or with a number such as `3.`, `3)` or `3:`.
- sentence: ends at a newline, or after . ! ? … (and closing quotes or brackets) when white space or the text's end
  follows, or after their full-width forms; not after the abbreviations of `_ABBREVIATIONS`, nor after the number that
  opens a line.
- clause: as a sentence, and also after , ; : or a dash when white space follows.
- White space alone is no unit: it goes with the unit before it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from jaxtyping import Int64

from kvlens.errors import InputError
from kvlens.grading import answer_start
from kvlens.records import Tokens
from kvlens.tokenising import char_ranges, encode

UNITS = ("sentence", "clause", "step", "line", "spans")

_ABBREVIATIONS = ("e.g", "i.e", "cf", "vs", "mr", "mrs", "ms", "dr", "prof", "st", "fig", "eq", "approx", "al")
_LINE_END = re.compile(r"\n")
_STEP_BORDER = re.compile(
    r"(?<=\n)[^\S\n]*\n|^(?=[^\S\n]*(?:\*\*|\#+\ )?(?:step\s+\d|\d{1,3}[.):]\s))", re.MULTILINE | re.IGNORECASE
)
_SENTENCE_END = re.compile(
    r"\n|[.!?\u2026]+[\"'\u201d\u2019)\]*$}]*(?=\s|$)|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*"
)
_CLAUSE_END = re.compile(rf"{_SENTENCE_END.pattern}|[,;:\u2013\u2014]+(?=\s)")
_NO_SENTENCE_END = re.compile(
    rf"(?:^|[^\w.])(?:{'|'.join(map(re.escape, _ABBREVIATIONS))})$|(?:^|\n)[^\S\n]*\d{{1,3}}$", re.IGNORECASE
)


def units(tokens: Tokens, unit: str) -> list[tuple[int, int]]:
    """Token ranges, end exclusive, of every unit inside [0, n_context - 1), in order; no range comes twice.

    `spans` are the trace's own and may overlap (none: an empty list); the other units never do.
    """
    if unit not in UNITS:
        raise InputError(f"cannot cut a trace into {unit!r}: not a known unit", f"use one of {', '.join(UNITS)}")
    stop = max(tokens.n_context - 1, 0)
    if unit == "spans":
        return sorted({(start, min(end, stop)) for start, end in tokens.spans if start < min(end, stop)})
    cuts = _cuts(tokens.text, unit, [_first_char(tokens, tokens.n_prompt), _first_char(tokens, tokens.n_context)])
    owner = [bisect_right(cuts, _visible(tokens, pos)) if tokens.char_spans[pos, 0] >= 0 else 0 for pos in range(stop)]
    first = next((pos for pos in range(stop) if tokens.char_spans[pos, 0] >= 0), stop)
    owner = np.maximum.accumulate(np.asarray(owner, dtype=np.int64)).tolist()
    groups = [list(group) for _, group in groupby(range(first, stop), key=owner.__getitem__)]
    return [(group[0], group[-1] + 1) for group in groups]


def unit_numbers(tokens: Tokens, unit: str) -> Int64[np.ndarray, " pos"]:
    """For each position of the context the number of its unit, ascending; what stands before the first unit is one."""
    starts = [start for start, _ in units(tokens, unit)]
    return np.searchsorted(starts, np.arange(tokens.n_context), side="right").astype(np.int64)


def check_window(tokens: Tokens, window: tuple[int, int]) -> None:
    """Nothing; raises InputError for a window that is not inside [0, n_context - 1) or holds no position."""
    start, end = window
    last = tokens.n_context - 1
    if not 0 <= start < end <= last:
        raise InputError(
            f"{tokens.trace.id}: window [{start}, {end}) is not inside [0, {last})",
            "a window lies in the context and leaves out its last token",
        )


def _first_char(tokens: Tokens, pos: int) -> int:
    """The first character at or after token `pos` that belongs to a token."""
    starts = tokens.char_spans[pos:, 0]
    return int(starts[starts >= 0].min(initial=len(tokens.text)))


def _visible(tokens: Tokens, pos: int) -> int:
    """The first visible character of the token at `pos`, its first one where none is visible."""
    start, end = (int(edge) for edge in tokens.char_spans[pos])
    piece = tokens.text[start:end]
    return start + (len(piece) - len(piece.lstrip()) if piece.strip() else 0)


def _cuts(text: str, unit: str, borders: Sequence[int] = ()) -> list[int]:
    """Character positions, ascending, at which a unit of `text` ends and the next one starts."""
    pattern = {"line": _LINE_END, "step": _STEP_BORDER, "sentence": _SENTENCE_END, "clause": _CLAUSE_END}[unit]
    by_sense = unit in ("sentence", "clause")
    found = {match.end() for match in pattern.finditer(text) if not by_sense or _ends_sentence(text, match)}
    cuts: list[int] = []
    for cut in sorted(found | set(borders)):
        blank = not text[cuts[-1] if cuts else 0 : cut].strip()
        if blank and cuts and cuts[-1] not in borders:
            cuts[-1] = cut  # white space goes with the unit before it
        elif not blank:
            cuts.append(cut)
    return cuts


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    """Whether the punctuation at `match` ends a sentence rather than an abbreviation or a list number."""
    return match[0] != "." or not _NO_SENTENCE_END.search(text, max(0, match.start() - 16), match.start())


# Splitting what a model generated


def split_reasoning(text: str, tokenizer: Any, *, tokens_from_end: int = 64) -> tuple[str, str]:
    """A model's output as (reasoning, target), which joined give `text` again; the target is never empty.

    1. After the end of thinking (`</think>`) and the newlines that follow it.
    2. Else before the sentence that holds the last boxed or final answer.
    3. Else `tokens_from_end` tokens before the end.
    """
    if not text.strip():
        raise InputError("cannot split a model's output: it is empty", "let it generate more tokens")
    _, mark, tail = text.rpartition("</think>")
    if mark and tail.strip():
        target = tail.lstrip("\r\n")
        return text[: len(text) - len(target)], target
    answer = answer_start(text)
    if answer is not None:
        cuts = [0, *_cuts(text, "sentence")]
        cut = cuts[bisect_right(cuts, answer) - 1]
        return text[:cut], text[cut:]
    _, offsets = encode(tokenizer, text, first=True)
    cut = char_ranges(text, offsets)[-tokens_from_end][0] if len(offsets) > tokens_from_end else 0
    return text[:cut], text[cut:]
