"""Runs of counter-causal surprise: which cached tokens does the future predict least, and which would stay?

1. Read the variants, traces and model; a variant the model cannot run is said before any work.
2. Trace by trace: one forward pass over prompt and reasoning, then one pass of each variant over the cache it leaves.
   With a budget the text goes through a cache that is refreshed as it grows (surprise_cycles.py), once a variant.
   A trace is a part; a part that is there is never redone.
3. Merge the parts into the tables of `kvlens.surprise/1`, and say how far the variants agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.linear import fast_linear, kernel
from kvlens.loading import Run
from kvlens.model import Model
from kvlens.observables.surprise import State, Surprise
from kvlens.observables.surprise_variant import Variant, read_variant
from kvlens.probe import budget as memory
from kvlens.probe.inputs import Note, Tick, ignore, start, traces_of
from kvlens.probe.settings import check_values
from kvlens.probe.signal_pass import require_finite, watch_entering
from kvlens.probe.surprise_cycles import Cycle, cycles, make_cycle, require_room
from kvlens.probe.tables import token_texts
from kvlens.records import Tokens, Trace
from kvlens.schemas import SURPRISE
from kvlens.segmenting import unit_numbers
from kvlens.store import RunFolder
from kvlens.wording import counted

VARIANTS = ("full", "fast")


def surprise(
    traces: str | Path | Sequence[Trace],
    model: str | Model = models.DEFAULT_MODEL,
    out: str | Path = "runs/surprise",
    *,
    variants: str | Sequence[str] = VARIANTS,
    budget: int | None = None,
    every: int | None = None,
    frozen: int | None = None,
    recent: int | None = None,
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
    """The finished run of surprise at `out`: how little the future predicts each token of prompt and reasoning.

    Tables: `tokens`, `scores` (a row for each variant and token: minus a logit, or with `logprob` and units nats; null
    where nothing comes after), `traces`, and with a budget `refreshes` (each refresh of each variant: what was held,
    what stayed). The name of a variant is its words in one spelling, whatever the order they are given in.

    Args:
        traces: a trace file or dataset (see `read_traces`), or traces at hand.
        model: what `-m` takes, or a loaded `Model` (then device, dtype and attention are its own).
        variants: such as "fast" or "full,logprob,no_self", one or several; see observables/surprise_variant.py.
        budget: tokens a refresh leaves (J), `recent` last ones among them, beside `frozen` first ones (default 4).
        every: tokens between refreshes, a quarter of the budget by default.
        target_tokens, chat: as for `kvlens.label`, so that positions mean the same tokens in both runs.
        progress: called with (traces done, traces in all); note: told what lies ahead.

    Raises: InputError, EnvironmentLacks, ModelRefused; nothing already written is lost.
    Cost: a forward pass a trace, and for each variant what `Surprise.scores` costs; with a budget one more forward
        pass a variant, and one pass at each refresh.
    Source: counter-causal surprise (Back from the Future, arXiv 2607.27600).
    """
    chosen = _variants(variants)
    cycle = make_cycle(budget, every, frozen, recent)
    if cycle is not None:
        require_room(chosen, cycle)
    reading: dict[str, Any] = {"target_tokens": target_tokens, "chat": chat, "beyond_context": beyond_context}
    check_values({**reading, "seed": seed})
    ready = start(traces_of(traces, limit), model, out, reading, device=device, dtype=dtype, attention=attention)
    passes = {variant.name: Surprise(ready.model, variant) for variant in chosen}
    asked = {"variants": list(passes), "cycle": None if cycle is None else asdict(cycle)}
    job = Job(ready.model, passes, cycle, progress or ignore, note or ignore)
    return ready.run(
        out,
        lambda run: job.do(run, ready.everything),
        schema=SURPRISE,
        config=asked | reading,
        seed=seed,
        force=force,
        note=note,
    )


def _variants(asked: str | Sequence[str]) -> list[Variant]:
    """The variants by their words, each once. Raises: InputError for none, or words that name none."""
    several = [asked] if isinstance(asked, str) else list(asked) if isinstance(asked, Sequence) else []
    if not several:
        raise InputError(f"variants {asked!r:.80} name none", "give one or several, such as 'fast'")
    return list(dict.fromkeys(read_variant(text) for text in several))


@dataclass
class Job:
    """What a run of surprise works with while it runs."""

    model: Model
    passes: dict[str, Surprise]
    cycle: Cycle | None
    progress: Tick
    note: Note

    def do(self, run: RunFolder, everything: Sequence[Tokens]) -> None:
        """Nothing; scores the traces that the run lacks and finishes it."""
        tables = ["tokens", "scores", "traces"] + (["refreshes"] if self.cycle else [])
        ahead = [t for t in everything if not all(run.has_part(table, t.trace.id) for table in tables)]
        done, total = len(everything) - len(ahead), len(everything)
        if ahead:
            before = f", {done:,} done before" if done else ""
            self.note(f"{counted(len(ahead), 'trace')} under {counted(len(self.passes), 'variant')}{before}")
        for tokens in ahead:
            self.progress(done, total)
            self._trace(run, tokens)
            done += 1
        self.progress(done, total)
        ids = [tokens.trace.id for tokens in everything]
        run.finish(
            dict.fromkeys(tables, ids),
            counts={"traces": len(ids), "tokens": sum(tokens.n_context for tokens in everything)},
            peak_bytes=memory.peak_bytes(self.model.device),
            results={"linear_kernel": kernel(), "n_bytes_a_token": self._bytes_a_token()},
        )

    def _trace(self, run: RunFolder, tokens: Tokens) -> None:
        """Nothing; writes the parts of one trace, `traces` last."""
        trace_id, n = tokens.trace.id, tokens.n_context
        ids = torch.from_numpy(tokens.ids[:n]).to(self.model.device)
        units = {
            unit: torch.from_numpy(unit_numbers(tokens, unit)).to(self.model.device)
            for unit in {surprise.variant.unit for surprise in self.passes.values()}
            if unit is not None
        }
        found = score_tokens(self.model, list(self.passes.values()), ids, units)
        columns = {"pos": np.tile(np.arange(n, dtype=np.int32), len(found)), "score": np.concatenate(found)}
        names = np.repeat(list(self.passes), n).tolist()
        run.write_part("scores", trace_id, {"trace_id": trace_id, "variant": names} | columns)
        run.write_part("tokens", trace_id, _token_rows(tokens, self.model))
        if self.cycle is not None:
            run.write_part("refreshes", trace_id, self._refreshes(self.cycle, tokens, ids, units))
        lengths = {"n_tokens": [tokens.n_tokens], "n_prompt": [tokens.n_prompt], "n_context": [n]}
        run.write_part("traces", trace_id, {"trace_id": [trace_id]} | lengths)

    def _refreshes(self, cycle: Cycle, tokens: Tokens, ids: Tensor, units: dict[str, Tensor]) -> dict[str, Any]:
        """The rows of `refreshes`: every row held before a refresh, by variant."""
        columns: dict[str, list[Any]] = {name: [] for name in ("variant", "refresh", "n_seen", "pos", "score", "kept")}
        for name, surprise in self.passes.items():
            steps = cycles(surprise, ids, cycle, units.get(surprise.variant.unit or ""))
            for number, step in enumerate(steps):
                n_rows = len(step.positions)
                columns["variant"] += [name] * n_rows
                columns["refresh"] += [number] * n_rows
                columns["n_seen"] += [step.n_seen] * n_rows
                columns["pos"] += step.positions.tolist()
                columns["score"] += step.scores.tolist()
                columns["kept"] += step.kept.tolist()
        return {"trace_id": [tokens.trace.id] * len(columns["pos"])} | columns

    def _bytes_a_token(self) -> dict[str, int]:
        """What each variant's state adds to a cached token: its id, position, unit and stored state."""
        one = torch.zeros(1, 1, dtype=torch.long)
        stored = torch.zeros(1, 1, self.model.d_model, dtype=self.model.dtype)
        found = {}
        for name, surprise in self.passes.items():
            units = one.clone() if surprise.variant.unit else None
            found[name] = State(one, one.clone(), stored if surprise.start else None, units).n_bytes
        return found


@torch.inference_mode()
def score_tokens(
    model: Model, passes: Sequence[Surprise], ids: Tensor, units: dict[str, Tensor]
) -> list[Float[np.ndarray, " pos"]]:
    """The scores of each pass over a whole text, NaN where a token has none.

    `units` numbers the units of the text, by kind. Raises: ModelRefused where hidden states are not finite.
    """
    cache = models.new_cache(model)
    positions = torch.arange(len(ids), device=ids.device)[None]
    with watch_entering(model, passes) as entering, fast_linear():
        require_finite(models.hidden(model, ids[None], cache=cache)[0])
    found = []
    for surprise in passes:
        unit = units.get(surprise.variant.unit or "")
        state = State(ids[None], positions, entering.get(surprise.start), None if unit is None else unit[None])
        scores = surprise.scores(state, models.cache_layers(cache))
        found.append(scores.values.masked_fill(~scores.known, torch.nan)[0].cpu().numpy())
    return found


def _token_rows(tokens: Tokens, model: Model) -> dict[str, Any]:
    n = tokens.n_context
    return {
        "trace_id": tokens.trace.id,
        "pos": np.arange(n, dtype=np.int32),
        "token_id": tokens.ids[:n].astype(np.int32),
        "token": token_texts(tokens, model.tokenizer)[:n],
        "segment": [tokens.segment(pos) for pos in range(n)],
    }
