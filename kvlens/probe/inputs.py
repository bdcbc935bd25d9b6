"""What does a verb that runs a model over traces start from?

1. traces from a file, a data set or at hand, each under an id of its own;
2. their tokens for this model, refused before any work where it cannot read them;
3. what tells one run from another: a hash of traces and tokens, and the model's facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlens import model as models
from kvlens.model import Model
from kvlens.provenance import hash_traces
from kvlens.records import Tokens, Trace
from kvlens.texts import at_hand, read_traces
from kvlens.tokenising import tokenize
from kvlens.wording import counted

Tick = Callable[[int, int], None]
Note = Callable[[str], None]


def ignore(*_: object) -> None:
    """Nobody listens."""


def already_there(out: str | Path) -> str:
    """What a second start of a finished run says."""
    return f"'{out}' holds this run already, finished: nothing to measure (--force measures anew)"


def warn_of_chat(traces: Sequence[Trace], chat: bool, note: Note) -> None:
    """Nothing; tells of traces that a model made in its chat format and that are read without it."""
    made = [trace for trace in traces if (trace.meta.get("made_by") or {}).get("chat") is True]
    if made and not chat:
        note(f"warning: {counted(len(made), 'trace')} were made in the model's chat format: --chat reads them so")


def traces_of(source: str | Path | Sequence[Trace], limit: int | None) -> list[Trace]:
    """The first `limit` traces of a source (see `read_traces`) or of those at hand (see `at_hand`)."""
    return read_traces(source, limit=limit) if isinstance(source, (str, Path)) else at_hand(source, limit)


def tokens_of(trace: Trace, model: Model, *, target_tokens: int, chat: bool, beyond_context: bool) -> Tokens:
    """The trace's tokens, refused when the model was not trained for that many or does not know one of them."""
    most = models.learned_positions(model) if beyond_context else model.max_context
    found = tokenize(trace, model.tokenizer, target_tokens=target_tokens, chat=chat, max_tokens=most)
    models.check_ids(model, found.ids.tolist())
    return found


def hash_input(traces: Sequence[Trace], everything: Sequence[Tokens]) -> str:
    """The SHA-256 of the traces and of how they were tokenised: another tokenizer or template makes another run."""
    digest = hashlib.sha256(hash_traces(traces).encode())
    for tokens in everything:
        digest.update(f"{tokens.n_prompt} {tokens.n_context} ".encode() + tokens.ids.astype("<i8").tobytes())
    return digest.hexdigest()


def facts_of(model: Model) -> dict[str, Any]:
    """What `open_run` is told of a model."""
    return {
        "model": {"name": model.name, "fingerprint": model.fingerprint, "note": model.note},
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.attention,
    }
