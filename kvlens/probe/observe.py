"""Runs of signals: what is cheap to see of every token, in one folder that survives interruption?

1. Choose the signals, read and tokenise all traces, load and check the model: what is wrong is said before any work.
2. Open the run folder: finished, continued, or new.
3. Trace by trace, one forward pass over prompt and reasoning (`signal_pass.py`), written as a part; a part that is
   there is never redone. Target tokens are never in the pass: several signals read the future.
4. Merge the parts into the tables of `kvlens.signals/1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from kvlens import model as models
from kvlens.linear import kernel
from kvlens.loading import Run
from kvlens.model import Model
from kvlens.observables import lag, rolling
from kvlens.observables.table import ALL, Signal, choose
from kvlens.probe import budget
from kvlens.probe.inputs import Note, Tick, ignore, start, traces_of
from kvlens.probe.settings import check_values
from kvlens.probe.signal_pass import passes_for, read_signals
from kvlens.records import Tokens, Trace
from kvlens.schemas import SIGNALS
from kvlens.store import RunFolder
from kvlens.wording import counted


def observe(
    traces: str | Path | Sequence[Trace],
    model: str | Model = models.DEFAULT_MODEL,
    out: str | Path = "runs/signals",
    *,
    signals: str | Sequence[str] = ALL,
    chat: bool = False,
    target_tokens: int = 48,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    seed: int = 0,
    limit: int | None = None,
    beyond_context: bool = False,
    force: bool = False,
    progress: Tick | None = None,
    note: Note | None = None,
) -> Run:
    """The finished run of signals at `out`: a row for each token of prompt and reasoning, a column for each signal.

    A signal of every layer is an array of `n_layers` numbers a row: `np.stack(run.signals.key_norm)` is [row, layer].

    Args:
        traces: a trace file or dataset (see `read_traces`), or traces at hand.
        model: what `-m` takes, or a loaded `Model` (then device, dtype and attention are its own).
        signals: their names, as a list or joined by commas, or `all` (which leaves out surprise: a pass of its own).
        target_tokens, chat: as for `kvlens.label`, so that positions mean the same tokens in both runs.
        seed: kept with the run; no signal here draws anything at random.
        progress: called with (tokens done, tokens in all); note: told what lies ahead.

    Raises: InputError, EnvironmentLacks, ModelRefused; nothing already written is lost.
    Cost: one forward pass a trace, `surprise_full` about one more. Attention signals replace the attention backend by a
        slower one.
    Source: hidden_change and its kin are EpiKV's, lag is LagKV's, attention_mass is H2O's; each file names its own.
    """
    chosen = choose(signals)
    reading: dict[str, Any] = {"target_tokens": target_tokens, "chat": chat, "beyond_context": beyond_context}
    check_values({**reading, "seed": seed})
    ready = start(traces_of(traces, limit), model, out, reading, device=device, dtype=dtype, attention=attention)
    return ready.run(
        out,
        lambda run: _do(run, ready.model, chosen, ready.everything, progress or ignore, note or ignore),
        schema=SIGNALS,
        config={**as_config(chosen, ready.model), **reading},
        seed=seed,
        force=force,
        note=note,
    )


def as_config(signals: Sequence[Signal], model: Model) -> dict[str, Any]:
    """What `run.json` keeps of the signals: which, of which kind, over how many layers, with which windows."""
    return {
        "signals": [signal.name for signal in signals],
        "per_layer": [signal.name for signal in signals if signal.per_layer],
        "causal": [signal.name for signal in signals if signal.causal],
        "n_layers": model.n_layers,
        "rolling_window": rolling.WINDOW,
        "lag_chunk": lag.CHUNK,
    }


def _do(
    run: RunFolder, model: Model, signals: Sequence[Signal], everything: Sequence[Tokens], progress: Tick, note: Note
) -> None:
    """Nothing; observes the traces that the run lacks and finishes it."""
    counts = np.bincount(np.concatenate([_context(tokens) for tokens in everything]), minlength=model.d_vocab)
    ahead = [tokens for tokens in everything if not _is_there(run, tokens)]
    total = sum(tokens.n_context for tokens in everything)
    done = total - sum(tokens.n_context for tokens in ahead)
    if ahead:
        before = f", {len(everything) - len(ahead):,} done before" if len(ahead) < len(everything) else ""
        note(f"{total - done:,} tokens of {counted(len(ahead), 'trace')} to observe, a forward pass each{before}")
    passes = passes_for(model, signals)
    for tokens in ahead:
        progress(done, total)
        ids = torch.from_numpy(_context(tokens)).to(model.device)
        columns = read_signals(model, ids, signals, torch.from_numpy(counts).to(model.device)[ids], passes)
        run.write_part("signals", tokens.trace.id, _token_columns(tokens) | columns)
        run.write_part("traces", tokens.trace.id, _trace_row(tokens))
        done += tokens.n_context
    progress(done, total)
    ids_of_traces = [tokens.trace.id for tokens in everything]
    run.finish(
        {"signals": ids_of_traces, "traces": ids_of_traces},
        counts={"traces": len(everything), "tokens": total},
        peak_bytes=budget.peak_bytes(model.device),
        results={"linear_kernel": kernel(), "too_short": _too_short(signals, everything)},
    )


def _context(tokens: Tokens) -> Int[np.ndarray, " pos"]:
    """The ids of prompt and reasoning."""
    return tokens.ids[: tokens.n_context]


def _is_there(run: RunFolder, tokens: Tokens) -> bool:
    """Whether an earlier start of this run observed the trace."""
    return run.has_part("signals", tokens.trace.id) and run.has_part("traces", tokens.trace.id)


def _token_columns(tokens: Tokens) -> dict[str, Any]:
    return {
        "trace_id": tokens.trace.id,
        "pos": np.arange(tokens.n_context, dtype=np.int32),
        "token_id": _context(tokens).astype(np.int32),
    }


def _trace_row(tokens: Tokens) -> dict[str, Any]:
    return {
        "trace_id": [tokens.trace.id],
        "n_tokens": [tokens.n_tokens],
        "n_prompt": [tokens.n_prompt],
        "n_context": [tokens.n_context],
    }


def _too_short(signals: Sequence[Signal], everything: Sequence[Tokens]) -> dict[str, list[str]]:
    """By signal, the traces of which no token has a value, for they are shorter than what it compares."""
    short = [tokens.trace.id for tokens in everything if tokens.n_context < 2 * lag.CHUNK]
    return {"lag": short} if short and any(signal.name == "lag" for signal in signals) else {}
