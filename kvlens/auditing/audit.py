"""Does a method hold the bytes that it claims, and what does its compression cost in what the model says?

1. Settle methods and settings, load the model, read the texts (visibility.py); refuse what cannot work.
2. Text by text: what the full cache predicts; then each method, in a process of its own (bytes.py): prefill, compress,
   count bytes, predict the target over what is left. A method and a text are a part; one that is there is not redone.
   A method that cannot run, or raises half-way, says why; the others go on.
3. Sum up: a row for each method and kind of visibility. The claim must hold on every text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import model as models
from kvlens.auditing.bytes import is_simulated, measured, side_bytes, storage_bytes
from kvlens.auditing.fidelity import fidelity
from kvlens.auditing.methods import Full, Method
from kvlens.auditing.rows import document
from kvlens.auditing.settings import Settings, check_budgets, settle
from kvlens.auditing.visibility import Case, asked, cases
from kvlens.errors import InputError, KvlensError, ModelRefused
from kvlens.loading import Run
from kvlens.model import Model
from kvlens.policy import Policy
from kvlens.probe.inputs import Note, Tick, ignore, start, traces_of
from kvlens.probe.settings import check_values
from kvlens.records import Trace
from kvlens.schemas import AUDIT
from kvlens.store import RunFolder
from kvlens.wording import counted


def audit(
    traces: str | Path | Sequence[Trace],
    model: str | Model = models.DEFAULT_MODEL,
    out: str | Path = "runs/audit",
    *,
    policies: Sequence[str | Path | Policy] = (),
    scorers: Sequence[str] = (),
    presses: Sequence[str] = (),
    keep_fraction: float | None = None,
    sinks: int = 4,
    recent: int = 32,
    question_last: bool = False,
    enforce: bool = False,
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
    """The finished audit at `out`; its rows are in `run.documents["audit"]`, each text's numbers in `run.cases`.

    Args:
        policies, scorers, presses: the methods; "all" for every scorer or press that can run by its name.
        keep_fraction: the share of the context's tokens that stays, for every method.
        sinks, recent: first and last tokens that stay under every method, inside the budget.
        question_last: run each method twice, compressing before and after the question was seen.
        enforce: presses that only mark what they drop are also run with it evicted, in three shapes of storage.
        progress: called with (rows done, rows in all), a row being a method on a text; note: told what lies ahead.

    Raises: InputError, EnvironmentLacks, ModelRefused; nothing already written is lost.
    Cost: a prefill for each method and text, one more for an enforced one or KVzip, and what the method's scores cost.
    """
    reading: dict[str, Any] = {"target_tokens": target_tokens, "chat": chat, "beyond_context": beyond_context}
    check_values({**reading, "seed": seed})
    if type(question_last) is not bool:
        raise InputError(f"question_last {question_last!r:.40} is neither true nor false", "leave it out for false")
    settings = settle(
        policies, scorers, presses, keep_fraction=keep_fraction, sinks=sinks, recent=recent, enforce=enforce, seed=seed
    )
    read = asked(traces_of(traces, limit), question_last=question_last, chat=chat)
    ready = start([trace for trace, _ in read], model, out, reading, device=device, dtype=dtype, attention=attention)
    texts = cases(ready.everything, [apart for _, apart in read], question_last=question_last)
    check_budgets(settings, ready.model, texts)
    models.require_mask(ready.model)
    job = Job(ready.model, settings, texts, seed, progress or ignore, note or ignore)
    config = settings.config() | {"question_last": question_last, "enforce": enforce} | reading
    return ready.run(out, job.do, schema=AUDIT, config=config, seed=seed, force=force, note=note)


@dataclass
class Job:
    """What an audit works with while it runs."""

    model: Model
    settings: Settings
    cases: Sequence[Case]
    seed: int
    progress: Tick
    note: Note

    def do(self, run: RunFolder) -> None:
        """Nothing; measures what the run lacks and finishes it."""
        parts = {
            f"{number}/{method.name}": (method, case)
            for number, case in enumerate(self.cases)
            for method in self.settings.methods
        }
        lacking = [key for key in parts if not run.has_part("cases", key)]
        self._tell(run, len(parts), len(lacking))
        at: Case | None = None
        for done, key in enumerate(lacking, start=len(parts) - len(lacking)):
            self.progress(done, len(parts))
            method, case = parts[key]
            if case is not at:
                at, full = case, self._full(case)
            run.write_part("cases", key, {name: [value] for name, value in self.row(method, case, full).items()})
        self.progress(len(parts), len(parts))
        frames = [run.read_part("cases", key) for key in parts]
        found = document(frames, {method.name: method for method in self.settings.methods}, self.settings)
        counts = {"texts": len(self.cases), "methods": len(self.settings.methods)}
        run.finish({"cases": list(parts)}, counts=counts, documents={"audit": found})

    def _tell(self, run: RunFolder, total: int, n_lacking: int) -> None:
        """Nothing; says what lies ahead, and what an earlier start left."""
        ahead = f"{counted(len(self.settings.methods), 'method')} on {counted(len(self.cases), 'text')}"
        if n_lacking < total:
            ahead += f": {total - n_lacking} of {total} rows are in '{run.path}' already, {n_lacking} to go"
        self.note(ahead)

    def _full(self, case: Case) -> Tensor:
        """What the full cache predicts: logits of the target's tokens."""
        seen, new = self._ids(case)
        with torch.inference_mode(), Full().compressed(self.model, seen) as held:
            return held.predict(new, case.n_target)[0]

    def _ids(self, case: Case) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(case.ids).to(self.model.device)[None]
        return ids[:, : case.n_seen], ids[:, case.n_seen : -1]

    def row(self, method: Method, case: Case, full: Float[Tensor, "target d_vocab"]) -> dict[str, Any]:
        """2. for one method and text."""
        seen, new = self._ids(case)
        one = 2 * self.model.n_layers * self.model.n_kv_heads * self.model.d_head * self.model.dtype.itemsize
        where: dict[str, Any] = {"method": method.name, "trace_id": case.id, "visibility": case.visibility}
        where |= {"n_seen": case.n_seen, "n_target": case.n_target, "full_bytes": one * case.n_seen}

        def work() -> dict[str, Any]:
            torch.manual_seed(self.seed)  # some presses draw
            started = perf_counter()
            with torch.inference_mode(), method.compressed(self.model, seen) as held:
                n_held, n_side = storage_bytes(held.keys_values), side_bytes(held.state, held.keys_values)
                found = fidelity(full, held.predict(new, case.n_target)[0])
                if not math.isfinite(found.kl_nats):
                    raise ModelRefused("its predictions, or the full cache's, are no finite numbers")
                return {
                    "claimed_bytes": held.claimed_bytes,
                    "claimed_side_bytes": held.declared_bytes,
                    "physical_bytes": n_held + n_side,
                    "side_bytes": n_side,
                    "simulated": is_simulated(held.claimed_bytes, n_held, where["full_bytes"]),
                    "kept_tokens": held.kept_tokens,
                    "kl_nats": found.kl_nats,
                    "next_token_agreement": found.next_token_agreement,
                    "seconds": perf_counter() - started,
                    "note": held.note or None,
                }

        try:
            return where | measured(work, self.model.device, self.model.hf.parameters())
        except KvlensError as error:
            return where | {"refused": f"{error.message:.300}{f' ({error.hint:.200})' if error.hint else ''}"}
        except Exception as error:  # a press is code from elsewhere: it may raise whatever it likes
            return where | {"refused": f"{type(error).__name__}: {error!s:.250}"}
