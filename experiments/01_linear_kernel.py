"""Is oneDNN's float32 linear layer faster than PyTorch's default on this CPU, and as exact?

Prediction: equal on Intel CPUs; clearly faster elsewhere, where MKL takes a slower path. Shapes are SmolLM2-135M's.
Run: python experiments/01_linear_kernel.py     Writes data/results/01_linear_kernel.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from common import machine, write
from torch.nn.functional import linear

SHAPES = ((576, 576), (576, 1536), (1536, 576))
ROWS = (128, 544, 2048)
REPEATS = 9


def one_dnn(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, weight, None, "none", [], "")


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    found = []
    for rows in ROWS:
        for d_in, d_out in SHAPES:
            generator = torch.Generator().manual_seed(0)
            states, weight = (torch.randn(n, d_in, generator=generator) for n in (rows, d_out))
            truth = states.double() @ weight.double().T
            kernels = {"default": linear, "oneDNN": one_dnn}
            times: dict[str, list[float]] = {name: [] for name in kernels}
            for _ in range(REPEATS):
                for name, kernel in kernels.items():
                    times[name].append(seconds(partial(kernel, states, weight)))
            work = 2 * rows * d_in * d_out / 1e9
            row = {"rows": rows, "d_in": d_in, "d_out": d_out}
            for name, kernel in kernels.items():
                row[f"gflops_{name}"] = work / statistics.median(times[name])
                row[f"largest_error_{name}"] = float((kernel(states, weight).double() - truth).abs().max())
            found.append(row | {"speedup": row["gflops_oneDNN"] / row["gflops_default"]})
    ratios = [row["speedup"] for row in found]
    errors = [row["largest_error_oneDNN"] / row["largest_error_default"] for row in found]
    summary = {"median_speedup": statistics.median(ratios), "largest_error_ratio": max(errors)}
    write("01_linear_kernel", {"machine": machine(), "dtype": "float32", **summary, "shapes": found})
    print(summary)


if __name__ == "__main__":
    main()
