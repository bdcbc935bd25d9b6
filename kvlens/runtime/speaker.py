"""How does a text get told while a model writes it? Piece by piece, no character before all of it is there.

1. Tokens wait until what they decode to ends in a whole character; then they are told, and the next ones wait.
2. They are decoded behind the tokens told before them: some tokenizers drop a space in front of what they decode. Only
   those are read again, so a token costs the same however long the text is.
3. What still waits at the end is told without the character that was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvlens import model as models
from kvlens.causal_lm import Model

CUT_OFF = "\ufffd"  # what stands for the bytes of a character that is not whole
MOST_TOKENS = 4  # of one character: it has no more bytes


class Pieces:
    """The text of tokens that come one by one, as it follows a prompt."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.waiting: list[int] = []
        tails = (prompt[-n:] for n in range(1, MOST_TOKENS + 1))  # the prompt may end with the last byte of a character
        self._stand_behind(next((tail for tail in tails if not self._decoded(tail).endswith(CUT_OFF)), prompt[-1:]))

    def _decoded(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _stand_behind(self, before: Sequence[int]) -> None:
        self.before, self.head = list(before), self._decoded(before)

    def _text(self) -> str:
        """2. of what waits; by itself where it changes what stands before it, as a byte that belongs nowhere does."""
        text = self._decoded([*self.before, *self.waiting])
        return text[len(self.head) :] if text.startswith(self.head) else self._decoded(self.waiting)

    def take(self, token: int) -> str:
        """1. The text that this token makes certain, often none."""
        self.waiting.append(token)
        text = self._text()
        if not text or text.endswith(CUT_OFF):
            return ""
        self._stand_behind(self.waiting)
        self.waiting = []
        return text

    def rest(self) -> str:
        """3."""
        return self._text().rstrip(CUT_OFF)


class Speaker(BaseStreamer):
    """Tells the text as tokens come; the tokens that end it are no part of it."""

    def __init__(self, model: Model, prompt: Sequence[int], tell: Callable[[str], None]) -> None:
        self.tokenizer, self.tell = model.tokenizer, tell
        self.stops = models.stop_ids(model)
        self.prompt = list(prompt[-MOST_TOKENS:])
        self.pieces = Pieces(self.tokenizer, self.prompt)
        self.prompt_came = False

    def text_of(self, ids: Iterable[int]) -> str:
        """All that is told of new tokens; a character cut off at the end is left out."""
        pieces = Pieces(self.tokenizer, self.prompt)
        return "".join([*[pieces.take(i) for i in ids if i not in self.stops], pieces.rest()])

    def put(self, value: Tensor) -> None:
        """Takes the prompt, then new tokens."""
        if not self.prompt_came:
            self.prompt_came = True
            return
        for token in value.reshape(-1).tolist():
            if token not in self.stops and (piece := self.pieces.take(token)):
                self.tell(piece)

    def end(self) -> None:
        """Tells what waited."""
        if piece := self.pieces.rest():
            self.tell(piece)
        self.pieces.waiting = []
