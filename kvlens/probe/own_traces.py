"""What does a model itself write to a prompt, and is it right? Graded traces, one line each, from prompts.

1. read the prompts and look at what the file already holds: lines of the same configuration are kept, a last line that
   a kill cut off is removed, anything else is refused;
2. for each prompt without a line: generate with a seed made of (run seed, id), so that no trace depends on another;
3. split the text into reasoning and target, check that it can be labelled, grade the target;
4. append the line; it is on the disk before the next prompt begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlens import model as models
from kvlens.disk import as_path
from kvlens.errors import InputError
from kvlens.formats import JSONL_SUFFIXES
from kvlens.grading import GRADERS
from kvlens.grading import grade as graded
from kvlens.linefile import LineFile
from kvlens.model import Model
from kvlens.provenance import versions
from kvlens.records import Trace
from kvlens.texts import at_hand, read_prompts, read_traces, split_reasoning, tokenize
from kvlens.wording import counted


def traces(
    prompts: str | Path | Sequence[Trace],
    model: str | Model = models.DEFAULT_MODEL,
    out: str | Path = "traces.jsonl",
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    chat: bool = False,
    grade: str = "math",
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    seed: int = 0,
    limit: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    on_skip: Callable[[str, str], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> list[Trace]:
    """The model's own graded traces, which the JSONL file `out` then holds, one a line.

    A trace's `meta` is the prompt's own and `made_by` (settings and model fingerprint), `model`, `model_note`,
    `versions`, `prompt_seed`, `n_generated`, `hit_length_cap`, `score` and `correct` (null without an answer).

    Args:
        prompts: what `read_prompts` takes, or prompts at hand.
        model: what `-m` takes, or a loaded `Model` (then device, dtype and attention are its own).
        temperature: 0 takes the likeliest token at every step.
        chat: render the prompt with the model's chat template; label such traces with `chat` as well.
        grade: the grader of `kvlens.grading` that compares the target with the prompt's answer.
        limit: only the first prompts; with more of them later, the same file goes on.
        force: replace traces of another configuration in `out`.
        progress: called with (prompts done, prompts in all); on_skip: with (id, reason) for a prompt without a trace;
            note: told what is there already.

    Raises: InputError, EnvironmentLacks, ModelRefused; finished lines stay, and the same call continues after them.
    Cost: a prefill a prompt and a forward pass a token, one prompt at a time.
    """
    asked = (
        read_prompts(prompts, limit=limit)
        if isinstance(prompts, (str, Path))
        else at_hand(prompts, limit, prompts=True)
    )
    path = as_path(out, "output")
    _check(path, max_new_tokens, temperature, grade, seed)
    if isinstance(prompts, (str, Path)) and path.exists() and Path(prompts).resolve() == path.resolve():
        raise InputError(f"'{path}' is the file of prompts itself", "choose another file for the traces")
    with LineFile(path) as lines:
        loaded = models.as_model(model, device=device, dtype=dtype, attention=attention)
        settings = {
            "fingerprint": loaded.fingerprint,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "temperature": float(temperature),
            "chat": chat,
            "grade": grade,
        }
        finished = _finished(lines, asked, settings, force)
        if finished and note is not None:
            note(f"'{path}' holds {len(finished):,} of {counted(len(asked), 'trace')} already")
        _answer(lines, asked, loaded, settings, finished, progress or _ignore, on_skip or _ignore)
    return read_traces(path)


def _ignore(*_: object) -> None:
    """Nobody listens."""


def _answer(
    lines: LineFile,
    asked: Sequence[Trace],
    model: Model,
    settings: Mapping[str, Any],
    finished: Collection[str],
    progress: Callable[[int, int], None],
    on_skip: Callable[[str, str], None],
) -> None:
    """Nothing; appends a trace for every prompt that has none yet."""
    reason = ""
    for number, prompt in enumerate(asked):
        progress(number, len(asked))
        if prompt.id in finished:
            continue
        try:
            trace = own_trace(model, prompt, settings)
        except InputError as error:
            reason = reason or f", such as {prompt.id}: {error.message}"
            on_skip(prompt.id, error.message)
        else:
            lines.append(_line(trace))
    progress(len(asked), len(asked))
    if not lines.lines:
        raise InputError(
            f"none of the {len(asked)} prompts gave a trace{reason}", "raise --max-new-tokens, or drop --chat"
        )


def own_trace(model: Model, prompt: Trace, settings: Mapping[str, Any]) -> Trace:
    """What the model writes to one prompt, split and graded.

    Raises: InputError when that makes no trace to label; the message says why.
    """
    # A stand-in target: the prompt is then tokenised exactly as it will be when its trace is labelled.
    read = tokenize(replace(prompt, target="."), model.tokenizer, chat=settings["chat"])
    ids = read.ids[: read.n_prompt].tolist()
    models.check_ids(model, ids)
    room = min(settings["max_new_tokens"], model.max_context - len(ids))
    if room < 1:
        raise InputError(f"its prompt of {len(ids)} tokens fills the model's context of {model.max_context}")
    seed = prompt_seed(settings["seed"], prompt.id)
    new = models.generate(model, ids, max_new_tokens=room, temperature=settings["temperature"], seed=seed)
    reasoning, target = split_reasoning(_text(model, ids, new), model.tokenizer)
    score = graded(settings["grade"], target, prompt.answer) if prompt.answer else None
    meta = {
        "made_by": dict(settings),
        "model": model.name,
        "model_note": model.note,
        "versions": {
            name: version for name, version in versions().items() if name in ("kvlens", "torch", "transformers")
        },
        "prompt_seed": seed,
        "n_generated": len(new),
        "hit_length_cap": len(new) == room,
        "score": score,
        "correct": None if score is None else score >= 1.0,
    }
    kept = {name: value for name, value in prompt.meta.items() if name not in meta}
    trace = replace(prompt, reasoning=reasoning, target=target, meta=meta | kept)
    whole = tokenize(trace, model.tokenizer, chat=settings["chat"], max_tokens=model.max_context)
    models.check_ids(model, whole.ids.tolist())
    return trace


def prompt_seed(seed: int, trace_id: str) -> int:
    """The seed of one prompt's draws, in [0, 2^63)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{trace_id}".encode()).digest()[:8], "big") >> 1


def _text(model: Model, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of the new tokens as it follows the prompt; a character cut off at the end is left out."""
    head, whole = (model.tokenizer.decode(ids) for ids in (prompt, [*prompt, *new]))
    # Some tokenizers drop a space in front of what they decode, so the new tokens are not decoded by themselves.
    text = whole[len(head) :] if whole.startswith(head) else model.tokenizer.decode(new)
    return str(text).rstrip("\ufffd")


def _check(path: Path, max_new_tokens: int, temperature: float, grade: str, seed: int) -> None:
    """Nothing; refuses what cannot work before any model is loaded."""
    if path.suffix.lower() not in JSONL_SUFFIXES:
        raise InputError(f"cannot write traces to '{path}': not a JSONL file", "name a file that ends in .jsonl")
    numbers = type(max_new_tokens) is int and type(temperature) in (int, float)
    if not numbers or max_new_tokens < 1 or not 0 <= temperature < float("inf"):
        raise InputError(
            f"cannot generate {max_new_tokens!r} tokens at temperature {temperature!r}",
            "give at least 1 token and a temperature of 0 or more",
        )
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise InputError(f"seed {seed!r} is no whole number of 0 or more", "give one below 2^63")
    if not isinstance(grade, str) or grade not in GRADERS:
        raise InputError(f"cannot grade by {grade!r}: no such grader", f"use one of {', '.join(GRADERS)}")


# The file


def _line(trace: Trace) -> str:
    row = {
        "id": trace.id,
        "meta": trace.meta,
        "prompt": trace.prompt,
        "reasoning": trace.reasoning,
        "target": trace.target,
        "answer": list(trace.answer) or None,
    }
    return json.dumps(row, ensure_ascii=False, allow_nan=False)


def _finished(lines: LineFile, asked: Sequence[Trace], settings: Mapping[str, Any], force: bool) -> set[str]:
    """The ids of the prompts whose line is there; afterwards the file holds these lines and nothing else.

    Raises: InputError where the file holds something else, which `force` replaces if it is traces made here.
    """
    rows = [_own_row(lines.path, number, line) for number, line in enumerate(lines.lines, start=1)]
    if lines.tail and not rows and not any(_may_be_ours(lines.tail, prompt.id, settings) for prompt in asked):
        raise _not_ours(lines.path, 1)
    reasons = _differences(rows, asked, settings)
    if reasons and not force:
        raise InputError(
            f"'{lines.path}' holds traces from a different configuration: {'; '.join(reasons[:3])}",
            "choose another file, or add --force to replace them",
        )
    if reasons:
        lines.clear()
        return set()
    lines.repair()
    return {row["id"] for row in rows}


def _own_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The row of one line that `traces` wrote."""
    try:
        row = json.loads(line)
        if isinstance(row["id"], str) and isinstance(row["meta"]["made_by"], dict):
            return dict(row)
    except (ValueError, TypeError, KeyError):
        pass
    raise _not_ours(path, number)


def _not_ours(path: Path, number: int) -> InputError:
    return InputError(
        f"'{path}', line {number} was not written by `kvlens traces` or is damaged",
        "choose another file; kvlens neither continues nor replaces what it did not write",
    )


def _may_be_ours(tail: bytes, trace_id: str, settings: Mapping[str, Any]) -> bool:
    """Whether a cut-off line could be the beginning of this prompt's."""
    start = _line(Trace(trace_id, meta={"made_by": dict(settings)})).partition("}")[0].encode()
    return start.startswith(tail) or tail.startswith(start)


def _differences(rows: Sequence[dict[str, Any]], asked: Sequence[Trace], settings: Mapping[str, Any]) -> list[str]:
    """What makes these rows other traces than the ones asked for, in words."""
    made_by = rows[0]["meta"]["made_by"] if rows else settings
    found = [
        f"{name} is {made_by.get(name)!r} there and {settings.get(name)!r} here"
        for name in {**settings, **made_by}
        if made_by.get(name) != settings.get(name)
    ]
    prompts = {prompt.id: prompt for prompt in asked}
    for row in rows:
        prompt = prompts.get(row["id"])
        if row["meta"]["made_by"] != made_by:
            found.append(f"the settings of {row['id']!r} differ from its neighbours'")
        elif prompt is None:
            found.append(f"trace {row['id']!r} is not among the {len(asked)} prompts")
        elif (row.get("prompt"), row.get("answer")) != (prompt.prompt, list(prompt.answer) or None):
            found.append(f"the prompt of {row['id']!r} is another one there")
    return found
