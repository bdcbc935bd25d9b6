"""What did a policy do, and what did it cost? Kept while it works, read when asked.

1. `Log` is told of every eviction and of what is held after every forward pass.
2. `events` makes a table of it: one line for each token that left, from which layer and KV head (-1: from all of them
   together), with the score it had and how long it had lived.
3. `of` measures the bytes of the last cache: every storage once, the policy's own tensors included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import InputError
from kvlens.runtime import budget
from kvlens.runtime.cache import HeldLayer, Ledger, ledger_of, physical_bytes, storage_bytes
from kvlens.runtime.evict import Choice
from kvlens.wording import counted, size

if TYPE_CHECKING:
    from kvlens.runtime.apply import Run

ALL = -1
COLUMNS = {
    "step": "int32",
    "row": "int32",
    "layer": "int16",
    "kv_head": "int16",
    "pos": "int32",
    "event": "str",
    "score": "float32",
    "tenure": "int32",
}


@dataclass(frozen=True)
class Report:
    """Counts over the whole run; bytes of its last cache, as they are now.

    `most_held` are the slots of the widest layer between forward passes, `most_in_pass` those within one.
    `kept` is by layer [row][kv_head or one for all][positions]; `full_bytes` what keys and values of every token seen
    would take in the managed layers, `held_bytes` what those held take, `side_bytes` positions, counts and the scorer's
    state, `physical_bytes` all storages of the cache, `claimed_bytes` the budget's share of keys and values.
    `tie_rate` is the share of scores that equal another one of their row. On a GPU the seconds are those of the
    launching, since nothing waits for it.
    """

    n_passes: int
    n_evictions: int
    n_evicted: int
    most_held: int
    most_in_pass: int
    kept: dict[int, list[list[list[int]]]] = field(repr=False)
    full_bytes: int
    held_bytes: int
    side_bytes: int
    physical_bytes: int
    claimed_bytes: int
    tie_rate: float
    scoring_seconds: float
    evicting_seconds: float

    def facts(self) -> dict[str, str]:
        """The same in words, by what it is about; `bytes` are those of the last cache."""
        return {
            "evicted": f"{self.n_evicted:,} in {counted(self.n_evictions, 'eviction')}, "
            f"{self.tie_rate:.1%} of the scores tied",
            "held": f"at most {self.most_held:,} tokens a layer between steps, {self.most_in_pass:,} within one",
            "bytes": f"{size(self.physical_bytes)} held, {size(self.side_bytes)} of them the policy's own; "
            f"every token's keys and values: {size(self.full_bytes)}",
            "spent": f"{self.scoring_seconds:.2f} s scoring, {self.evicting_seconds:.2f} s evicting",
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:<9}{said}" for name, said in self.facts().items())


@dataclass
class Log:
    """What a run was told; threads may tell it at the same time."""

    record: bool
    n_passes: int = 0
    n_evictions: int = 0
    n_evicted: int | Tensor = 0  # tensors are counted on the device and fetched when asked
    most_held: int = 0
    most_in_pass: int = 0
    n_tied: int | Tensor = 0
    n_scored: int | Tensor = 0
    scoring_seconds: float = 0.0
    evicting_seconds: float = 0.0
    parts: list[dict[str, Any]] = field(default_factory=list)
    _sums: Lock = field(default_factory=Lock, repr=False)  # `+=` reads and writes apart: a thread may come between

    def scored(self, seconds: float) -> None:
        """1. after the scorer observed or scored."""
        with self._sums:
            self.scoring_seconds += seconds

    def hold(self, n_before: int, n_after: int) -> None:
        """1. after a forward pass: the most slots of any layer before and after the eviction."""
        with self._sums:
            self.n_passes += 1
            self.most_in_pass = max(self.most_in_pass, n_before)
            self.most_held = max(self.most_held, n_after)

    def refreshed(self, seconds: float) -> None:
        """1. after an eviction from all sets."""
        with self._sums:
            self.n_evictions += 1
            self.evicting_seconds += seconds

    def evict(
        self,
        ledger: Ledger,
        layer: int | None,
        held: Int[Tensor, "batch heads slots"],
        scores: Float[Tensor, "batch heads slots"],
        choice: Choice,
    ) -> None:
        """1. for one set of slots, of one layer or (None) of all."""
        n_left = choice.leaves.sum()
        with self._sums:
            self.n_tied, self.n_scored = self.n_tied + choice.n_tied, self.n_scored + choice.n_scored
            self.n_evicted = self.n_evicted + n_left
        if not self.record:
            return
        rows, heads, _ = (index.cpu().numpy() for index in choice.leaves.nonzero(as_tuple=True))
        pos = held[choice.leaves].cpu().numpy()
        self.parts.append(
            {
                "step": ledger.step,
                "row": rows,
                "layer": ALL if layer is None else layer,
                "kv_head": heads if held.shape[1] > 1 else ALL,
                "pos": pos,
                "event": "evict",
                "score": scores[choice.leaves].cpu().numpy(),
                "tenure": ledger.n_own.cpu().numpy()[rows] - pos,
            }
        )

    def events(self) -> pd.DataFrame:
        """2."""
        if not self.record:
            raise InputError("this run kept no record of events", "apply the policy with record=True")
        tables = [pd.DataFrame(part) for part in self.parts]
        table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame({name: [] for name in COLUMNS})
        return table.astype(COLUMNS)[list(COLUMNS)]


def of(run: Run) -> Report:
    """3."""
    log, cache = run.log, run.cache
    ledger = None if cache is None else ledger_of(cache)
    if cache is None or ledger is None or not ledger.sets:
        raise InputError(
            "no forward pass of this run has used a cache and ended well yet",
            "generate first, with use_cache=True, then ask for the report",
        )
    layers = [layer for layer in cache.layers if isinstance(layer, HeldLayer)]
    one = budget.token_bytes(run.model, run.layers)
    rows = len(ledger.n_own)
    claimed = float(budget.claimed(run.policy, run.tokens, ledger.n_prompt, run.layers).mean())
    return Report(
        n_passes=log.n_passes,
        n_evictions=log.n_evictions,
        n_evicted=int(log.n_evicted),
        most_held=log.most_held,
        most_in_pass=log.most_in_pass,
        kept={i: [[[p for p in h if p >= 0] for h in r] for r in ledger.set_of(i).tolist()] for i in run.layers},
        full_bytes=rows * layers[0].n_seen * one,
        held_bytes=storage_bytes((name, t) for layer in layers for name, t in layer.tensors()),
        side_bytes=storage_bytes(ledger.tensors()),
        physical_bytes=physical_bytes(cache),
        claimed_bytes=int(rows * min(claimed, layers[0].n_seen) * one),
        tie_rate=float(log.n_tied / log.n_scored) if log.n_scored else 0.0,
        scoring_seconds=log.scoring_seconds,
        evicting_seconds=log.evicting_seconds,
    )
