"""How fast is the exact search over kept sets, is it exact, and how large may a pool be?

Predictions: 30 times the plain numpy form on the paper's pools, because a set costs two additions instead of the square
of the pool; the paper's panel of 168,192 instances in under two minutes of enumeration and 2 GiB; 32 candidates at a
budget of 8 in .05 s a row; of 64 candidates most rows proven within 5 s, because nodes that drop a large contribution
are hopeless early.

The plain form is ((X @ G) * X).sum(1) / (X @ p)**2 over a ready table X of 0/1 vectors, in float32 (its fastest) and in
float64 (ours); its 2 threads are BLAS', ours go over rows. Ratios are of medians of five interleaved repeats in one
process; ours include everything from the pool on. Rows are SmolLM2's, of the project's documents. The panel runs in a
fresh process that reads stored rows block by block; its memory is that process' high-water mark, imports counted in.
Run: OMP_NUM_THREADS=2 python experiments/03_subset_speed.py     Writes data/results/03_subset_speed.json
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from common import TRACES, described, interleaved, machine, write
from threadpoolctl import threadpool_limits

from kvlens.discover.balancing import balance
from kvlens.discover.branch_and_bound import branch_and_bound
from kvlens.discover.ceilings import BUDGETS
from kvlens.discover.free_weights import frank_wolfe, hull_distance
from kvlens.discover.instances import Instances, Pool, instances, make_pool, set_errors
from kvlens.discover.subsets import best_subsets

N_THREADS = 2
PANEL_ROWS = 42_048
AT_ONCE = 512
LEAST_KEYS = 64  # every pool is full
LARGE = ((32, 8), (40, 8), (64, 8), (64, 16), (64, 32), (256, 8))  # candidates, budget


def capture(folder: Path, n_documents: int, rows_per_head: int) -> dict[str, Any]:
    """What the rows are of; the folder then has a file for each document, layer and key head."""
    from kvlens import model as models
    from kvlens.probe.rows import row_blocks
    from kvlens.texts import read_traces, tokenize

    model = models.load("smollm2-135m", device="cpu", dtype="float32")
    traces = read_traces(TRACES / "documents.jsonl")[:n_documents]
    tokens = [tokenize(trace, model.tokenizer, target_tokens=1) for trace in traces]
    for block in row_blocks(model, tokens, rows_per_head=rows_per_head, least_keys=LEAST_KEYS):
        for kv_head in range(block.values.shape[0]):
            mine = block.kv_heads == kv_head
            np.savez(
                folder / f"{block.trace_id}-{block.layer:02}-{kv_head}.npz",
                weights=block.weights[mine].numpy(),
                values=block.values[kv_head].numpy(),
                queries=block.queries[mine].numpy(),
                n_keys=block.n_keys[mine].numpy(),
                sink=block.sink[mine].numpy(),
            )
    return {**described(model), "n_documents": len(tokens), "n_tokens": [t.n_tokens for t in tokens]}


def stored(folder: Path) -> Iterator[Instances]:
    """The rows of one document, layer and key head after the other."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as block:
            pos, queries = np.arange(block["weights"].shape[1]), block["queries"][:, None]
            visible = (pos <= queries) & (pos > queries - block["n_keys"][:, None])
            yield instances(block["weights"], block["values"], visible=visible, sink=block["sink"])


def sample(folder: Path, n_rows: int, budget: int, n_extra: int | None = None) -> Pool:
    """The pools of a seeded sample of rows, spread over all files."""
    random = np.random.default_rng(0)
    files = len(list(folder.glob("*.npz")))
    counts = np.bincount(random.integers(0, files, n_rows), minlength=files)
    pools = []
    for count, rows in zip(counts, stored(folder), strict=True):
        size = budget + (0 if n_extra is None else n_extra)
        fit = np.flatnonzero(rows.n_keys >= size)
        if count and len(fit):
            pools.append(
                make_pool(rows.take(random.choice(fit, size=min(count, len(fit)), replace=False)), budget, n_extra)
            )
    return Pool(*(np.concatenate(columns) for columns in zip(*pools, strict=True)))


def table(n: int, budget: int) -> np.ndarray:
    """All kept sets as places."""
    return np.array(list(combinations(range(n), budget)))


def enumeration(pool: Pool, budget: int, n_plain: int) -> dict[str, Any]:
    """Microseconds a row of the plain form and of ours, and how many times faster."""
    sets = table(pool.size, budget)
    x = np.zeros((len(sets), pool.size))
    np.put_along_axis(x, sets, 1.0, 1)

    def plain(dtype: type) -> None:
        matrix = x.astype(dtype)
        for row in range(n_plain):
            vectors, p = pool.vectors[row].astype(dtype), pool.weights[row].astype(dtype)
            gram = vectors @ vectors.T
            (((matrix @ gram) * matrix).sum(1) / (matrix @ p) ** 2).argmin()

    def ours() -> None:
        best_subsets(pool, budget, n_threads=N_THREADS)

    with threadpool_limits(N_THREADS):
        single, double, own = interleaved(lambda: plain(np.float32), lambda: plain(np.float64), ours)
    single, double, own = single / n_plain, double / n_plain, own / len(pool.keys)
    return {
        "subsets": len(sets),
        "plain_float32_us": single * 1e6,
        "plain_float64_us": double * 1e6,
        "ours_us": own * 1e6,
        "faster_than_float32": single / own,
        "faster_than_float64": double / own,
    }


def agreement(pool: Pool, budget: int) -> dict[str, Any]:
    """The largest relative difference from all sets of itertools, each summed directly in float64."""
    sets = table(pool.size, budget)
    found = best_subsets(pool, budget)
    worst, same = 0.0, 0
    for row, error in enumerate(found.error):
        errors = np.concatenate(
            [set_errors(pool, part, np.full(len(part), row)) for part in np.array_split(sets, len(sets) // 4096 + 1)]
        )
        worst = max(worst, abs(error - errors.min()) / errors.min() if errors.min() > 0 else float(error > 0))
        same += np.array_equal(sets[errors.argmin()], found.members[row])
    return {"n_rows": len(pool.keys), "largest_relative_difference": worst, "same_set": int(same)}


def panel(folder: Path, n_rows: int) -> dict[str, Any]:
    """Seconds of each step over stored rows, in this process, and the memory it took."""
    compiled = make_pool(next(stored(folder)), 8)
    best_subsets(compiled, 8)  # or read from disk
    seconds = dict.fromkeys(("pools", "enumeration", "balancing", "free_weights"), 0.0)
    n_instances = 0
    for batch in batches(folder, n_rows):
        for budget in BUDGETS:
            started = time.perf_counter()
            pools = [make_pool(rows, budget) for rows in batch]
            together = Pool(*(np.concatenate(columns) for columns in zip(*pools, strict=True)))
            seconds["pools"] += time.perf_counter() - started
            started = time.perf_counter()
            best = best_subsets(together, budget, n_threads=N_THREADS)
            seconds["enumeration"] += time.perf_counter() - started
            started = time.perf_counter()
            balance(together, budget)
            seconds["balancing"] += time.perf_counter() - started
            started = time.perf_counter()
            keys = np.split(
                np.take_along_axis(together.keys, best.members, 1), np.cumsum([len(rows) for rows in batch])
            )
            for rows, of_best in zip(batch, keys, strict=False):
                hull_distance(rows, of_best)
                hull_distance(rows, rows.by_weight[:, :budget])
            seconds["free_weights"] += time.perf_counter() - started
            n_instances += len(together.keys)
        started = time.perf_counter()
        for rows in batch:
            frank_wolfe(rows, BUDGETS)
        seconds["free_weights"] += time.perf_counter() - started
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak
    return {"n_instances": n_instances, "seconds": seconds, "peak_bytes": int(peak[1]) * 1024}


def batches(folder: Path, n_rows: int) -> Iterator[list[Instances]]:
    """The first rows there are, a few hundred at a time: the search runs many side by side."""
    batch: list[Instances] = []
    for rows in stored(folder):
        some = rows.take(np.arange(min(len(rows), n_rows)))
        n_rows -= len(some)
        if len(some):
            batch.append(some)
        if sum(map(len, batch)) >= AT_ONCE or (batch and not n_rows):
            yield batch
            batch = []
        if not n_rows:
            return
    if batch:
        yield batch


def larger(folder: Path, n_candidates: int, budget: int, n_rows: int) -> dict[str, Any]:
    """Seconds a row of branch and bound, one row after the other, and how many it proves."""
    pool = sample(folder, n_rows, budget, n_candidates - budget)
    times, found = [], []
    for row in range(len(pool.keys)):
        one = pool.take(np.array([row]))
        started = time.perf_counter()
        found.append(branch_and_bound(one, budget, n_threads=N_THREADS))
        times.append(time.perf_counter() - started)
    gaps = [float(1 - f.bound[0] / f.error[0]) for f in found if not f.exact[0]]
    return {
        "candidates": n_candidates,
        "budget": budget,
        "subsets": comb(n_candidates, budget),
        "n_rows": len(times),
        "seconds_median": statistics.median(times),
        "seconds_mean": statistics.fmean(times),
        "seconds_most": max(times),
        "share_proven": float(np.mean([f.exact[0] for f in found])),
        "gap_of_others_median": statistics.median(gaps) if gaps else None,
        "nodes_most": int(max(f.n_nodes[0] for f in found)),
        "enumerated_most": int(max(f.n_enumerated[0] for f in found)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="trial", action="store_true", help="few rows; print the results, write nothing")
    parser.add_argument("--panel", nargs=2, metavar=("FOLDER", "ROWS"), help="one step of the run, in its own process")
    arguments = parser.parse_args()
    if arguments.panel:
        print(json.dumps(panel(Path(arguments.panel[0]), int(arguments.panel[1]))))
        return
    small = arguments.trial
    results: dict[str, Any] = {"machine": machine(), "n_threads": N_THREADS}

    def note(name: str, value: Any) -> None:
        results[name] = value
        print(json.dumps({name: value}), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        note("rows", capture(folder, 1 if small else 8, 2 if small else 20))
        n_rows = 540 if small else PANEL_ROWS
        command = [sys.executable, __file__, "--panel", name, str(n_rows)]
        note("panel", json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        per_budget = {b: enumeration(sample(folder, 128 if small else 512, b), b, 2 if small else 8) for b in BUDGETS}
        note("enumeration", per_budget)
        for dtype in ("float32", "float64"):
            mean = statistics.fmean(found[f"faster_than_{dtype}"] for found in per_budget.values())
            note(f"enumeration_faster_than_{dtype}_mean", mean)
        note("agreement", {b: agreement(sample(folder, 2 if small else 16, b), b) for b in BUDGETS})
        batch = sample(folder, 64, 8, 24)
        (seconds,) = interleaved(lambda: best_subsets(batch, 8, n_threads=N_THREADS))
        note("enumeration_32_candidates_seconds_a_row", seconds / len(batch.keys))
        note("larger", [larger(folder, *size, 4 if small else 100) for size in LARGE])
    if not small:
        write("03_subset_speed", results)


if __name__ == "__main__":
    main()
