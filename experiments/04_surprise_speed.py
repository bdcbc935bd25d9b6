"""What does a pass of surprise cost, and is it the same number as the plain way's?

The paper: fast against full 7 to 9 times (54 to 7.9 ms at n = 512, 496 to 52.6 ms at n = 4,096; RTX 4090, Qwen2.5-7B),
each with the whole vocabulary. Prediction: without a vocabulary and with the triangle instead of a mask the full pass
is 1.15 times as fast as the plain form at 512 and 1.5 times at 4,096, and the fast pass 35 times as fast as ours.

1. The plain form: every row of attention under an explicit n x n mask, by SDPA, and logits of the whole vocabulary, of
   which one a token is read. It has the linear kernel that our passes use; a second column has it as PyTorch comes.
2. Agreement: our scores and the plain form's, in float32, against the plain form in float64; and the rows that each
   keeps at a budget of n / 4.
3. A refresh by the fast pass against the prefill of the h = n / 4 tokens before it, which attend to the others.
4. Peak memory of a pass beside model, cache and state, n = 2,048 to 16,384, and the exponent of its growth. Past 8,192
   tokens (with --beyond-context) the model was not trained: a memory experiment.

Seconds are medians of five, repeats in turn in one process; peaks are of fresh processes. Text: the project's own.
Run: python experiments/04_surprise_speed.py [--device cuda]     Writes data/results/04_surprise_speed.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import described, interleaved, machine, resident, sample, write
from torch import Tensor
from torch.nn import functional

from kvlens import model as models
from kvlens.linear import fast_linear, kernel
from kvlens.model import Model
from kvlens.observables.refresh import refresh
from kvlens.observables.surprise import Scores, State, Surprise
from kvlens.observables.surprise_variant import FAST, FULL

SIZES, MEMORY_SIZES, TRAINED = (512, 4096), (2048, 4096, 8192, 16384), 8192
Layers = list[tuple[Tensor, Tensor]]


class Setting:
    """The same cached text for every way of scoring it."""

    def __init__(self, model: Model, n: int) -> None:
        self.model, self.n, self.n_new = model, n, n // 4
        self.ids = text_ids(model, n)
        self.layers, self.entering = prefilled(model, self.ids)
        self.positions = torch.arange(n, device=model.device)[None]
        self.full, self.fast = Surprise(model, FULL), Surprise(model, FAST)
        self.mask = torch.ones(n, n, dtype=torch.bool, device=model.device).triu(1)
        self.mask[-1] = True  # a row that sees nothing is no number; its output is put to 0

    def by_full(self) -> Scores:
        return self.full.scores(State(self.ids, self.positions), self.layers)

    def by_fast(self) -> Scores:
        return self.fast.scores(State(self.ids, self.positions, self.entering), self.layers)

    def plain(self) -> Tensor:
        return plain(self.model, self.ids, self.layers, self.mask)

    def plain_same_kernel(self) -> Tensor:
        with fast_linear():
            return self.plain()

    @torch.inference_mode()
    def prefill(self) -> None:
        """The last h tokens behind a cache of the others."""
        n_old = self.n - self.n_new
        held = [(keys[:, :, :n_old], values[:, :, :n_old]) for keys, values in self.layers]
        with fast_linear():
            models.hidden(self.model, self.ids[:, n_old:], cache=models.cache_from(self.model, held))


def text_ids(model: Model, n: int) -> Tensor:
    """The project's documents from the start, again from the start where they end."""
    ids = sample(model, min(n, TRAINED) - 1, 1).ids
    return torch.from_numpy(np.resize(ids, n))[None].to(model.device)


@torch.inference_mode()
def prefilled(model: Model, ids: Tensor) -> tuple[Layers, Tensor]:
    """Keys and values of every layer, and the states that enter the last block; in pieces, to need less at once."""
    cache, kept = models.new_cache(model), []

    def see(layer: int, states: Tensor) -> None:
        if layer == model.n_layers - 2:
            kept.append(states)

    with models.watch_blocks(model, see), fast_linear():
        for piece in ids.split(2048, dim=1):
            models.hidden(model, piece, cache=cache)
    return [(keys.contiguous(), values.contiguous()) for keys, values in models.cache_layers(cache)], torch.cat(kept, 1)


@torch.inference_mode()
def plain(model: Model, ids: Tensor, layers: Layers, mask: Tensor) -> Tensor:
    """Minus the logit of each token, the plain way."""
    layer_of = {id(module): layer for layer, module in enumerate(model.layers)}
    group = model.n_heads // model.n_kv_heads

    def attend(module: Any, query: Tensor, _: Tensor, __: Tensor, ___: Any = None, **keywords: Any) -> Any:
        keys, values = (states.to(query).repeat_interleave(group, 1) for states in layers[layer_of[id(module)]])
        output = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask[None, None], scale=keywords["scaling"]
        )
        output[:, :, -1] = 0
        return output.transpose(1, 2).contiguous(), None

    with models.attention_override(model, attend):
        states = models.hidden(model, ids)
    logits = model.hf.get_output_embeddings()(states)
    return -logits.gather(-1, ids[..., None])[..., 0]


def compared(model: Model, n: int) -> dict[str, Any]:
    """Seconds as ratios at this length, each named with its baseline."""
    setting = Setting(model, n)
    ways: list[Callable[[], Any]] = [
        setting.by_full, setting.by_fast, setting.plain, setting.plain_same_kernel, setting.prefill
    ]  # fmt: skip
    full, fast, as_it_comes, same, prefill = interleaved(*(finished(way, model) for way in ways))
    return {
        "n": n,
        "seconds": {"full": full, "fast": fast, "plain": as_it_comes, "plain_same_kernel": same, "prefill": prefill},
        "fast_over_full": full / fast,
        "full_over_plain_same_kernel": same / full,
        "full_over_plain_as_pytorch_comes": as_it_comes / full,
        "n_prefilled": setting.n_new,
        "fast_share_of_prefill": fast / prefill,
        "agreement": agreement(setting),
    }


def finished(way: Callable[[], Any], model: Model) -> Callable[[], Any]:
    """The way, ended only when the device has done its work."""
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    return lambda: (way(), wait())


def agreement(setting: Setting) -> dict[str, Any]:
    """Largest differences over tokens, and whether the rows kept at n / 4 are the same."""
    ours, theirs = setting.by_full(), setting.plain_same_kernel()
    wide = models.wrap(copy.deepcopy(setting.model.hf).double())
    exact = plain(wide, setting.ids, setting.layers, setting.mask)
    state = State(setting.ids, setting.positions)
    kept = [
        refresh(state, Scores(values.float(), ours.known), setting.n // 4)[0].tolist()
        for values in (ours.values, theirs, exact)
    ]
    known = ours.known

    def off(one: Tensor, other: Tensor) -> dict[str, float]:
        differences = (one.double() - other.double()).abs()[known]
        return {"largest": float(differences.max()), "median": float(differences.median())}

    return {
        "ours_to_plain": off(ours.values, theirs),
        "ours_to_float64": off(ours.values, exact),
        "plain_to_float64": off(theirs, exact),
        "largest_score": float(exact.abs().max()),
        "kept_differently": {
            "ours, plain": len(set(kept[0]) ^ set(kept[1])) // 2,
            "ours, float64": len(set(kept[0]) ^ set(kept[2])) // 2,
            "plain, float64": len(set(kept[1]) ^ set(kept[2])) // 2,
        },
    }


def peak(name: str, n: int, device: str) -> int:
    """Bytes that one pass adds at most to model, cache and state, in this process."""
    model = models.load("smollm2-135m", device=device, dtype="float32")
    surprise = Surprise(model, FULL if name == "full" else FAST)
    ids = text_ids(model, n)
    layers, entering = prefilled(model, ids)
    state = State(ids, torch.arange(n, device=model.device)[None], entering if surprise.start else None)
    few = State(*(t[:, :64] for t in (state.ids, state.positions)), None if state.states is None else entering[:, :64])
    surprise.scores(few, [(keys[:, :, :64], values[:, :, :64]) for keys, values in layers])
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        surprise.scores(state, layers)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    surprise.scores(state, layers)
    return resident("VmHWM") - before


def peaks(sizes: list[int], device: str) -> dict[str, Any]:
    """Peak bytes by pass and length, and the exponent b of bytes ~ n^b by least squares over logarithms."""
    found: dict[str, Any] = {}
    for name in ("full", "fast"):
        added = []
        for n in sizes:
            command = [sys.executable, __file__, "--peak", name, "--tokens", str(n), "--device", device]
            added.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        exponent = float(np.polyfit(np.log(sizes), np.log(added), 1)[0])
        found[name] = {"bytes": dict(zip(sizes, added, strict=True)), "exponent": exponent}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--beyond-context", action="store_true", help="memory past the trained context as well")
    parser.add_argument("--try", dest="trial", action="store_true", help="the short length alone; print, write nothing")
    parser.add_argument("--peak", choices=("full", "fast"), help="one pass, its memory")
    parser.add_argument("--tokens", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(arguments.peak, arguments.tokens, arguments.device))
        return
    model = models.load("smollm2-135m", device=arguments.device, dtype="float32")
    results: dict[str, Any] = {**described(model), "machine": machine(), "linear_kernel": kernel()}
    results["device"] = arguments.device
    results["speed"] = [compared(model, n) for n in (SIZES[:1] if arguments.trial else SIZES)]
    sizes = [n for n in MEMORY_SIZES if n <= TRAINED or arguments.beyond_context]
    results["memory"] = peaks(sizes[:2] if arguments.trial else sizes, arguments.device)
    print(json.dumps(results, indent=1), file=sys.stderr)
    if not arguments.trial:
        write("04_surprise_speed" if arguments.device == "cpu" else "04_surprise_speed_cuda", results)


if __name__ == "__main__":
    main()
