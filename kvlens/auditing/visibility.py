"""What has a method seen when it compresses? The texts of an audit, each with the place where the cache is compressed.

1. A trace is read as context, question, target. With `questions`, each of them that has a target is a text of its own
   after the trace's prompt and reasoning (or its whole `text`). Else there is no question apart from the context.
2. As a rule a method compresses when it has seen the context but neither question nor target. Where nothing is asked
   apart, it has seen all but the target's predecessor; a `prompt` then holds what is asked, so the method is
   query-aware, and a plain `text` asks nothing, so it is query-agnostic.
3. `question_last`: every text twice, compressed before and after its question. Without `questions` the last sentence
   of the prompt is the question, and what it is followed by (the reasoning) goes with it.

The token before the target is always fed after the compression, so that every token of the target is predicted over
what the method kept. The two kinds of visibility are never summed up in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64

from kvlens.errors import InputError
from kvlens.records import Tokens, Trace
from kvlens.segmenting import units

AWARE, AGNOSTIC = "query_aware", "query_agnostic"


@dataclass(frozen=True)
class Case:
    """A text, and how much of it a method has seen when it compresses."""

    id: str
    visibility: str
    ids: Int64[np.ndarray, " pos"]
    n_seen: int  # tokens in the cache when it is compressed
    n_context: int  # where the target starts

    @property
    def n_target(self) -> int:
        return len(self.ids) - self.n_context


def asked(traces: Sequence[Trace], *, question_last: bool, chat: bool) -> list[tuple[Trace, bool]]:
    """1. and 3. The traces to tokenise, and of each whether its prompt is the context and its reasoning the question.

    Raises: InputError where a question is needed and there is none, or where a chat template would stand between.
    """
    found = []
    for trace in traces:
        apart = [
            Trace(
                f"{trace.id}/{number}",
                prompt=trace.prompt + trace.reasoning if trace.text is None else trace.text,
                reasoning=question.question,
                target=question.target,
            )
            for number, question in enumerate(trace.questions, start=1)
            if question.target
        ]
        if question_last and not apart:
            apart = [_split(trace)]
        if apart and chat:
            raise InputError(
                f"trace {trace.id!r}: a chat template closes the turn that a question is asked in", "leave --chat out"
            )
        found += [(one, True) for one in apart] or [(trace, False)]
    ids = [trace.id for trace, _ in found]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise InputError(f"two texts are called {twice!r:.80}: a trace's questions are ID/1, ID/2", "rename a trace")
    return found


def _split(trace: Trace) -> Trace:
    """The trace with the last sentence of its prompt at the head of what follows."""
    if trace.text is not None:
        raise InputError(
            f"trace {trace.id!r} is a whole text that asks nothing",
            "give it questions with targets, or prompt and target",
        )
    bare = trace.prompt.rstrip()
    starts = [start for start in _sentence_starts(bare) if start > 0]
    if not starts:
        raise InputError(
            f"trace {trace.id!r}: its prompt is one sentence, so nothing comes before its question",
            "give it questions with targets, or a longer prompt",
        )
    cut = starts[-1]
    return replace(trace, prompt=trace.prompt[:cut], reasoning=trace.prompt[cut:] + trace.reasoning, spans=())


def _sentence_starts(text: str) -> list[int]:
    """Where a sentence starts, in characters; each character stands for a token of its own."""
    spans = np.stack([np.arange(len(text)), np.arange(1, len(text) + 1)], 1).astype(np.int32)
    ids = np.zeros(len(text) + 2, dtype=np.int64)
    padded = np.concatenate([spans, np.full((2, 2), -1, dtype=np.int32)])
    tokens = Tokens(Trace("prompt", text=text), ids, 0, len(text) + 1, text, padded)
    return [start for start, _ in units(tokens, "sentence")]


def cases(everything: Sequence[Tokens], apart: Sequence[bool], *, question_last: bool) -> list[Case]:
    """2. and 3. The texts of an audit; `apart` says of each whether it was asked apart.

    Raises: InputError for a text of which nothing could be compressed.
    """
    found = []
    for tokens, is_apart in zip(everything, apart, strict=True):
        after = Case(tokens.trace.id, AWARE, tokens.ids, tokens.n_context - 1, tokens.n_context)
        if not is_apart:
            kind = AGNOSTIC if tokens.trace.text is not None else AWARE
            found.append(replace(after, visibility=kind))
            continue
        before = replace(after, visibility=AGNOSTIC, n_seen=min(tokens.n_prompt, tokens.n_context - 1))
        found += [before, after] if question_last else [before]
    short = next((case for case in found if case.n_seen < 2), None)
    if short is not None:
        raise InputError(
            f"trace {short.id!r} has {short.n_seen} tokens before the cache is compressed", "give a longer context"
        )
    return found
