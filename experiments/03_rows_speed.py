"""What does capturing rows cost on top of the forward pass they are read from?

Prediction: at most 1.2 times a plain SDPA pass over 4,096 tokens, in seconds and, beside the rows that are stored, in
peak memory: six rows a head are 54 of 36,864 rows of a layer, so their matrix products are a thousandth of attention's,
and float64 copies of one layer's keys and values are smaller than what its MLP makes.

The plain pass is the decoder alone, without logits and without a cache: the least there is to read rows from. It is
given the linear kernel that capture uses, so that only the rows differ; a second column has it as PyTorch comes. Ratios
of seconds are of medians of five interleaved repeats in one process. Peak memory is the highest resident size during a
pass over that before it, each in a fresh process, medians of three.
Run: python experiments/03_rows_speed.py     Writes data/results/03_rows_speed.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import described, interleaved, machine, resident, sample, write

from kvlens import model as models
from kvlens.linear import fast_linear, kernel
from kvlens.model import Model
from kvlens.probe.row_block import RowBlock, RowCheck
from kvlens.probe.rows import ROWS_PER_HEAD, choose_queries, read_rows

N_TOKENS = 4096
PROCESSES = 3


class Passes:
    """The passes that are compared, over the same tokens; the last capture's blocks and check stay for a look."""

    def __init__(self, model: Model, n_tokens: int) -> None:
        self.model, self.tokens = model, sample(model, n_tokens - 1, 1)
        self.ids = torch.from_numpy(self.tokens.ids)[None]
        self.queries = choose_queries(model, self.tokens)
        self.blocks: list[RowBlock] = []
        self.check = RowCheck()

    @torch.inference_mode()
    def plain(self) -> None:
        self.model.decoder(input_ids=self.ids, use_cache=False)

    def same_kernel(self) -> None:
        with fast_linear():
            self.plain()

    def rows(self) -> None:
        self.blocks = []
        self.check = read_rows(self.model, self.tokens, self.queries, self.blocks.append)

    def named(self) -> dict[str, Callable[[], None]]:
        return {"plain": self.plain, "same_kernel": self.same_kernel, "rows": self.rows}

    def stored_bytes(self) -> int:
        """What the blocks of the trace hold."""
        fields = [value for block in self.blocks for value in vars(block).values()]
        return sum(value.nbytes for value in fields if isinstance(value, torch.Tensor))


def peak(name: str, n_tokens: int) -> dict[str, int]:
    """In this process: resident bytes before one pass, the most during it, and the bytes of the rows it left."""
    model = models.load("smollm2-135m", device="cpu", dtype="float32")
    Passes(model, 64).named()[name]()  # what the first call of a kernel sets up is no part of a pass
    passes = Passes(model, n_tokens)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the loading's peak is no part of it either
    before = resident("VmRSS")
    passes.named()[name]()
    return {"before": before, "added": resident("VmHWM") - before, "stored": passes.stored_bytes()}


def peaks(n_tokens: int) -> dict[str, Any]:
    """Median bytes that each pass adds to the loaded model, fresh processes in turn, and the ratios."""
    found: dict[str, list[dict[str, int]]] = {"plain": [], "same_kernel": [], "rows": []}
    for _ in range(PROCESSES):
        for name, results in found.items():
            command = [sys.executable, __file__, "--peak", name, "--tokens", str(n_tokens)]
            results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    added = {name: statistics.median(r["added"] for r in results) for name, results in found.items()}
    stored = found["rows"][0]["stored"]
    before = statistics.median(r["before"] for results in found.values() for r in results)
    return {
        "added_bytes": added,
        "loaded_bytes": before,
        "stored_bytes": stored,
        "beside_stored_over_plain": (added["rows"] - stored) / added["plain"],
        "beside_stored_over_plain_same_linear_kernel": (added["rows"] - stored) / added["same_kernel"],
        "whole_process_beside_stored_over_plain": (before + added["rows"] - stored) / (before + added["plain"]),
    }


def cost(model: Model, n_tokens: int) -> dict[str, Any]:
    """Seconds of a plain pass over this many tokens, and of the capture as multiples of it."""
    passes = Passes(model, n_tokens)
    plain, same, rows = interleaved(*passes.named().values())
    check = passes.check
    return {
        "n_tokens": n_tokens,
        "rows_per_head": ROWS_PER_HEAD,
        "plain_seconds": plain,
        "plain_seconds_same_linear_kernel": same,
        "over_plain": rows / plain,
        "over_plain_same_linear_kernel": rows / same,
        "check": {"n_rows": check.n_rows, "n_off": check.n_off, "worst_over_allowed": check.worst},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=N_TOKENS)
    parser.add_argument("--try", dest="trial", action="store_true", help="print the results, write nothing")
    parser.add_argument("--peak", choices=("plain", "same_kernel", "rows"), help="one pass, its memory as JSON")
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(peak(arguments.peak, arguments.tokens)))
        return
    results: dict[str, Any] = {"memory": peaks(arguments.tokens)}
    model = models.load("smollm2-135m", device="cpu", dtype="float32")
    results |= {**described(model), "machine": machine(), "linear_kernel": kernel(), "n_processes": PROCESSES}
    results["seconds"] = cost(model, arguments.tokens)
    print(json.dumps(results, indent=1), file=sys.stderr)
    if not arguments.trial:
        write("03_rows_speed", results)


if __name__ == "__main__":
    main()
