"""Which traces does a source hold, and what does a model read of them? The public door to both.

1. `read_traces` / `read_prompts` check every row of a source (`formats.py` reads the rows) and build `Trace` records,
   refusing fields of the wrong kind, ids seen before and sources without any record.
2. `tokenize`, `units`, `token_ranges` and `split_reasoning` come from `tokenising.py` and `segmenting.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvlens.errors import InputError
from kvlens.formats import kind_of, refuse, rows
from kvlens.records import Question, Trace
from kvlens.segmenting import UNITS, split_reasoning, units
from kvlens.tokenising import token_ranges, tokenize

__all__ = ["UNITS", "at_hand", "read_prompts", "read_traces", "split_reasoning", "token_ranges", "tokenize", "units"]

META_DEPTH = 50  # objects and lists inside each other; what writes and hashes them recurses


def read_traces(source: str | Path, *, limit: int | None = None) -> list[Trace]:
    """The traces of `source`, in order; at most `limit` of them, and nothing after those is read or checked.

    Raises:
        InputError: no such file, a form that is not known, or a row that is no valid trace (file and line named).
        EnvironmentLacks: the `datasets` package, the dataset or permission to read is missing.
    """
    return _collect(source, _trace, limit)


def read_prompts(source: str | Path, *, limit: int | None = None) -> list[Trace]:
    """The prompts of `source` as traces without reasoning or target: `id`, `prompt`, optional `answer` and `meta`.

    Raises: as `read_traces`.
    """
    return _collect(source, _prompt, limit)


def at_hand(traces: Sequence[Trace], limit: int | None = None, *, prompts: bool = False) -> list[Trace]:
    """The first `limit` of traces (or `prompts`) that are in memory already.

    Raises: InputError when there are none, two of one id, something else among them, or what no file could hold.
    """
    build = _prompt if prompts else _trace
    if isinstance(traces, Trace) or not isinstance(traces, Iterable):
        raise InputError(f"cannot read traces from {traces!r:.80}", "give a file, or a list of traces")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InputError(f"cannot take {limit!r} traces: the limit must be 1 or more", "leave limit out")
    found = list(traces)[:limit]
    if not found:
        raise InputError("no traces to work on", "give at least one trace")
    for trace in found:
        if not isinstance(trace, Trace):
            raise InputError(f"{trace!r:.80} is no trace", "make one: kvlens.records.Trace(id, prompt=..., target=...)")
        build(f"trace {trace.id!r}", _as_row(trace))
    counts = Counter(trace.id for trace in found)
    if twice := [trace_id for trace_id, count in counts.items() if count > 1]:
        raise InputError(f"the id {twice[0]!r} stands for {counts[twice[0]]} traces", "give every trace its own id")
    return found


def _as_row(trace: Trace) -> dict[str, Any]:
    """The row of a file that would hold this trace; a piece that is empty and need not be there is left out."""
    whole = trace.text is not None
    pieces = {name: getattr(trace, name) for name in ("prompt", "reasoning", "target", "text")}
    kept = {name: piece for name, piece in pieces.items() if piece or not (whole or name == "reasoning")}
    questions = [
        {"question": one.question, "target": one.target, "answer": _listed(one.answer)} for one in trace.questions
    ]
    return kept | {
        "id": trace.id,
        "answer": _listed(trace.answer),
        "spans": [list(span) if isinstance(span, tuple) else span for span in trace.spans] or None,
        "questions": questions or None,
        "meta": trace.meta,
    }


def _listed(answers: Sequence[str]) -> list[str] | Any:
    return (list(answers) or None) if isinstance(answers, tuple) else answers


def _collect(source: str | Path, build: Callable[[str, dict[str, Any]], Trace], limit: int | None) -> list[Trace]:
    """Every record of `source` up to `limit`, ids unique."""
    if limit is not None and limit < 1:
        raise InputError(f"cannot read {limit} traces of {source}: the limit must be 1 or more", "leave --limit out")
    traces: list[Trace] = []
    seen: dict[str, str] = {}
    for place, row in rows(source):
        trace = build(place, row)
        if trace.id in seen:
            refuse(place, f"id {trace.id!r} was already used at {seen[trace.id]}", "give every trace its own id")
        seen[trace.id] = place
        traces.append(trace)
        if limit is not None and len(traces) >= limit:
            break
    if not traces:
        raise InputError(f"cannot read traces from {source}: it is empty", "write one JSON object a line")
    return traces


def _trace(place: str, row: dict[str, Any]) -> Trace:
    """The trace that `row` describes."""
    pieces = {name: _string(place, row, name) for name in ("prompt", "reasoning", "target", "text")}
    text = pieces.pop("text")
    if text is not None:
        given = [name for name, value in pieces.items() if value is not None]
        if given:
            refuse(place, f"both text and {' and '.join(given)} are given", "give text, or prompt and target")
        if not text.strip():
            refuse(place, "the text is empty")
    else:
        for name in ("prompt", "target"):
            if pieces[name] is None:
                refuse(place, f"the field {name!r} is missing", "give prompt and target, or text")
        if not pieces["target"]:
            refuse(place, "the target is empty", "a label needs at least one target token")
    prompt, reasoning, target = (value or "" for value in pieces.values())
    length = len(prompt + reasoning + target if text is None else text)
    return Trace(
        id=_identifier(place, row),
        prompt=prompt,
        reasoning=reasoning,
        target=target,
        text=text,
        answer=_answer(place, row),
        spans=_spans(place, row, length),
        questions=_questions(place, row),
        meta=_meta(place, row),
    )


def _prompt(place: str, row: dict[str, Any]) -> Trace:
    """The prompt that `row` holds; a `text` without a prompt, such as a plain text file, is one."""
    prompt = _string(place, row, "prompt")
    if prompt is None:
        prompt = _string(place, row, "text")
    if prompt is None:
        refuse(place, "the field 'prompt' is missing")
    if not prompt.strip():
        refuse(place, "the prompt is empty")
    return Trace(_identifier(place, row), prompt=prompt, answer=_answer(place, row), meta=_meta(place, row))


def _string(place: str, row: dict[str, Any], name: str) -> str | None:
    """The string field `name`, None where it is absent or null."""
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        refuse(place, f"{name!r} must be a string, found {kind_of(value)}")
    return _whole(place, value, name)


def _whole(place: str, text: str, name: str) -> str:
    """`text`, once no half of a surrogate pair is in it: JSON can spell one, but no tokenizer or file holds it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        refuse(place, f"{name!r} holds a lone surrogate at character {error.start}", "save the text as UTF-8")
    return text


def _identifier(place: str, row: dict[str, Any]) -> str:
    value = _string(place, row, "id")
    if not value:
        refuse(place, "the field 'id' is missing" if value is None else "the id is empty", "give every trace an id")
    return value


def _answer(place: str, row: dict[str, Any]) -> tuple[str, ...]:
    """Accepted answers: a string or a list of strings, none of them empty."""
    value = row.get("answer")
    if value is None:
        return ()
    answers = value if isinstance(value, list) else [value]
    for answer in answers:
        if not isinstance(answer, str):
            refuse(place, f"'answer' must be a string or a list of strings, found {kind_of(answer)}")
        if not answer.strip():
            refuse(place, "an answer is empty")
        _whole(place, answer, "answer")
    return tuple(answers)


def _spans(place: str, row: dict[str, Any], length: int) -> tuple[tuple[int, int], ...]:
    spans = row.get("spans")
    if spans is None:
        return ()
    if not isinstance(spans, list):
        refuse(place, f"'spans' must be a list of [start, end], found {kind_of(spans)}")
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span)):
            refuse(place, f"the span {span!r} is not [start, end] in whole characters")
        if not 0 <= span[0] < span[1] <= length:
            refuse(place, f"the span {span} is empty or outside the text of {length} characters")
    return tuple((start, end) for start, end in spans)


def _questions(place: str, row: dict[str, Any]) -> tuple[Question, ...]:
    questions = row.get("questions")
    if questions is None:
        return ()
    if not isinstance(questions, list) or not all(isinstance(question, dict) for question in questions):
        refuse(place, "'questions' must be a list of objects with a 'question' each")
    built = []
    for number, question in enumerate(questions, start=1):
        here = f"{place}, question {number}"
        asked, target = _string(here, question, "question"), _string(here, question, "target")
        if not asked or not asked.strip():
            refuse(here, "the field 'question' is missing or empty")
        if target == "":
            refuse(here, "the target is empty", "leave it out, or give it text")
        built.append(Question(asked, target, _answer(here, question)))
    return tuple(built)


def _meta(place: str, row: dict[str, Any]) -> dict[str, Any]:
    """The object `meta` as JSON can hold it."""
    meta = row.get("meta")
    if meta is None:
        return {}
    if not isinstance(meta, dict):
        refuse(place, f"'meta' must be an object, found {kind_of(meta)}")
    return {key: _json(place, value, 2) for key, value in _keyed(place, meta)}


def _keyed(place: str, value: dict[Any, Any]) -> list[tuple[str, Any]]:
    """The items of an object, once all its keys are text."""
    for key in value:
        if not isinstance(key, str):
            refuse(place, f"'meta' has the key {key!r}, which is no string")
        _whole(place, key, "meta")
    return list(value.items())


def _json(place: str, value: Any, depth: int) -> Any:
    """`value` (at `depth` levels inside `meta`) as JSON holds it; dates of Parquet or a dataset become ISO 8601."""
    if depth > META_DEPTH and isinstance(value, (dict, list)):
        refuse(place, f"'meta' is nested deeper than {META_DEPTH} levels", "keep it flatter")
    if isinstance(value, dict):
        return {key: _json(place, inner, depth + 1) for key, inner in _keyed(place, value)}
    if isinstance(value, list):
        return [_json(place, inner, depth + 1) for inner in value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):  # 1e999 is standard JSON and infinite
        refuse(place, "'meta' holds NaN or infinity", "leave such values out")
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, str):
        return _whole(place, value, "meta")
    if value is not None and not isinstance(value, (bool, int, float)):
        refuse(place, f"'meta' holds a value of the type {type(value).__name__}", "leave it out, or give it as text")
    return value
