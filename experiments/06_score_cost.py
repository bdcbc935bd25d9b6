"""What does a method's score cost, as a share of the prefill that it is made in, ours beside kvpress'?

Prediction: norms, frozen numbers and a few rows of weights under 1 %; every query's weights (h2o, thinkv and what is
made of them) 20 to 40 %; a second reading of the text (kvzip) more than the prefill itself; none of ours above kvpress'
implementation of the same method.

1. One plain prefill notes what every layer gets: queries, keys, values, what enters attention, what leaves the block.
2. Ours: a run of `kvlens.apply` is led through the noted tensors layer by layer in the model's place, with trigger
   prefill and a quarter of the tokens to stay. Its share is all that it counts as scoring: what it does beside
   attention, what its scorer observes, and the scores at the eviction. The model's own work is not done again.
3. Theirs: a press' `score` on the same tensors, all layers. A press that reads attention weights needs eager attention:
   that is counted, less the SDPA attention that it stands for. KVzip's is its second pass (auditing/kvzip_pass.py).
4. A check that 2. leaves nothing out: a real prefill under the policy, what it takes beyond a plain one.

Both sides have the linear kernel that the prefill has. What is done once for a run (a twin of the model, the layers'
rotation) is not counted. Seconds are medians of three, all ways in turn in one process on one thread; a ratio has its
lowest and highest turn. Text: the project's own, from the start again where it ends.
Run: python experiments/06_score_cost.py [--try]     Writes data/results/06_score_cost.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from common import described, machine, sample, seconds, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

import kvlens
from kvlens import model as models
from kvlens.attention import around_attention
from kvlens.auditing.kvzip_pass import kvzip_pass
from kvlens.auditing.methods import prefill
from kvlens.auditing.press_hooks import arguments_of, hooks, lent
from kvlens.auditing.press_table import PressChoice, kvpress_version, make_press
from kvlens.linear import fast_linear, kernel
from kvlens.model import Model
from kvlens.policy import Policy
from kvlens.runtime.apply import Run
from kvlens.scorers.table import TABLE

LENGTH, SHORT, TURNS, DOCUMENTS = 4096, 512, 3, 2048
KEPT = 0.25
LEFT_OUT = ("fitted", "oracle")  # what these cost is up to what they are given
PARITY = {"thinkv, parity": ("thinkv", {"parity": True}), "lagkv, causal": ("lagkv", {"causal": True})}
PRESSES = {
    "random": "RandomPress",
    "sliding_window": "StreamingLLMPress",
    "keynorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "lagkv": "LagKVPress",
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "expected_attention": "ExpectedAttentionPress",
    "compactor": "CompactorPress",
    "h2o": "ObservedAttentionPress",
    "kvzip": "KVzipPress",
}
CHECKED = ("snapkv", "h2o")


class Noted:
    """1."""

    def __init__(self, model: Model, n: int) -> None:
        self.model = model
        ids = sample(model, min(n, DOCUMENTS), 1).ids[:-1]
        self.ids = torch.from_numpy(np.resize(ids, n))[None]
        self.asked: dict[int, tuple[Tensor, Tensor, Tensor, Any]] = {}
        self.entered: dict[int, tuple[Tensor, Any]] = {}
        self.left: dict[int, Tensor] = {}
        self.cache = models.new_cache(model)

        def attend(layer: int, own: Callable[[], Tensor], *asked: Any) -> Tensor:
            self.asked[layer] = asked
            return own()

        def after(layer: int, _: Any, called: Any) -> None:
            self.entered[layer] = called[0], {name: part for name, part in called[1].items() if "cache" not in name}

        with around_attention(model, attend), hooks(model, after), models.watch_blocks(model, self.left.__setitem__):
            prefill(model, self.ids, self.cache)

    def plain(self) -> None:
        """A prefill without any method."""
        prefill(self.model, self.ids, models.new_cache(self.model))


class Ours:
    """2. of one method."""

    def __init__(self, noted: Noted, policy: Policy) -> None:
        self.noted, self.run = noted, Run(policy, noted.model, record=False)
        self.run.active = True

    def __call__(self) -> float:
        noted, run, before = self.noted, self.run, self.run.log.scoring_seconds
        decoder, cache = noted.model.decoder, DynamicCache(config=noted.model.decoder.config)
        run.before(decoder, (), {"input_ids": noted.ids, "past_key_values": cache})
        blocks = set(run.scorer.hidden_layers(run.facts))
        for layer, (query, key, value, keywords) in noted.asked.items():
            held = cache.layers[layer].update(key, value)
            run.attend(layer, lambda: query, query, *held, keywords)  # noqa: B023 (called before the next layer)
            if layer in blocks:
                run.see_block(layer, decoder, None, noted.left[layer])
        run.after(decoder, None, noted.ids)
        return run.log.scoring_seconds - before


def policy_of(name: str) -> Policy:
    """The method at a quarter of the tokens, each head on its own where it can be."""
    scorer, parameters = PARITY.get(name, (name, {}))
    made = TABLE[scorer](**parameters)
    return Policy(
        scorer={"name": scorer, "parameters": parameters},
        budget={"keep_fraction": KEPT},
        trigger="prefill",
        reduce="head" if made.per_layer and not made.together else "all",
    )


# 3.


def theirs(noted: Noted, name: str) -> Callable[[], float]:
    """What takes the seconds of this press."""
    press = make_press(PressChoice(name), 1 - KEPT)
    if name == "KVzipPress":
        return lambda: seconds(lambda: kvzip_pass(press, noted.model, noted.cache, noted.ids))
    if name == "ObservedAttentionPress":
        return partial(observed, noted, press)
    return lambda: seconds(lambda: [score(noted, press, layer, None) for layer in noted.entered])


def score(noted: Noted, press: Any, layer: int, weights: Tensor | None) -> Tensor:
    """What the press says of one layer."""
    hidden, keywords = noted.entered[layer]
    held = noted.cache.layers[layer]
    arguments = arguments_of(noted.cache, hidden, keywords)
    return press.score(noted.model.layers[layer], hidden, held.keys, held.values, weights, arguments)


def observed(noted: Noted, press: Any) -> float:
    """Eager attention and the score, less SDPA attention."""
    total, n = 0.0, noted.ids.shape[1]
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    for layer, (query, key, value, keywords) in noted.asked.items():
        module = noted.model.layers[layer]
        eager = sys.modules[type(module).__module__].eager_attention_forward

        def both(module: Any = module, asked: Any = (query, key, value), layer: int = layer) -> None:
            score(noted, press, layer, eager(module, *asked, mask, scaling=keywords["scaling"])[1])  # noqa: B023

        def fused(asked: Any = (query, key, value)) -> None:
            scaled_dot_product_attention(*asked, is_causal=True, enable_gqa=True)

        total += seconds(both) - seconds(fused)
    return total


# 4.


def in_prefill(noted: Noted, name: str) -> dict[str, float]:
    """A real prefill under the policy: all of its seconds, and what it says that it spent."""
    with kvlens.apply(policy_of(name), noted.model, record=False) as run:
        taken = seconds(lambda: prefill(noted.model, noted.ids, DynamicCache(config=noted.model.decoder.config)))
        report = run.report()
    return {"seconds": taken, "scoring": report.scoring_seconds, "evicting": report.evicting_seconds}


def fact(values: list[float]) -> dict[str, float]:
    """The median of all turns, with the lowest and the highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def compared(noted: Noted, names: list[str]) -> dict[str, Any]:
    """All ways in turn."""
    ways: dict[Any, Callable[[], float]] = {"prefill": lambda: seconds(noted.plain)}
    for name in names:
        ways[name, "ours"] = Ours(noted, policy_of(name))
        if name in PRESSES and find_spec("kvpress") is not None:
            ways[name, "theirs"] = theirs(noted, PRESSES[name])
    times: dict[Any, list[float]] = {way: [] for way in ways}
    checks: dict[str, list[dict[str, float]]] = {name: [] for name in CHECKED if name in names}
    for turn in range(TURNS):
        for way, take in ways.items():
            times[way].append(take())
            print(turn, way, f"{times[way][-1]:.3f} s", file=sys.stderr, flush=True)
        for name, found in checks.items():
            found.append(in_prefill(noted, name))
    rows = {}
    for name in names:
        row: dict[str, Any] = {"share_of_prefill": over(times[name, "ours"], times["prefill"])}
        row["ms_a_layer"] = 1000 * statistics.median(times[name, "ours"]) / noted.model.n_layers
        if (name, "theirs") in times:
            row["press"] = PRESSES[name]
            row["theirs_share_of_prefill"] = over(times[name, "theirs"], times["prefill"])
            row["ours_over_theirs"] = over(times[name, "ours"], times[name, "theirs"])
        rows[name] = row
    prefill_seconds = statistics.median(times["prefill"])
    checked = {
        name: {part: statistics.median(each[part] for each in found) for part in found[0]}
        | {"beyond_plain": fact([each["seconds"] - plain for each, plain in zip(found, times["prefill"], strict=True)])}
        | {"scoring_led_through": statistics.median(times[name, "ours"])}
        for name, found in checks.items()
    }
    return {"prefill_seconds": prefill_seconds, "methods": rows, "checked": checked}


def over(these: list[float], those: list[float]) -> dict[str, float]:
    """The ratio, turn by turn."""
    return fact([one / other for one, other in zip(these, those, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="trial", action="store_true", help=f"{SHORT} tokens; print, write nothing")
    parser.add_argument("--only", help="these methods alone, such as snapkv/tova; print, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = models.load("smollm2-135m", dtype="float32")
    n = SHORT if arguments.trial else LENGTH
    names = [name for name in TABLE if name not in LEFT_OUT] + list(PARITY)
    if arguments.only:
        names = arguments.only.split("/")
    results: dict[str, Any] = {**described(model), "machine": machine(), "linear_kernel": kernel()}
    results |= {"n": n, "kept": KEPT, "turns": TURNS}
    if find_spec("kvpress") is not None:
        results["kvpress"] = kvpress_version()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(fast_linear())
        noted = Noted(model, n)
        stack.enter_context(lent(model))
        results |= compared(noted, names)
    print(json.dumps(results, indent=1), file=sys.stderr)
    if not (arguments.trial or arguments.only):
        write("06_score_cost", results)


if __name__ == "__main__":
    main()
