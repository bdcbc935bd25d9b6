"""`kvzip`: what the model must look at to say the text again.

1. Carried: the ids of all tokens seen, evicted ones too (4 bytes each, against the kilobytes of keys and values).
2. When an eviction is due the model is told to repeat the context, and given the context again, over the cache
   (runtime/repeat.py). A slot is worth the largest weight that any query of this pass gives its key, in any head of the
   group. The pass is thrown away: cache, positions and model stay as they were.

Meant for `trigger: prefill` and a prompt that comes whole: the pass then reads the full context. Where some of it has
left before, the text is still repeated whole, but over what is held.

Query-agnostic as far as the question is no part of the prompt. Cost: about one more prefill over twice as many keys.

Source: KVzip, arXiv 2505.23416.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from kvlens.errors import InputError
from kvlens.scorers.interface import EMPTY, IDS, Facts, Plain, Repeat, Seen, Views

Words = Annotated[str, Field(max_length=2000)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]


@dataclass(frozen=True)
class Read:
    """The ids of each row's tokens in order, int32, on the right; -1 where a row has fewer. None before the first."""

    ids: Int[Tensor, "batch tokens"] | None = None


@dataclass(frozen=True)
class KVzip(Plain):
    """The largest weight that a repetition of the text gives a key; `prompt` is what it starts with."""

    prompt: Words = "\n\nRepeat the previous context:\n\n"
    chunk: Tokens = 2048

    needs = frozenset({IDS})
    per_layer = True

    @property
    def second_pass(self) -> Repeat:  # type: ignore[override]
        """The whole text again, `chunk` tokens at a time."""
        return Repeat(self.prompt, self.chunk)

    def init(self, facts: Facts) -> Read:
        """Nothing read."""
        return Read()

    def observe(self, state: Read, seen: Seen) -> Read:
        """1. for the new tokens."""
        if seen.ids is None:
            raise InputError("a scorer that reads token ids was shown none")
        ids = seen.ids.to(torch.int32).masked_fill(seen.positions == EMPTY, EMPTY)
        ids = ids if state.ids is None else torch.cat([state.ids, ids], 1)
        if ids.shape[1] > 1 and bool((ids == EMPTY).any()):  # padding moves left, and goes where every row has it
            real = ids != EMPTY
            ids = ids.gather(1, real.to(torch.int8).sort(dim=-1, stable=True).indices)
            ids = ids[:, ids.shape[1] - max(1, int(real.sum(-1).max())) :].clone()
        return Read(ids)

    def score(self, state: Read, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """2."""
        if views.reread is None or state.ids is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        return views.reread(state.ids, None)
