"""What does a method really hold, and how much memory does it take at its worst moment?

1. `held_bytes`: storages behind a cache's keys and values, each storage once, whole: a view keeps all of it alive.
2. `side_bytes`: storages that a method's own state adds to those: statistics, queries, indices, masks.
3. `verdict`: physical bytes (both) against what the method claims; a claim holds within 5 %. `is_simulated`: it claims
   to hold less than the full cache, and holds the full cache's keys and values.
4. `measured`: the work in a process of its own that starts as a copy of this one, with the highest memory it had over
   its start (CPU), or here with the device's own count (CUDA). What the work leaves behind ends with that process; and
   that process ends with this one, so that the run folder's lock, which it inherits, is free after a kill.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlens.errors import EnvironmentLacks, KvlensError

TOLERANCE = 0.05
HOLDS, NOT_MET, REFUSED = "holds", "claim not met", "refused"
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    return sum(_storages(tensors).values())


def side_bytes(state: Iterable[Tensor], held: Iterable[Tensor]) -> int:
    """2. Bytes of the storages of `state` that are not behind `held`."""
    mine, theirs = _storages(state), _storages(held)
    return sum(n_bytes for place, n_bytes in mine.items() if place not in theirs)


def _storages(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    return found


def tensors_of(value: Any, depth: int = 6) -> Iterable[Tensor]:
    """Every tensor that can be reached from a plain object's attributes, lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for inner in value.values():
            yield from tensors_of(inner, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from tensors_of(inner, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_of(vars(value), depth - 1)


# 3.


def verdict(claimed_bytes: int, physical_bytes: int) -> str:
    """Whether the claim holds."""
    return HOLDS if physical_bytes <= claimed_bytes * (1 + TOLERANCE) else NOT_MET


def is_simulated(claimed_bytes: int, held: int, full_bytes: int) -> bool:
    """Whether a method claims less than the full cache and holds all of it."""
    return held >= full_bytes and claimed_bytes * (1 + TOLERANCE) < full_bytes


# 4.


def measured(
    work: Callable[[], dict[str, Any]], device: torch.device, resident: Iterable[Tensor] = ()
) -> dict[str, Any]:
    """What `work` gives (JSON values), with `peak_bytes` (None where this machine does not tell).

    `resident` are tensors that were there before, such as the model's weights: they count as the start's.

    Raises: what a KvlensError of the work says; EnvironmentLacks where its process ended without an answer.
    Cost: a copy of the process's page table; the work runs on one thread, since threads do not survive the copy.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = work()
        torch.cuda.synchronize(device)
        return found | {"peak_bytes": torch.cuda.max_memory_allocated(device) - before}
    if not hasattr(os, "fork") or not _CLEAR.exists():
        return work() | {"peak_bytes": None}
    return _in_a_copy(work, list(resident))


def _in_a_copy(work: Callable[[], dict[str, Any]], resident: list[Tensor]) -> dict[str, Any]:
    reader, writer = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of threads, which the copy does not use
        child = os.fork()
    if child == 0:
        os.close(reader)
        _end_with(parent)
        _answer(work, writer, resident)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as stream:
            content = stream.read()
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(child, 9)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if not content:
        raise EnvironmentLacks(
            f"the process of this method ended with status {os.waitstatus_to_exitcode(status)} and no answer",
            "it may have run out of memory: use a shorter text",
        )
    found: dict[str, Any] = json.loads(content)
    if "error" in found:
        error = KvlensError(found["error"], found["hint"])
        error.exit_code = found["exit_code"]
        raise error
    return found


def _end_with(parent: int) -> None:
    """Nothing; the kernel kills this process when its parent ends, however that ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be asked for
        os._exit(1)


def _answer(work: Callable[[], dict[str, Any]], writer: int, resident: list[Tensor]) -> None:
    """The child's whole life: the work's answer, or what went wrong, goes into the pipe."""
    try:
        torch.set_num_threads(1)
        for tensor in resident:  # pages of a file that was mapped are this process's own once it has read them
            tensor.flatten()[:: max(1, 4096 // tensor.element_size())].sum()
        base = _start_of_peak()
        found = work()
        found["peak_bytes"] = None if base is None else max(0, _status("VmHWM") - base)
    except KvlensError as error:
        found = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error!s:.300}", "hint": "", "exit_code": 70}
    with suppress(BaseException), os.fdopen(writer, "wb") as stream:
        stream.write(json.dumps(found).encode())
    os._exit(0)


def _start_of_peak() -> int | None:
    """Bytes held now, the kernel's high-water mark set back to them; free memory is handed back first."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR.write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
