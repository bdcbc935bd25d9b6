"""What does a model read of the traces, and is it the same as last time?

1. each trace's tokens, refused where the model was not trained for that many or does not know one of them;
2. one hash over the texts and how they were tokenised: another tokenizer or chat template makes another run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvlens import model as models
from kvlens.model import Model
from kvlens.provenance import hash_traces
from kvlens.records import Tokens, Trace
from kvlens.tokenising import tokenize


def tokens_for(
    model: Model, trace: Trace, *, target_tokens: int = 48, chat: bool = False, beyond_context: bool = False
) -> Tokens:
    """The trace's tokens. Raises: InputError when they are too many or unknown to the model."""
    longest = models.learned_positions(model) if beyond_context else model.max_context
    found = tokenize(trace, model.tokenizer, target_tokens=target_tokens, chat=chat, max_tokens=longest)
    models.check_ids(model, found.ids.tolist())
    return found


def hash_input(everything: Sequence[Tokens]) -> str:
    """The SHA-256 of the traces and of how they were tokenised."""
    digest = hashlib.sha256(hash_traces([tokens.trace for tokens in everything]).encode())
    for tokens in everything:
        digest.update(f"{tokens.n_prompt} {tokens.n_context} ".encode() + tokens.ids.astype("<i8").tobytes())
    return digest.hexdigest()
