"""What do signals cost on top of the forward pass they are read from?

Prediction: without attention weights at most 1.15 times a plain SDPA forward of the same tokens, logits included:
norms, variances and rolling windows are small beside the matrix products. With attention weights the pass runs on
kvlens' own blockwise attention, whose cost grows with the square of the trace: clearly more, the longer the more.

The plain pass is given the linear kernel that `observe` uses, so that only the signals differ; a second column has it
as PyTorch comes. Every ratio is of medians of five interleaved repeats in one process.
Run: python experiments/02_observe_speed.py     Writes data/results/02_observe_speed.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import described, interleaved, machine, sample, write

from kvlens import model as models
from kvlens.linear import fast_linear, kernel
from kvlens.model import Model
from kvlens.observables.table import TABLE, Signal
from kvlens.probe.signal_pass import read_signals

LENGTHS = (512, 1024)
CHOICES: dict[str, Callable[[Signal], bool]] = {
    "hidden": lambda signal: "hidden" in signal.needs,
    "keys_values": lambda signal: "keys_values" in signal.needs,
    "surprisal": lambda signal: "logits" in signal.needs,
    "without_attention": lambda signal: "attention" not in signal.needs,
    "all": lambda _: True,
}


def cost(model: Model, n_tokens: int) -> dict[str, Any]:
    """Seconds of a plain pass over this many tokens, and of passes with signals as multiples of it."""
    ids = torch.from_numpy(sample(model, n_tokens, 1).ids[:n_tokens])
    counts = torch.bincount(ids, minlength=model.d_vocab)[ids]

    @torch.inference_mode()
    def plain() -> torch.Tensor:
        return model.hf(ids[None], use_cache=False).logits

    def same_kernel() -> torch.Tensor:
        with fast_linear():
            return plain()

    chosen = {name: [signal for signal in TABLE if rule(signal)] for name, rule in CHOICES.items()}
    passes = [lambda signals=signals: read_signals(model, ids, signals, counts) for signals in chosen.values()]
    as_it_comes, same, *found = interleaved(plain, same_kernel, *passes)
    return {
        "n_tokens": n_tokens,
        "plain_seconds": as_it_comes,
        "plain_seconds_same_linear_kernel": same,
        "over_plain": {name: seconds / as_it_comes for name, seconds in zip(chosen, found, strict=True)},
        "over_plain_same_linear_kernel": {name: seconds / same for name, seconds in zip(chosen, found, strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="trial", action="store_true", help="print the results, write nothing")
    arguments = parser.parse_args()
    model = models.load("smollm2-135m")
    results: dict[str, Any] = {**described(model), "machine": machine(), "linear_kernel": kernel()}
    for n_tokens in LENGTHS:
        results[f"tokens_{n_tokens}"] = cost(model, n_tokens)
        print(json.dumps(results[f"tokens_{n_tokens}"]), file=sys.stderr, flush=True)
    if not arguments.trial:
        write("02_observe_speed", results)


if __name__ == "__main__":
    main()
