"""Which pass, which score? A variant of counter-causal surprise, as words: `fast`, `full,logprob,no_self`, `layers=4`.

- how much of the model runs: `full` | `fast` (the last block without its MLP) | `layers=K` (the last K blocks), and
  `skip_mlp` for the last block of these;
- what is scored: `logit` | `logprob`;
- whether the token's own embedding is in the stream: `with_self` | `no_self`;
- what a score is of: `token` | `sentence` | `clause` (units are sums of log-probabilities);
- what is seen: `gap=N` leaves out that many rows next to it, `past` turns the pass round: the control of direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kvlens.errors import InputError

WORDS: dict[str, dict[str, Any]] = {
    "full": {"layers": None},  # says nothing of MLPs: `full,skip_mlp` is a pass too
    "fast": {"layers": 1, "skip_mlp": True},
    "skip_mlp": {"skip_mlp": True},
    "logit": {"logprob": False},
    "logprob": {"logprob": True},
    "with_self": {"no_self": False},
    "no_self": {"no_self": True},
    "token": {"unit": None},
    "sentence": {"unit": "sentence", "logprob": True},
    "clause": {"unit": "clause", "logprob": True},
    "past": {"past": True},
}
NUMBERS = {"layers": ("layers", 1), "gap": ("min_gap", 0)}  # word: field, least
MOST = 2**31 - 1


@dataclass(frozen=True)
class Variant:
    """A pass and what is read off it; `layers` is how many of the last blocks run, None all of them."""

    layers: int | None = None
    skip_mlp: bool = False
    logprob: bool = False
    no_self: bool = False
    unit: str | None = None
    min_gap: int = 0
    past: bool = False

    def __post_init__(self) -> None:
        if self.min_gap < 0 or self.unit not in (None, "sentence", "clause") or (self.unit and not self.logprob):
            raise InputError(f"{self!r} is no variant: a gap from 0 on, and units of log-probabilities", _hint())

    @property
    def name(self) -> str:
        """Its words, in one spelling."""
        runs = "full" if self.layers is None else f"layers={self.layers}"
        words = [runs, "skip_mlp" if self.skip_mlp else ""]
        if (self.layers, self.skip_mlp) == (1, True):
            words = ["fast"]
        words += ["logprob" if self.logprob and self.unit is None else "", "no_self" if self.no_self else ""]
        words += [self.unit or "", f"gap={self.min_gap}" if self.min_gap else "", "past" if self.past else ""]
        return ",".join(word for word in words if word)


FULL, FAST = Variant(), Variant(layers=1, skip_mlp=True)


def read_variant(text: str) -> Variant:
    """The variant that these words, joined by commas, name.

    Raises: InputError for a word that is none, comes twice, or contradicts another.
    """
    given: dict[str, Any] = {}
    if not isinstance(text, str):
        raise InputError(f"variant {text!r:.80} is no text", "join words by commas, such as 'fast' or 'full,logprob'")
    words = [part.strip() for part in text.split(",")]
    for i, word in enumerate(words):
        if word in words[:i]:
            raise InputError(f"variant '{text}': '{word}' comes twice", _hint())
        for field, value in _meaning(word).items():
            if field in given and given[field] != value:
                raise InputError(f"variant '{text}': '{word}' contradicts a word before it", _hint())
            given[field] = value
    return Variant(**given)


def _meaning(word: str) -> dict[str, Any]:
    """The fields that a word sets."""
    if word in WORDS:
        return WORDS[word]
    name, mark, number = word.partition("=")
    if name in NUMBERS and mark and number.isascii() and number.isdecimal():
        field, least = NUMBERS[name]
        if len(number) < 11 and least <= int(number) <= MOST:
            return {field: int(number)}
        raise InputError(f"variant word '{word}' is outside {least} to {MOST}", _hint())
    near = get_close_matches(word, [*WORDS, *(f"{name}=N" for name in NUMBERS)], n=2, cutoff=0.6)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise InputError(f"there is no variant word '{word:.80}'", meant + _hint())


def _hint() -> str:
    return f"join some of {', '.join(WORDS)}, {', '.join(f'{name}=N' for name in NUMBERS)} by commas"
