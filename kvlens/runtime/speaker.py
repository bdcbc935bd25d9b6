"""How does a text get told while a model writes it? Piece by piece, no character before all of it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvlens import model as models
from kvlens.causal_lm import Model


class Speaker(BaseStreamer):
    """Tells the text as tokens come; a character that is not whole yet waits for its other tokens."""

    def __init__(self, model: Model, prompt: Sequence[int], tell: Callable[[str], None]) -> None:
        self.tokenizer, self.tell = model.tokenizer, tell
        self.stops = models.stop_ids(model)
        # some tokenizers drop a space in front of what they decode, so the text is read behind the prompt's last token
        self.before = list(prompt[-1:])
        self.head = self._decoded([])
        self.ids: list[int] = []
        self.n_puts = 0
        self.said = ""

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*self.before, *ids], skip_special_tokens=True))

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of new tokens as it follows the prompt; a character cut off at the end is left out."""
        whole = self._decoded(ids)
        text = whole[len(self.head) :] if whole.startswith(self.head) else self.tokenizer.decode(ids)
        return str(text).rstrip("\ufffd")

    def put(self, value: Tensor) -> None:
        """Takes the prompt, then one token at a time."""
        self.n_puts += 1
        if self.n_puts == 1:
            return
        self.ids += [i for i in value.reshape(-1).tolist() if i not in self.stops]
        if not self._decoded(self.ids).endswith("\ufffd"):
            self.end()

    def end(self) -> None:
        """Tells what is new, and what waited."""
        text = self.text_of(self.ids)
        if text.startswith(self.said):
            self.tell(text[len(self.said) :])
            self.said = text
