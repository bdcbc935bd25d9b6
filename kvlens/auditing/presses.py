"""How does a press of kvpress compress a cache under today's transformers? From kvlens' own hooks.

The presses' own hooks read arguments that transformers no longer passes (from 5.4 on). Here, on every full-attention
layer, while the tokens are prefilled:

1. after the layer has run, its keys and values are taken from the cache, with what entered it, and with arguments under
   every name that presses have read: position embeddings, cache position, the cache under each of its names;
2. a press that only scores (`score`, with kvpress' own `compress`) is asked for its scores; common protection and the
   exact budget choose, as for kvlens' own scorers, and what is not chosen leaves the storage;
3. any other press' `compress` is called, and what it gives back is what the layer holds from then on;
4. KVzip runs its own second pass over the cache (kvzip_pass.py), since it decides only when every layer is there;
5. what a press only marks (`masked_key_indices` on the module) stays in storage, and attention does not see it. It is
   reported as it ships: claimed by `compression_ratio`, held in full.

Marks, hooks and lent attributes are taken off the modules at the end, after exceptions too. kvpress hides a marked key
behind a fake one that it writes into the cache; a mask hides it without writing, and exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvlens import model as models
from kvlens.auditing.bytes import tensors_of
from kvlens.auditing.kvzip_pass import kvzip_pass
from kvlens.auditing.methods import AS_SHIPPED, Held, prefill
from kvlens.auditing.press_hooks import MARKS, arguments_of, eager, full_layers, hooks, lent
from kvlens.auditing.press_table import PRESSES, PressChoice, kvpress_module, make_press, quiet, reads_attention
from kvlens.model import Model
from kvlens.policy import Protect
from kvlens.runtime.budget import fraction_tokens
from kvlens.runtime.evict import choose, protected


@dataclass(frozen=True)
class PressMethod:
    """A press, at the share of tokens that stays; `name` is what was asked for."""

    choice: PressChoice
    keep_fraction: float
    protect: Protect
    source: str = "press"
    storage: str = AS_SHIPPED

    @property
    def name(self) -> str:
        """As it was asked for."""
        return self.choice.label

    def make(self) -> Any:
        """The press itself, new: presses keep what they saw of the last text."""
        return make_press(self.choice, round(1 - self.keep_fraction, 12))

    @contextmanager
    def compressed(self, model: Model, ids: Int[Tensor, "1 seen"]) -> Iterator[Held]:
        """The cache that the press leaves after prefill."""
        with self.pressed(model, ids) as (press, cache, _):
            n_seen = ids.shape[1]
            kept_all = model.n_layers * model.n_kv_heads * n_seen
            layers = models.cache_layers(cache)
            masks = {index: visible(model, index, n_seen) for index in full_layers(model)}
            marks = [tensor for module in model.layers for tensor in tensors_of(getattr(module, MARKS, None))]
            seen = [masks.get(index) for index in range(model.n_layers)]
            kept = sum(
                keys.shape[2] * model.n_kv_heads if mask is None else int(mask.sum())
                for mask, (keys, _) in zip(seen, layers, strict=True)
            )
            for module in model.layers:  # where somebody imported kvpress plainly, its attention would write fake keys
                setattr(module, MARKS, None)
            states = [part for pair in layers for part in pair]
            claimed = claimed_bytes(model, press.compression_ratio, n_seen)
            own = [*tensors_of(press), *marks]
            yield Held(states, own, claimed, 0, min(kept, kept_all), partial(predict, model, cache, masks, n_seen))

    @contextmanager
    def pressed(self, model: Model, ids: Int[Tensor, "1 seen"]) -> Iterator[tuple[Any, Any, Any]]:
        """The press that ran, the cache, and what the press thought of every slot where it tells.

        What it marked stands on the modules until the block ends.
        """
        press, cache = self.make(), models.new_cache(model)
        worth: Any = {}
        with ExitStack() as stack:
            stack.enter_context(lent(model))
            stack.enter_context(quiet())
            if reads_attention(self.choice):
                stack.enter_context(eager(model))
            if hasattr(press, "score_kvzip"):
                prefill(model, ids, cache)
                worth = kvzip_pass(press, model, cache, ids)
            else:
                press.post_init_from_model(model.hf)
                if PRESSES[self.choice.name].marks:
                    worth = stack.enter_context(overheard(press.press))
                with hooks(model, partial(self._after, press, cache)):
                    prefill(model, ids, cache)
            yield press, cache, worth

    def _after(self, press: Any, cache: Any, index: int, module: nn.Module, called: tuple[Any, ...]) -> None:
        """1. to 3. for one layer; `called` are what entered it, its keywords, and its attention weights."""
        hidden, kwargs, attention = called
        layer = cache.layers[index]
        arguments = [module, hidden, layer.keys, layer.values, attention, arguments_of(cache, hidden, kwargs)]
        scores_only = type(press).compress is kvpress_module().ScorerPress.compress
        if not scores_only:
            layer.keys, layer.values = press.compress(*arguments)
        elif press.compression_ratio > 0:
            scores = press.score(*arguments)
            n_seen = hidden.shape[1]
            budget = fraction_tokens(self.keep_fraction, n_seen, self.protect.sinks + self.protect.recent)
            index_kept = chosen(scores, budget, self.protect)[..., None].expand(-1, -1, -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, index_kept), layer.values.gather(2, index_kept)


def chosen(
    scores: Float[Tensor, "batch kv_head slots"], budget: int, protect: Protect
) -> Int[Tensor, "batch kv_head kept"]:
    """2. The slots that stay, in the order of their positions; a score that is none (NaN) leaves first."""
    batch, heads, n_seen = scores.shape
    positions = torch.arange(n_seen, device=scores.device, dtype=torch.int32).expand(batch, heads, -1)
    all_seen = torch.full((batch,), n_seen, device=scores.device)
    safe = protected(protect, positions, all_seen, all_seen)
    judged = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    limit = torch.full((1, 1), budget, device=scores.device)
    return choose(judged, positions, limit, safe).index


@contextmanager
def overheard(press: Any) -> Iterator[dict[int, Tensor]]:
    """Within it the scores that a press gives, by layer, are noted as they were given."""
    found: dict[int, Tensor] = {}
    score = press.score

    def noted(module: Any, *arguments: Any, **keywords: Any) -> Tensor:
        scores: Tensor = score(module, *arguments, **keywords)
        found[int(module.layer_idx)] = scores.clone()  # the press that asked writes into them
        return scores

    press.score = noted
    try:
        yield found
    finally:
        del press.score


def claimed_bytes(model: Model, ratio: float, n_seen: int) -> int:
    """What a press says its cache takes: its ratio of full-attention layers' keys and values, the others whole."""
    layer = 2 * model.n_kv_heads * model.d_head * model.dtype.itemsize * n_seen
    n_full = len(full_layers(model))
    return round(layer * ((1 - ratio) * n_full + model.n_layers - n_full))


# 5.


def visible(model: Model, index: int, n_seen: int) -> Bool[Tensor, "kv_head seen"] | None:
    """Which slots of a layer attention sees; None: all it holds."""
    marks = getattr(model.layers[index], MARKS, None)
    if marks is None or len(marks[0]) == 0:
        return None
    seen = torch.ones(model.n_kv_heads, n_seen, dtype=torch.bool, device=model.device)
    seen[marks[1].to(model.device), marks[2].to(model.device)] = False
    return seen


def predict(
    model: Model, cache: Any, masks: dict[int, Tensor | None], n_seen: int, new: Int[Tensor, "1 new"], last: int
) -> Float[Tensor, "1 last d_vocab"]:
    """Logits of the last `last` new tokens, all of which see the slots held but for marked ones, and one another."""
    n_new = new.shape[1]
    positions = torch.arange(n_seen, n_seen + n_new, device=new.device)
    causal = torch.ones(n_new, n_new, dtype=torch.bool, device=new.device).tril()
    found = {}
    for index, seen in masks.items():
        held = cache.layers[index].keys.shape[2]
        if seen is None:
            before = torch.ones(1, n_new, held, dtype=torch.bool, device=new.device)
        else:
            before = seen.repeat_interleave(model.n_heads // model.n_kv_heads, 0)[:, None].expand(-1, n_new, -1)
        found[index] = torch.cat([before, causal.expand(before.shape[0], -1, -1)], -1)[None]
    with models.layer_masks(model, found):
        return models.logits(model, new, positions=positions, cache=cache, last=last)
