"""The values that flow between stages: frozen, without behaviour beyond reading themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

SEGMENTS = ("prompt", "reasoning", "target")


@dataclass(frozen=True, slots=True)
class Question:
    """One question asked of a trace's context."""

    question: str
    target: str | None = None
    answer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One input text, in pieces (`prompt + reasoning + target`) or as a whole (`text`).

    With `text` set the pieces are empty and the target is cut from its end when it is tokenised.
    `spans` are character ranges of `prompt + reasoning + target` (or of `text`), end exclusive.
    """

    id: str
    prompt: str = ""
    reasoning: str = ""
    target: str = ""
    text: str | None = None
    answer: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    questions: tuple[Question, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenised trace; all positions are absolute and start at 0.

    `ids[:n_prompt]` is the prompt (BOS and chat markup counted in), `ids[n_prompt:n_context]` the reasoning,
    `ids[n_context:]` the target. `char_spans[pos]` is the token's range in `text` (the text the model reads),
    or (-1, -1) for a token without text of its own such as BOS. `spans` are token ranges, end exclusive.
    """

    trace: Trace
    ids: Int64[np.ndarray, " pos"]
    n_prompt: int
    n_context: int
    text: str
    char_spans: Int32[np.ndarray, "pos 2"]
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def n_tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def n_target(self) -> int:
        return self.n_tokens - self.n_context

    def segment(self, pos: int) -> str:
        """The segment of `SEGMENTS` that position `pos` belongs to."""
        return SEGMENTS[(pos >= self.n_prompt) + (pos >= self.n_context)]
