"""Which tokens does a model read for a trace?

1. `_pieces` says what is read: the trace's pieces as they are, its `text`, or (chat) the prompt rendered as a user
   turn by the tokenizer's own template with reasoning and target continuing the assistant's turn.
2. Each piece is tokenised by itself, so that piece borders are token borders, without special tokens; pieces after
   the first get no dummy prefix space (`_mid_text` switches off what adds one).
3. The special tokens that the tokenizer puts in front of a text (BOS) are put there once; a prompt that already starts
   with them keeps its own, and in a chat the template alone decides.
4. Every token gets its character range in the text read, white space in front of it counted in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from kvlens.errors import InputError
from kvlens.records import Tokens, Trace


def tokenize(
    trace: Trace, tokenizer: Any, *, target_tokens: int = 48, chat: bool = False, max_tokens: int | None = None
) -> Tokens:
    """The tokens that a model reads for `trace`; `target_tokens` counts only where the trace is a whole `text`.

    Raises:
        InputError: an empty target, fewer than 2 context tokens, more than `max_tokens` tokens, a tokenizer without
            character offsets, or `chat` where there is no template or no prompt.
    """
    _refuse_slow(trace, tokenizer)
    pieces = _pieces(trace, tokenizer, chat)
    ids: list[int] = []
    char_spans: list[tuple[int, int]] = []
    borders: list[int] = []
    length = 0
    for piece in pieces:
        piece_ids, offsets = encode(tokenizer, piece, first=length == 0)
        ids += piece_ids
        char_spans += char_ranges(piece, offsets, length)
        borders.append(len(ids))
        length += len(piece)
    bos = [] if chat else _bos(tokenizer)
    added = [] if ids[: len(bos)] == bos else bos
    ids, char_spans = added + ids, [(-1, -1)] * len(added) + char_spans
    if trace.text is not None:
        n_prompt, n_context = len(bos), len(ids) - target_tokens
    else:
        n_prompt, n_context = borders[0] + len(added), borders[1] + len(added)
    _check(trace, len(ids), n_context, max_tokens)
    tokens = Tokens(
        trace=trace,
        ids=np.asarray(ids, dtype=np.int64),
        n_prompt=n_prompt,
        n_context=n_context,
        text="".join(pieces),
        char_spans=np.asarray(char_spans, dtype=np.int32).reshape(-1, 2),
    )
    return replace(tokens, spans=tuple(token_ranges(tokens, trace.spans)))


def prompt_ids(prompt: str, tokenizer: Any, *, chat: bool = False) -> list[int]:
    """The tokens that a model reads for a prompt, the same that `tokenize` gives the prompt of a trace.

    Raises: InputError as there, and for a prompt without tokens.
    """
    trace = Trace("prompt", prompt=prompt)
    _refuse_slow(trace, tokenizer)
    ids, _ = encode(tokenizer, _pieces(trace, tokenizer, chat)[0], first=True)
    bos = [] if chat else _bos(tokenizer)
    ids = ids if ids[: len(bos)] == bos else bos + ids
    if not ids:
        raise _error(trace, "it has no tokens", "give a prompt with text in it")
    return ids


def _refuse_slow(trace: Trace, tokenizer: Any) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise _error(trace, "this tokenizer gives no character offsets", "use the model's fast tokenizer")


def _error(trace: Trace, reason: str, hint: str = "") -> InputError:
    return InputError(f"cannot tokenise trace {trace.id!r}: {reason}", hint)


def _check(trace: Trace, n_tokens: int, n_context: int, max_tokens: int | None) -> None:
    """Refuse what cannot be labelled."""
    if n_context >= n_tokens:
        raise _error(trace, f"the target has {n_tokens - n_context} tokens", "it needs at least 1")
    if n_context < 2:
        hint = "lower --target-tokens" if trace.text is not None else "give a longer prompt or reasoning"
        found = f"{n_tokens} tokens leave {max(n_context, 0)} before the target of {n_tokens - n_context}"
        raise _error(trace, f"{found}, at least 2 are needed", hint)
    if max_tokens is not None and n_tokens > max_tokens:
        reason = f"its {n_tokens} tokens are more than the model's context of {max_tokens}"
        raise _error(trace, reason, "shorten it, or use --beyond-context")


# 1. What is read


def _pieces(trace: Trace, tokenizer: Any, chat: bool) -> list[str]:
    """The strings to tokenise one by one: the whole text, or prompt, reasoning and target."""
    if trace.text is not None:
        if chat:
            raise _error(trace, "a whole text has no prompt to render as a user turn", "leave --chat out")
        return [trace.text]
    prompt = trace.prompt
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise _error(trace, "the tokenizer has no chat template", "leave --chat out, or use a chat model")
        turns = [{"role": "user", "content": prompt}]
        try:
            prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program from elsewhere: it may raise whatever it likes
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            hint = "leave --chat out, or mend the template"
            raise _error(trace, f"the tokenizer's chat template failed: {reason}", hint) from error
    return [prompt, trace.reasoning, trace.target]


# 2. Tokens of one piece


def encode(tokenizer: Any, piece: str, *, first: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of `piece` and their character offsets in it, without special tokens."""
    if not piece:
        return [], []
    backend = None if first else _mid_text(tokenizer.backend_tokenizer)
    if backend is not None:
        encoding = backend.encode(piece, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)
    encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), [(start, end) for start, end in encoded["offset_mapping"]]


@lru_cache(maxsize=4)
def _mid_text(backend: Any) -> Any:
    """A copy of `backend` that adds no dummy prefix space; None where it adds none anyway.

    Cost: a copy of the vocabulary, once a tokenizer.
    """
    from tokenizers import Tokenizer

    parts = {}
    for name in ("normalizer", "pre_tokenizer"):
        part = getattr(backend, name)
        parts[name] = None if part is None else json.loads(part.__getstate__())
    plain = {name: _without_prefix(part) for name, part in parts.items()}
    if plain == parts:
        return None
    return Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | plain))


def _without_prefix(part: Any) -> Any:
    """A normalizer's or pre-tokenizer's description with every step that puts a space in front removed."""
    if not isinstance(part, dict) or part.get("type") == "Prepend":
        return None
    part = dict(part)
    for steps in ("normalizers", "pretokenizers"):
        if steps in part:
            part[steps] = [step for step in map(_without_prefix, part[steps]) if step is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if part["type"] == "ByteLevel":
        part["add_prefix_space"] = False
    return part


# 3. BOS


def _bos(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts in front of every text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    starts = [start for start in range(len(full)) if full[start : start + len(plain)] == plain]
    return full[: starts[0]] if starts else []


# 4. Characters


def char_ranges(piece: str, offsets: Sequence[tuple[int, int]], shift: int = 0) -> list[tuple[int, int]]:
    """Character ranges of a piece's tokens, moved by `shift`; (-1, -1) for a token without text of its own.

    Some tokenizers leave white space out of their offsets: it goes to the token after it, or to the empty one there.
    """
    spans = []
    edge = 0
    for i, (token_start, token_end) in enumerate(offsets):
        next_start = offsets[i + 1][0] if i + 1 < len(offsets) else len(piece)
        start = edge if piece[edge:token_start].isspace() else token_start
        end = next_start if start >= token_end and piece[start:next_start].isspace() else token_end
        spans.append((start + shift, end + shift) if start < end else (-1, -1))
        edge = max(edge, end)
    return spans


def token_ranges(tokens: Tokens, char_spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each character range of the trace's own text, the token range that holds its visible part, end exclusive.

    A token counts as soon as one of its characters is in the range. (0, 0) where no token is.
    """
    ranges = []
    for char_span in char_spans:
        start, end = _visible(tokens.text, *_in_text_read(tokens, *char_span))
        hit = np.flatnonzero((tokens.char_spans[:, 0] < end) & (tokens.char_spans[:, 1] > start))
        ranges.append((int(hit[0]), int(hit[-1]) + 1) if len(hit) else (0, 0))
    return ranges


def _visible(text: str, start: int, end: int) -> tuple[int, int]:
    """The range without white space at its ends, unless there is nothing else in it."""
    inside = text[start:end]
    if not inside.strip():
        return start, end
    return end - len(inside.lstrip()), start + len(inside.rstrip())


def _in_text_read(tokens: Tokens, start: int, end: int) -> tuple[int, int]:
    """A character range of prompt + reasoning + target, moved to where a chat template put it."""
    trace, text = tokens.trace, tokens.text
    if trace.text is not None:
        return start, end
    n_late = len(trace.reasoning) + len(trace.target)
    late = len(text) - n_late - len(trace.prompt)
    stripped = trace.prompt.strip()  # templates may strip what they render
    found = text.rfind(stripped, 0, len(text) - n_late)
    if start < len(trace.prompt) and (found < 0 or not stripped):
        raise _error(trace, "the chat template changes the prompt, so its spans have no place", "leave --chat out")
    early = found - trace.prompt.index(stripped)
    return (
        max(start + early, found) if start < len(trace.prompt) else start + late,
        min(end + early, found + len(stripped)) if end <= len(trace.prompt) else end + late,
    )
