"""Bytes: a storage counts once and whole, a claim has 5 %, and peaks and errors come back from the process apart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlens.auditing.bytes import is_simulated, measured, side_bytes, storage_bytes, tensors_of, verdict
from kvlens.auditing.fidelity import fidelity
from kvlens.errors import EnvironmentLacks, KvlensError

CPU = torch.device("cpu")
MIB = 2**20


def test_a_view_counts_as_all_that_it_keeps_alive_and_a_storage_once() -> None:
    whole = torch.zeros(100, 8)
    view, copy = whole[:10], whole[:10].clone()
    assert storage_bytes([view]) == 3200
    assert storage_bytes([view, whole, whole[5:]]) == 3200
    assert storage_bytes([copy]) == 320
    assert side_bytes([view, copy], [whole]) == 320
    assert side_bytes([whole], []) == 3200


def test_tensors_are_found_wherever_a_plain_object_keeps_them() -> None:
    class Press:
        def __init__(self) -> None:
            self.scores = {0: [torch.zeros(2), (torch.zeros(3),)]}
            self.inner = type("Inner", (), {})()
            self.inner.mask = torch.zeros(5, dtype=torch.bool)
            self.name, self.kind = "press", torch.Tensor

    assert sorted(tensor.numel() for tensor in tensors_of(Press())) == [2, 3, 5]


@pytest.mark.parametrize(
    ("claimed", "physical", "says"), [(1000, 1050, "holds"), (1000, 1051, "claim not met"), (1000, 10, "holds")]
)
def test_a_claim_holds_within_five_percent(claimed: int, physical: int, says: str) -> None:
    assert verdict(claimed, physical) == says


def test_only_what_claims_less_and_holds_everything_is_simulated() -> None:
    assert is_simulated(500, 1000, 1000)
    assert is_simulated(500, 2000, 1000)
    assert not is_simulated(500, 999, 1000)
    assert not is_simulated(1000, 1000, 1000)
    assert not is_simulated(960, 1000, 1000)


def test_the_peak_is_that_of_the_work_and_nothing_of_it_stays() -> None:
    kept: list[Any] = []

    def work(n_mib: int) -> dict[str, Any]:
        first = torch.ones(n_mib * MIB // 4)
        kept.append(first)
        del first
        return {"sum": float(kept.pop().sum())}

    small, large = (measured(lambda n=n: work(n), CPU) for n in (8, 64))
    assert small["sum"] == 8 * MIB / 4
    if small["peak_bytes"] is None:
        pytest.skip("this machine does not tell the high-water mark of a process")
    assert 8 * MIB <= small["peak_bytes"] < 40 * MIB
    assert 64 * MIB <= large["peak_bytes"] < 96 * MIB
    assert kept == []


def test_errors_of_the_work_come_back_as_errors() -> None:
    def refuses() -> dict[str, Any]:
        raise EnvironmentLacks("no room", "make some")

    def raises() -> dict[str, Any]:
        raise ZeroDivisionError("by 0")

    with pytest.raises(KvlensError, match="no room") as refused:
        measured(refuses, CPU)
    assert (refused.value.hint, refused.value.exit_code) == ("make some", 3)
    with pytest.raises(KvlensError, match="ZeroDivisionError: by 0"):
        measured(raises, CPU)
    with pytest.raises(EnvironmentLacks, match="status 7"):
        measured(lambda: os._exit(7), CPU)


KILLED = """
import os, sys, time
import torch
from kvlens.auditing.bytes import measured

def work():
    print(os.getpid(), flush=True)
    time.sleep(300)

measured(work, torch.device("cpu"))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no process of its own here")
def test_the_process_apart_ends_with_the_one_that_started_it() -> None:
    """A killed audit whose method goes on would hold the run folder's lock until that method is done."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as audit:
        assert audit.stdout is not None
        stat = Path(f"/proc/{int(audit.stdout.readline())}/stat")
        audit.kill()
    patience = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < patience, "it still runs"
        time.sleep(0.02)


def test_fidelity_against_the_definition() -> None:
    torch.manual_seed(0)
    full, got = torch.randn(5, 11), torch.randn(5, 11)
    p, q = full.double().softmax(-1), got.double().softmax(-1)
    found = fidelity(full, got)
    assert found.kl_nats == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-12)
    assert found.next_token_agreement == float((full.argmax(-1) == got.argmax(-1)).double().mean())
    assert fidelity(full, full).kl_nats == 0
    assert fidelity(full, full).next_token_agreement == 1
