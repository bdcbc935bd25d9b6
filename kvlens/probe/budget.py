"""How much fits at once, how long will it take, and what happens when it does not fit?

1. rows of a batch: half of the free memory over an upper estimate of one row's activations, within fixed bounds;
2. an estimate of time from a timed pass of the same model, shown before the run;
3. out of memory: the batch is halved until it fits, and the split is remembered for the batches that follow.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kvlens import model as models
from kvlens.errors import EnvironmentLacks
from kvlens.model import Model
from kvlens.probe.readout import BLOCK_ROWS

CPU_ROWS = 2048  # more rows than this fill no core better, and a kill would lose more work
CUDA_ROWS = 16384

Item = TypeVar("Item")
Result = TypeVar("Result")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def peak_bytes(device: torch.device) -> int:
    """The highest memory use so far: of the GPU's allocator on cuda, of the whole process elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def row_bytes(model: Model, n_tokens: int) -> int:
    """An upper estimate of the activations of one recomputed token in a batch, its mask included."""
    item = model.dtype.itemsize
    attention = 4 * (model.n_heads + 2 * model.n_kv_heads) * model.d_head
    return (6 * model.d_model + 3 * 4 * model.d_model + attention) * item + n_tokens * (item + 1)


def batch_bytes(model: Model, n_tokens: int, rows: int) -> int:
    """An estimate of what a batch adds to the model and its prefix cache."""
    return rows * row_bytes(model, n_tokens) + 3 * BLOCK_ROWS * model.d_vocab * 4


def prefix_bytes(model: Model, n_context: int) -> int:
    """The keys and values of one trace's context."""
    return 2 * n_context * model.n_layers * model.n_kv_heads * model.d_head * model.dtype.itemsize


def choose_rows(model: Model, n_tokens: int) -> int:
    """How many tokens a batch computes at once: from free memory, never fewer than one row."""
    most = CUDA_ROWS if model.device.type == "cuda" else CPU_ROWS
    spare = free_bytes(model.device) // 2 - 3 * BLOCK_ROWS * model.d_vocab * 4
    # Without masks every window copies the prefix, and a window may be a single row.
    copied = prefix_bytes(model, n_tokens) if models.ignores_masks(model) else 0
    return max(1, min(most, spare // (row_bytes(model, n_tokens) + copied)))


def run_halving(
    items: Sequence[Item], run: Callable[[Sequence[Item]], Result], split: int, on_split: Callable[[int], None]
) -> list[Result]:
    """The results of `run` over `items` in `split` pieces, in more pieces when memory runs out.

    `on_split` is told every new number of pieces, so that later batches start from it.
    Raises: EnvironmentLacks when a single item does not fit.
    """
    while True:
        size = -(-len(items) // split)
        try:
            return [run(items[lo : lo + size]) for lo in range(0, len(items), size)]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise EnvironmentLacks(
                    f"out of memory with one window at a time: {' '.join(str(error).split())[:120]}",
                    "use shorter traces (--limit, --target-tokens), --dtype bfloat16 or a larger machine",
                ) from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        split = -(-len(items) // (size // 2))
        on_split(split)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is torch's or Python's way to say that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "not enough memory" in str(error) or "can't allocate memory" in str(error)
