"""How much faster is the label engine than the best plain way, and is it exact?

Prediction: eviction labels cost m tokens a window against n + m for a full forward, so about 17x fewer tokens at
512 + 32; attention over the prefix and the unembedding of every row leave 12x or more. Knockout recomputes half the
context on average, so about 1.9x fewer tokens; 2.3x needs cheaper attention too.

Every ratio is of medians of five interleaved repeats in one process. Run: python experiments/01_label_speed.py
Writes data/results/01_label_speed.json and .md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, described, interleaved, machine, sample, seconds, write
from scipy.stats import spearmanr

from kvlens import model as models
from kvlens.linear import fast_linear, kernel
from kvlens.model import Model
from kvlens.probe.noise import recompute, spread
from kvlens.probe.occlusion import Intervention, Occluder, make_batches, total_tokens, windows_of
from kvlens.records import Tokens

ROWS = 2048


@torch.inference_mode()
def naive(model: Model, tokens: Tokens, window: tuple[int, int], cut: int) -> torch.Tensor:
    """The best plain way: one full forward with a 4-D mask under SDPA, logits for the target rows only."""
    n_inputs, n_target = tokens.n_tokens - 1, tokens.n_target
    visible = torch.ones(n_inputs, n_inputs, dtype=torch.bool).tril()
    visible[cut:, window[0] : window[1]] = False
    ids = torch.from_numpy(tokens.ids[:n_inputs])[None]
    return model.hf(ids, attention_mask=visible[None, None], logits_to_keep=n_target, use_cache=False).logits[0]


def exact_log_probs(logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    targets = torch.from_numpy(tokens.ids[tokens.n_context :])
    return logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def run_batches(engine: Occluder, batches: Sequence[Sequence[int]], windows: Sequence[tuple[int, int]]) -> torch.Tensor:
    found = [engine.run([engine.counterfactual(windows[i]) for i in batch]).log_probs.sum(-1) for batch in batches]
    return torch.cat(found)


def shared_prefix(model: Model, tokens: Tokens, kind: str, every: int) -> dict[str, Any]:
    """Speed and exactness of one intervention against one full forward a window; every `every`-th batch is run."""
    how = Intervention(kind)
    engine = Occluder(model, tokens, how)
    windows = windows_of(tokens, 1, 1)
    firsts = [engine.counterfactual(window).first for window in windows]
    n_inputs = tokens.n_tokens - 1
    batches = make_batches(firsts, n_inputs, ROWS)
    chosen = batches[every // 2 :: every]
    share = total_tokens(chosen, firsts, n_inputs) / total_tokens(batches, firsts, n_inputs)
    probes = spread(range(1, len(windows)), 12)  # position 0, the attention sink, stands apart
    cuts = [engine.counterfactual(windows[i]).cut for i in probes]

    def ours() -> None:
        run_batches(Occluder(model, tokens, how), chosen, windows)

    def plain() -> None:
        for i, cut in list(zip(probes, cuts, strict=True))[:4]:
            naive(model, tokens, windows[i], cut)

    def plain_same_kernel() -> None:
        with fast_linear():
            plain()

    fast, slow, slow_same = interleaved(ours, plain, plain_same_kernel)
    reference = exact_log_probs(naive(model, tokens, windows[0], n_inputs), tokens).sum()
    truth = torch.stack(
        [exact_log_probs(naive(model, tokens, windows[i], c), tokens).sum() for i, c in zip(probes, cuts, strict=True)]
    )
    found = torch.stack([run_batches(engine, [[i]], windows)[0] for i in probes])
    off = ((engine.reference.log_probs.sum() - found) - (reference - truth)).abs().max()
    return {
        "speedup": (slow / 4) / (fast / share / len(windows)),
        "speedup_over_same_linear_kernel": (slow_same / 4) / (fast / share / len(windows)),
        "largest_difference_nats": float(off),
        "allowed_nats": max(1e-4, 1e-5 * abs(float(reference))),
        "n_windows": len(windows),
        "share_of_batches_run": share,
        "tokens_per_second": total_tokens(chosen, firsts, n_inputs) / fast,
    }


@torch.inference_mode()
def batched_rate(model: Model, tokens: Tokens) -> dict[str, Any]:
    """Token rate of `evict` against a plain batched forward: 8 rows of 32 tokens, no prefix, all logits."""
    how = Intervention("evict")
    engine = Occluder(model, tokens, how)
    windows = windows_of(tokens, 1, 1)[1:65]
    ids = torch.from_numpy(tokens.ids[tokens.n_context :])[None].expand(8, -1).contiguous()

    def plain() -> torch.Tensor:
        return model.hf(ids, use_cache=False).logits

    def plain_same_kernel() -> torch.Tensor:
        with fast_linear():
            return plain()

    ours, slow, slow_same = interleaved(lambda: run_batches(engine, [range(64)], windows), plain, plain_same_kernel)
    rate = 64 * tokens.n_target / ours
    return {
        "share_of_plain_rate": rate / (ids.numel() / slow),
        "share_of_plain_rate_same_linear_kernel": rate / (ids.numel() / slow_same),
    }


def against_captum(model: Model, n_context: int, n_target: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Against LLMAttribution with FeatureAblation, forward_in_tokens=False, same tokens, target and baseline token.

    captum runs one forward for the full text and one for each token it ablates; it is given 16 tokens spread over the
    context and its time is divided by 17, ours is for 127 or 128 windows and divided by their number.
    """
    from captum.attr import FeatureAblation, LLMAttribution, TextTokenInput

    tokens = sample(model, n_context, n_target)
    baseline = int(model.tokenizer.eos_token_id)
    windows = windows_of(tokens, 1, 1)[:128]  # of one cost under evict; all there are at 128 tokens
    probes = spread(range(1, len(windows)), 16)
    attribution = LLMAttribution(FeatureAblation(model.hf), model.tokenizer)
    prompt = TextTokenInput("x", model.tokenizer, baselines=baseline)
    # captum's input is made from text; its ids are set to ours so that both see the same tokens.
    prompt.inp_tensor = torch.from_numpy(tokens.ids[:n_context])[None]
    prompt.itp_mask = torch.zeros_like(prompt.inp_tensor, dtype=torch.bool)
    prompt.itp_mask[0, probes] = True
    prompt.itp_tensor = prompt.inp_tensor[prompt.itp_mask][None]
    prompt.n_itp_features = len(probes)
    prompt.values = [str(i) for i in probes]
    target = torch.from_numpy(tokens.ids[n_context:])

    def captum() -> torch.Tensor:
        found = attribution.attribute(prompt, target=target, forward_in_tokens=False, num_trials=1)
        return found.seq_attr.flatten().double().cpu()

    results: dict[str, Any] = {"n_context": n_context, "n_target": n_target}
    for kind in kinds:
        how = Intervention(kind, filler_id=baseline if kind == "substitute" else None)

        def ours(how: Intervention = how) -> torch.Tensor:
            engine = Occluder(model, tokens, how)
            firsts = [engine.counterfactual(window).first for window in windows]
            batches = make_batches(firsts, tokens.n_tokens - 1, ROWS)
            effects = torch.empty(len(windows), dtype=torch.float64)
            effects[[i for batch in batches for i in batch]] = run_batches(engine, batches, windows)
            return engine.reference.log_probs.sum() - effects

        def captum_same_kernel() -> torch.Tensor:
            with torch.inference_mode(), fast_linear():
                return captum()

        fast, slow, slow_same = interleaved(ours, captum, captum_same_kernel)
        for name, taken in (("speedup", slow), ("speedup_over_same_linear_kernel", slow_same)):
            results.setdefault(kind, {})[name] = taken / (len(probes) + 1) / (fast / len(windows))
        if kind == "substitute":
            results[kind]["largest_difference_nats"] = float((ours()[probes] - captum()).abs().max())
    return results


def half_precision(model: Model, tokens: Tokens) -> dict[str, Any]:
    """bf16 against fp32 for `evict`: speed, rank agreement, and the noise floor of each."""
    half = models.load("smollm2-135m", dtype="bfloat16")
    windows = windows_of(tokens, 1, 1)
    batches = [list(range(lo, min(lo + 64, len(windows)))) for lo in range(0, len(windows), 64)]
    engines = [Occluder(m, tokens, Intervention("evict")) for m in (model, half)]
    fp32, bf16 = interleaved(*[lambda e=e: run_batches(e, batches[:2], windows) for e in engines])
    effects = [(e.reference.log_probs.sum() - run_batches(e, batches, windows)).numpy() for e in engines]
    probes = spread(range(1, len(windows)), 32)
    shape = [
        np.abs(recompute(e, [windows[i] for i in probes], {64}) - found[probes])
        for e, found in zip(engines, effects, strict=True)
    ]
    against = np.abs(effects[1] - effects[0])[1:]
    return {
        "speedup_bf16_over_fp32": fp32 / bf16,
        "spearman": float(spearmanr(effects[0][1:], effects[1][1:]).statistic),
        "median_abs_effect_fp32_nats": float(np.median(np.abs(effects[0][1:]))),
        "noise_fp32_nats": {"median": float(np.median(shape[0])), "max": float(shape[0].max())},
        "noise_bf16_nats": {"median": float(np.median(shape[1])), "max": float(shape[1].max())},
        "bf16_against_fp32_nats": {"median": float(np.median(against)), "max": float(against.max())},
    }


def memory() -> dict[str, Any]:
    """Extra peak memory of one batch of 64 windows at 4,096 + 32 tokens, in a fresh process."""
    command = [sys.executable, __file__, "--memory-of-one-batch"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def memory_of_one_batch() -> None:
    import ctypes
    import gc

    model = models.load("smollm2-135m")
    tokens = sample(model, 4096, 32)
    engine = Occluder(model, tokens, Intervention("evict"))
    windows = windows_of(tokens, 1, 1)[2000:2064]
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _high_water()
    run_batches(engine, [range(64)], windows)
    copies = 64 * 2 * 4096 * model.n_layers * model.n_kv_heads * model.d_head * 4
    print(json.dumps({"extra_peak_bytes": _high_water() - before, "prefix_copies_bytes": copies}))


def _high_water() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


def help_time() -> dict[str, Any]:
    """Seconds of `kvlens --help`, median of nine, and whether it imports torch or transformers."""
    command = [sys.executable, "-m", "kvlens", "--help"]
    times = [
        seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)) for _ in range(9)
    ]
    probe = (
        "import sys; from kvlens.cli.app import main; main(['--help']); print('torch' in sys.modules, file=sys.stderr)"
    )
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    return {"median_seconds": statistics.median(times), "imports_torch": loaded.stderr.strip() == "True"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-of-one-batch", action="store_true")
    parser.add_argument("--only", default="", help="run just these parts, comma-separated; writes nothing")
    arguments = parser.parse_args()
    if arguments.memory_of_one_batch:
        memory_of_one_batch()
        return
    model = models.load("smollm2-135m")
    tokens = sample(model, 512, 32)
    parts: dict[str, Callable[[], Any]] = {
        "evict_512": lambda: shared_prefix(model, tokens, "evict", 4),
        "batched_rate": lambda: batched_rate(model, tokens),
        "knockout_512": lambda: shared_prefix(model, tokens, "knockout", 12),
        "captum_128": lambda: against_captum(model, 128, 32, ("substitute", "evict")),
        "captum_512": lambda: against_captum(model, 512, 32, ("evict",)),
        "bf16": lambda: half_precision(model, tokens),
        "memory_4096": memory,
        "help": help_time,
    }
    only = [name for name in arguments.only.split(",") if name] or list(parts)
    results: dict[str, Any] = {**described(model), "machine": machine(), "linear_kernel": kernel()}
    for name in only:
        results[name] = parts[name]()
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    if not arguments.only:
        write("01_label_speed", results)


if __name__ == "__main__":
    main()
