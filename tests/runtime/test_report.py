"""What a run counted is what happened, also where threads tell it at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from typing import Any

import torch
from eviction import policy
from tiny import llama, token_ids

from kvlens.runtime.apply import apply
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.evict import choose
from kvlens.runtime.report import Log

N_THREADS, N_TIMES = 4, 5


class SlowSeconds(float):
    """A number that lets another thread go on before it is added."""

    def __radd__(self, other: float) -> float:
        sleep(1e-3)
        return float(self) + float(other)


class SlowCount(torch.Tensor):
    """A count that does."""

    def __radd__(self, other: Any) -> Any:
        sleep(1e-3)
        return super().__radd__(other)

    def __add__(self, other: Any) -> Any:
        sleep(1e-3)
        return super().__add__(other)


def test_a_report_is_short_to_read() -> None:
    hf = llama()
    with apply(policy(), hf) as run:
        hf.generate(token_ids(30), max_new_tokens=2, do_sample=False, pad_token_id=0)
    report = run.report()
    said = str(report).splitlines()
    assert [line.split()[0] for line in said] == ["evicted", "held", "bytes", "spent"]
    assert said[0].split()[1] == str(report.n_evicted)
    assert max(map(len, said)) < 120
    assert "kept" not in repr(report)
    assert len(report.kept[0][0][0]) == 12


def test_threads_lose_no_count() -> None:
    held = torch.arange(8)[None, None]
    scores = torch.tensor([[[0.0, 1, 1, 2, 3, 4, 5, 6]]])
    choice = choose(scores, held, torch.tensor([[5]]), torch.zeros(1, 1, 8, dtype=torch.bool))
    leaves, tied, scored = (part.as_subclass(SlowCount) for part in (choice.leaves, choice.n_tied, choice.n_scored))
    choice = replace(choice, leaves=leaves, n_tied=tied, n_scored=scored)
    log, hf = Log(record=False), llama()
    with apply(policy(), hf) as run:
        hf(token_ids(8))
    assert run.cache is not None
    ledger = ledger_of(run.cache)
    assert ledger is not None

    def tell(_: int) -> None:
        for _ in range(N_TIMES):
            log.evict(ledger, None, held, scores, choice)
            log.scored(SlowSeconds(1))
            log.refreshed(SlowSeconds(1))
            log.hold(8, 5)

    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(tell, range(N_THREADS)))
    n = N_THREADS * N_TIMES
    assert (int(log.n_evicted), int(log.n_tied), int(log.n_scored)) == (3 * n, 2 * n, 8 * n)
    assert (log.scoring_seconds, log.evicting_seconds) == (n, n)
    assert (log.n_passes, log.n_evictions) == (n, n)
