"""What does a policy cost and save while SmolLM2-135M generates?

Prediction: hooks cost under 3 % of a decode step; a step over 512 kept tokens is 1.5 times as fast as one over 4,096,
and stored bytes are the budget's share. A scorer that reads hidden states needs no attention matrix, so prefill and
first eviction beat one that does by more than 1.6 times, in a fifth of the extra memory.

1. Nothing evicted: logits bit-equal to no policy for every scorer, and a decode step's overhead (interleaved pairs).
2. Evicted: logits against the full cache under masks; a step at 4,096 cached tokens under a budget of 512 against the
   full cache and against H2O that reads eager attention; ragged heads against uniform ones of the same mean.
3. Prefill of 4,096 tokens and first eviction: `epikv` against H2O over materialised attention, time and peak memory.
4. Bytes held; peak while 16,384 tokens are prefilled in chunks of 1,024 under a budget of 512 (beyond the trained
   context: a memory experiment).
5. End to end: a prompt of 4,096 and 512 new tokens.
6. One eviction at 4,096: selection and compaction, apart from scoring, as a share of a decode step.
7. Bytes stored after every new token of a text: what the figure draws.

Ratios are of medians, ways taken in turn in one process; peaks are of fresh processes. Prompts are the project's text;
budgets below the prompt leave it unprotected.
Run: python experiments/05_runtime.py [--device cuda] [--try]     Writes data/results/05_runtime.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, TRACES, described, machine, resident, seconds, write
from torch import Tensor
from transformers import DynamicCache

import kvlens
from kvlens import model as models
from kvlens.model import Model
from kvlens.policy import Policy
from kvlens.runtime.meter import Meter
from kvlens.scorers.table import TABLE
from kvlens.stats import over_traces
from kvlens.texts import read_traces

BUDGET, LONG, NEW, CHUNK = 512, 4096, 512, 1024
PAIRS = 24


def policy(scorer: str, tokens: int = BUDGET, **changes: Any) -> Policy:
    """A policy of this scorer that may evict the prompt."""
    given: dict[str, Any] = {"scorer": {"name": scorer}, "budget": {"tokens": tokens}, "trigger": "every:128"}
    return Policy(**given | changes)


def text_ids(model: Model, n: int) -> Tensor:
    """The project's documents from the start, again where they end."""
    text = "\n\n".join(trace.text or "" for trace in read_traces(TRACES / "documents.jsonl"))
    return torch.from_numpy(np.resize(model.tokenizer(text).input_ids, n))[None].to(model.device)


@contextmanager
def under(chosen: Policy | None, model: Model) -> Iterator[Any]:
    with torch.inference_mode(), kvlens.apply(chosen, model, record=False) if chosen else nullcontext() as run:
        yield run


def prefilled(model: Model, ids: Tensor, chunk: int | None = None) -> DynamicCache:
    """The cache that these tokens leave, under whatever policy is applied."""
    cache = DynamicCache(config=model.hf.config)
    for piece in ids.split(chunk or ids.shape[1], dim=1):
        model.hf(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


class Decoding:
    """Decode steps on a cache that a policy may work on."""

    def __init__(self, model: Model, ids: Tensor, chosen: Policy | None, *, then: Tensor | None = None) -> None:
        self.model, self.chosen, self.token = model, chosen, ids[:, -1:]
        with under(chosen, model) as self.run:
            self.cache = prefilled(model, ids)
            if then is not None:
                model.hf(then, past_key_values=self.cache, use_cache=True)

    def seconds(self, n: int) -> list[float]:
        """Of each of n decode steps; entering and leaving the policy is not timed."""
        with under(self.chosen, self.model):
            return [seconds(self.step) for _ in range(n)]

    def step(self) -> None:
        self.model.hf(self.token, past_key_values=self.cache, use_cache=True)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def in_turn(ways: dict[str, Decoding], rounds: int, steps: int) -> dict[str, list[float]]:
    """By way, the median seconds of a step in each round, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            middle = statistics.median(way.seconds(steps))
            if number:
                found[name].append(middle)
    return found


def ratio(times: dict[str, list[float]], over: str, under_: str) -> dict[str, float]:
    """The mean ratio of paired rounds with its 95 % interval."""
    values = np.array(times[over]) / np.array(times[under_])
    found = over_traces(values, seed=0)
    return {"ratio": float(found.mean), "low": float(found.low), "high": float(found.high), "n_pairs": len(values)}


# 1. Nothing evicted


def identity(model: Model, n: int = 256, n_new: int = 16) -> dict[str, bool]:
    """By scorer, whether every logit of prefill and decoding is bit-equal to no policy's."""
    ids = text_ids(model, n + n_new)

    def logits(chosen: Policy | None) -> list[Tensor]:
        with under(chosen, model):
            cache = DynamicCache(config=model.hf.config)
            rows = [model.hf(ids[:, :n], past_key_values=cache, use_cache=True).logits]
            rows += [
                model.hf(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(n, n + n_new)
            ]
            return rows

    plain = logits(None)
    found = {}
    for name in sorted(set(TABLE) - {"oracle", "fitted"}):
        ours = logits(policy(name, n + n_new, protect={"sinks": 0}))
        found[name] = all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    return found


def overhead(model: Model, rounds: int) -> dict[str, Any]:
    """A decode step under `epikv` that evicts nothing, over a plain one."""
    found = {}
    for n in (512, LONG):
        ids = text_ids(model, n)
        ways = {"plain": Decoding(model, ids, None), "epikv": Decoding(model, ids, policy("epikv", 2 * LONG))}
        found[f"{n} cached"] = ratio(in_turn(ways, rounds, 8), "epikv", "plain")
    return found


# 2. Evicted


def steps_at_budget(model: Model, rounds: int) -> dict[str, Any]:
    """A decode step over what a budget keeps of a long prompt, against the full cache."""
    ids = text_ids(model, LONG)
    names = ("epikv", "surprise_fast", "sliding_window", "h2o")
    ways = {"full": Decoding(model, ids, None)}
    ways |= {name: Decoding(model, ids, policy(name)) for name in names}
    ways["epikv, every step"] = Decoding(model, ids, policy("epikv", trigger="step"))
    ways["ragged"] = Decoding(model, ids, uneven(model, "ragged"), then=ids[:, :1])
    ways["padded"] = Decoding(model, ids, uneven(model, "padded"), then=ids[:, :1])
    times = in_turn(ways, rounds, 8)
    found: dict[str, Any] = {f"full over {name}": ratio(times, "full", name) for name in ways if name != "full"}
    found["ragged over uniform"] = ratio(times, "ragged", "sliding_window")
    found["padded over uniform"] = ratio(times, "padded", "sliding_window")
    found["bytes"] = {name: stored(way, len(ids[0])) for name, way in ways.items() if name != "full"}
    return found


def uneven(model: Model, storage: str) -> Policy:
    """Heads that keep a half and one and a half of the budget, in turn."""
    heads = [[BUDGET // 2 if (layer + head) % 2 else BUDGET * 3 // 2 for head in range(model.n_kv_heads)]
             for layer in range(model.n_layers)]  # fmt: skip
    return policy(
        "keynorm", reduce="head", storage=storage, allocate={"name": "table", "table": heads}, trigger="every:4096"
    )


def stored(way: Decoding, n: int) -> dict[str, float]:
    """Bytes over those of the full cache of the prompt."""
    report = way.run.report()
    full = report.full_bytes
    return {
        "physical_over_full": report.physical_bytes / full,
        "held_over_full": report.held_bytes / full,
        "side_bytes": report.side_bytes,
        "budget_over_length": BUDGET / n,
        "most_in_pass": report.most_in_pass,
    }


# 3. Prefill and first eviction


def first_eviction(model: Model, kind: str) -> None:
    """A prefill of the long prompt that ends under the budget."""
    ids = text_ids(model, LONG)
    if kind == "materialised":
        materialised(model, ids)
        return
    with under(None if kind == "full" else policy(kind, trigger="prefill"), model):
        prefilled(model, ids)


@torch.inference_mode()
def materialised(model: Model, ids: Tensor) -> None:
    """H2O over eager attention, the best plain way: each layer's matrix is summed and let go before the next; then rows
    leave.
    """
    former, masses = model.hf.config._attn_implementation, []

    def take(_: Any, __: Any, output: tuple[Any, ...]) -> None:
        masses.append(output[1][0].sum(1).view(model.n_kv_heads, -1, ids.shape[1]).mean(1))

    model.hf.set_attn_implementation("eager")
    hooks = [layer.self_attn.register_forward_hook(take) for layer in model.hf.model.layers]
    try:
        cache = DynamicCache(config=model.hf.config)
        model.hf(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for layer, mass in zip(cache.layers, masses, strict=True):
            kept = mass.topk(BUDGET, -1).indices.sort(-1).values[None, :, :, None].expand(-1, -1, -1, model.d_head)
            layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)
    finally:
        for hook in hooks:
            hook.remove()
        model.hf.set_attn_implementation(former)


def prefill_times(model: Model, rounds: int) -> dict[str, Any]:
    kinds = ("epikv", "surprise_fast", "h2o", "materialised", "full")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            times[kind].append(seconds(lambda kind=kind: first_eviction(model, kind)))
    return {f"{kind} over epikv": ratio(times, kind, "epikv") for kind in kinds if kind != "epikv"}


# 4. Peaks, each in a process of its own


def chunked(model: Model, n: int) -> list[int]:
    """Resident bytes above those of the loaded model after each chunk, at most during it."""
    ids, peaks = text_ids(model, n), []
    before = resident("VmRSS")
    with under(policy("epikv", trigger=f"every:{CHUNK}"), model):
        cache = DynamicCache(config=model.hf.config)
        for piece in ids.split(CHUNK, dim=1):
            Path("/proc/self/clear_refs").write_text("5")
            model.hf(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            peaks.append(resident("VmHWM") - before)
    return peaks


def peak(kind: str, device: str) -> Any:
    """What this process needs at most beside the loaded model."""
    model = models.load("smollm2-135m", device=device, dtype="float32")
    with torch.inference_mode():
        model.hf(text_ids(model, 64))
    gc.collect()
    if kind == "chunks":
        return chunked(model, 4 * LONG)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    first_eviction(model, kind)
    return resident("VmHWM") - before


def peaks(device: str) -> dict[str, Any]:
    """Medians of three processes a way: what a process holds at its start differs with what else the machine does."""

    def one(kind: str) -> Any:
        command = [sys.executable, __file__, "--peak", kind, "--device", device]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    kinds = ("full", "epikv", "surprise_fast", "materialised")
    turns = [{kind: one(kind) for kind in kinds} for _ in range(3)]
    found = {kind: int(statistics.median(turn[kind] for turn in turns)) for kind in kinds} | {"chunks": one("chunks")}
    extra = {kind: found[kind] - found["full"] for kind in ("epikv", "surprise_fast", "materialised")}
    return {"bytes": found, "extra_over_full_bytes": extra}


# 5. and 6.


def end_to_end(model: Model, rounds: int, n_new: int) -> dict[str, Any]:
    ids, times = text_ids(model, LONG), {name: [] for name in ("full", "epikv", "surprise_fast")}
    for _ in range(rounds):
        for name, found in times.items():
            chosen = None if name == "full" else policy(name)

            def whole(chosen: Policy | None = chosen) -> None:
                with under(chosen, model):
                    model.hf.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, min_new_tokens=n_new,
                        do_sample=False, pad_token_id=0,
                    )  # fmt: skip

            found.append(seconds(whole))
    return {f"{name} over full": ratio(times, name, "full") for name in times if name != "full"}


def one_eviction(model: Model, rounds: int) -> dict[str, Any]:
    """Selection and compaction of the first eviction, and scoring, over a decode step at the full length."""
    ids, found = text_ids(model, LONG), {}
    full = Decoding(model, ids, None)
    step = statistics.median(full.seconds(16))
    for name in ("sliding_window", "epikv", "surprise_fast"):
        rows = []
        for _ in range(rounds):
            report = Decoding(model, ids, policy(name, trigger="prefill")).run.report()
            rows.append((report.evicting_seconds, report.scoring_seconds))
        evicting, scoring = (statistics.median(column) for column in zip(*rows, strict=True))
        found[name] = {"evicting_over_step": evicting / step, "scoring_over_step": scoring / step}
    return found


# 7.


def growth(model: Model, n_prompt: int, n_new: int) -> dict[str, Any]:
    """Bytes stored after every new token, without a policy and with."""
    ids, found = text_ids(model, n_prompt), {}
    ways = {
        "full cache": None,
        "epikv, every 128 tokens": policy("epikv"),
        "epikv, every token": policy("epikv", trigger="step"),
    }
    for name, chosen in ways.items():
        with under(chosen, model):
            cache = DynamicCache(config=model.hf.config)
            meter = Meter(cache)
            model.hf.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, streamer=meter, max_new_tokens=n_new,
                min_new_tokens=n_new, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        found[name] = meter.bytes
    return {"n_prompt": n_prompt, "bytes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--try", dest="trial", action="store_true", help="few repeats; print, write nothing")
    parser.add_argument("--only", help="measure this part again, such as memory; the others stay as they are")
    parser.add_argument("--peak", choices=("full", "epikv", "surprise_fast", "materialised", "chunks"))
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(peak(arguments.peak, arguments.device)))
        return
    model = models.load("smollm2-135m", device=arguments.device, dtype="float32")
    few, file = arguments.trial, "05_runtime" if arguments.device == "cpu" else "05_runtime_cuda"
    results: dict[str, Any] = {**described(model), "machine": machine(), "device": arguments.device, "budget": BUDGET}
    parts: dict[str, Callable[[], Any]] = {
        "identity": lambda: identity(model),
        "overhead": lambda: overhead(model, 2 if few else PAIRS),
        "steps": lambda: steps_at_budget(model, 2 if few else 7),
        "prefill": lambda: prefill_times(model, 1 if few else 3),
        "memory": lambda: peaks(arguments.device),
        "one_eviction": lambda: one_eviction(model, 1 if few else 4),
        "growth": lambda: growth(model, 256, 32 if few else 768),
        "end_to_end": lambda: end_to_end(model, 1 if few else 3, 32 if few else NEW),
    }
    if arguments.only:
        results = json.loads((RESULTS / f"{file}.json").read_text()) | results
    for name, part in parts.items():
        if arguments.only not in (None, name):
            continue
        results[name] = part()
        print(json.dumps({name: results[name]}, indent=1), file=sys.stderr, flush=True)
    if not arguments.trial:
        write(file, results)


if __name__ == "__main__":
    main()
