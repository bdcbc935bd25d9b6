"""What does a verb that runs a model over traces start from?

1. traces from a file, a data set or at hand, each under an id of its own;
2. their tokens for this model, refused before any work where it cannot read them;
3. what tells one run from another: a hash of traces and tokens, and the model's facts;
4. the run folder: finished, continued or new, and what it holds in the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens import model as models
from kvlens.loading import Run, load
from kvlens.model import Model
from kvlens.provenance import hash_traces
from kvlens.records import Tokens, Trace
from kvlens.runstate import refuse_other_folder
from kvlens.store import RunFolder, open_run
from kvlens.texts import at_hand, read_traces
from kvlens.tokenising import tokenize
from kvlens.wording import counted

Tick = Callable[[int, int], None]
Note = Callable[[str], None]


def ignore(*_: object) -> None:
    """Nobody listens."""


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


@dataclass(frozen=True)
class Start:
    """Traces, the loaded model, and the traces' tokens for it: all that is known before a run folder is opened."""

    traces: Sequence[Trace]
    model: Model
    everything: Sequence[Tokens]
    reading: Mapping[str, Any]

    def run(
        self,
        out: str | Path,
        do: Callable[[RunFolder], None],
        *,
        schema: str,
        config: Mapping[str, Any],
        seed: int,
        force: bool,
        note: Note | None,
    ) -> Run:
        """The finished run at `out`; `do` measures what it lacks and finishes it, where it lacks anything.

        Raises: InputError where `out` holds another run, EnvironmentLacks where the disk refuses.
        """
        tell = note or ignore
        with open_run(
            out,
            schema=schema,
            config=dict(config),
            input_hash=hash_input(self.traces, self.everything),
            seed=seed,
            **facts_of(self.model),
            force=force,
        ) as run:
            already = run.complete
            if not already:
                warn_of_chat(self.traces, self.reading["chat"], tell)
                do(run)
        finished = load(out)
        if already:
            tell(f"'{out}' holds this run already, finished: nothing to measure (--force measures anew)")
        return finished


def start(
    traces: Sequence[Trace],
    model: str | Model,
    out: str | Path,
    reading: Mapping[str, Any],
    **place: str,
) -> Start:
    """The model loaded and the traces tokenised as `reading` says: target_tokens, chat, beyond_context.

    Raises: InputError where `out` holds what kvlens did not write, before the model is loaded; what loading and
        tokenising raise.
    """
    refuse_other_folder(out)
    loaded = models.as_model(model, **place)
    return Start(traces, loaded, [tokens_of(trace, loaded, **reading) for trace in traces], reading)
