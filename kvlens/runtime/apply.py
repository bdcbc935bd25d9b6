"""How does an ordinary `model.generate(...)` keep to a policy?

Within `with apply(policy, model) as run:` every forward pass of the model goes through these steps:

1. The cache it came with, if empty, is adopted: full-attention layers become evicting ones (cache.py).
2. The new tokens get their positions. Once a slot has left, managed layers get masks of their own (attention.py).
3. The model runs; blocks that the scorer named hand over their output.
4. The scorer observes the new tokens.
5. If the trigger says so and more slots are held than the budget allows, tokens leave (refresh.py).

Hooks on the model's own modules are all there is: nothing is patched, and leaving takes them away, after exceptions
too. Runs nest; the innermost one adopts a new cache, and a cache goes on under the run that adopted it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from kvlens import forward
from kvlens.attention import around_attention
from kvlens.causal_lm import Model
from kvlens.errors import InputError, ModelRefused
from kvlens.observables.attention_weights import Rule
from kvlens.policy import Policy
from kvlens.policy_file import check_model, read_policy
from kvlens.runtime import attention, budget, report, saved, takeover
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.call import Pass, by_name, cache_of, check_rows, inputs_of, looked_over, new_positions
from kvlens.runtime.ragged import RaggedLayer, attend
from kvlens.runtime.received import received
from kvlens.runtime.refresh import Means, refresh
from kvlens.runtime.reread import second_pass
from kvlens.runtime.rotary import rotations
from kvlens.runtime.varlen import kernel_of
from kvlens.scorers.interface import (
    HIDDEN,
    IDS,
    KEYS,
    NOTES,
    QUERIES,
    RECEIVED,
    ROTATION,
    SPREAD,
    VALUES,
    Asked,
    Facts,
    Seen,
)


class Run:
    """A policy at work on a model. `cache` is the last one it worked on, which may be given to the next generate."""

    def __init__(self, policy: Policy, model: Model, *, record: bool = True) -> None:
        self.policy, self.model = policy, model
        self.scorer = policy.scorer.make()
        self.layers = tuple(i for i, window in enumerate(model.sliding) if window is None)
        if not self.layers:
            raise ModelRefused(
                f"{model.name}: every layer slides and forgets by itself, there is nothing for a policy to evict",
                "use a model with full-attention layers",
            )
        self.facts = Facts(model.n_layers, model.n_heads, model.n_kv_heads, model.d_head, self.layers)
        self.scorer.init(self.facts)  # a scorer that cannot score this model says so before anything is hooked
        turns = rotations(model, self.layers) if ROTATION in self.scorer.needs else {}
        self.means = Means({}, second_pass(model, self.scorer.second_pass), turns)
        self.kernel = kernel_of(model) if policy.storage == "ragged" else None
        self.tokens = budget.fixed_tokens(policy, model, self.layers)
        self.log = report.Log(record=record)
        self.cache: Cache | None = None
        self.active = False
        self._passes: dict[int, Pass] = {}  # by thread
        budget.check_table(policy, model)

    def events(self) -> pd.DataFrame:
        """What left, when, from where and with which score; the columns of CONTRACTS' events.parquet and `row`."""
        return self.log.events()

    def report(self) -> report.Report:
        """Evictions, tokens and bytes held, ties, and the time that scoring and evicting took."""
        return report.of(self)

    def save(self, path: str | Path) -> None:
        """Nothing; the last cache is in the file `path`, safetensors, the scorer's state included."""
        if self.cache is None:
            raise InputError("no forward pass has gone through this run yet", "generate first, then save its cache")
        saved.save(self, self.cache, path)

    def load(self, path: str | Path) -> Cache:
        """The cache of such a file, ready for `generate(..., past_key_values=cache)` under this run."""
        return saved.load(self, path)

    @property
    def _pass(self) -> Pass | None:
        """The forward pass under way in this thread."""
        return self._passes.get(get_ident())

    def _abandon(self) -> None:
        """A pass that never came to its end (Ctrl-C tells no hook) leaves a cache that is not whole."""
        if (left := self._passes.pop(get_ident(), None)) is not None:
            left.ledger.driven, left.ledger.broken = False, True

    def close(self) -> None:
        """Nothing; the policy works no more."""
        self.active = False
        self._abandon()

    # 1. and 2.

    def before(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What runs before the model: the cache is adopted, the new tokens get positions."""
        self._abandon()
        args, kwargs = by_name(decoder, args, kwargs)
        name, cache = cache_of(decoder, kwargs)
        uses = kwargs.get("use_cache")
        if cache is None and not (decoder.config.use_cache if uses is None else uses):
            return None
        if cache is None:
            cache = DynamicCache(config=decoder.config)
            kwargs = kwargs | {name: cache}
        ledger = ledger_of(cache) if isinstance(cache, Cache) else None
        if ledger is not None and takeover.is_anothers(self, cache, ledger):
            return args, kwargs
        inputs = inputs_of(args, kwargs, self.policy.scorer.name if IDS in self.scorer.needs else None)
        batch, n_new = inputs.shape[:2]
        if ledger is None:
            ledger = takeover.begin(self, cache, batch)
        check_rows(ledger, batch)
        mask = kwargs.get("attention_mask")
        positions, own = new_positions(ledger, mask, n_new)
        layers = [cache.layers[index] for index in self.layers]
        evicted = ledger.lost
        if evicted and isinstance(mask, Tensor) and mask.ndim == 4:
            attention.check_given_mask(mask, ledger, layers[0].n_held + n_new)
            evicted = False  # it covers what is held, and every layer holds the same
        if evicted:
            attention.check_past(mask, ledger, layers[0].n_seen, n_new)
        ledger.driven, ledger.own = True, own
        ids = inputs if IDS in self.scorer.needs else None
        self.cache, self._passes[get_ident()] = cache, Pass(ledger, cache, positions, own, evicted, ids=ids)
        return args, kwargs

    def see_layer(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What runs before each managed attention layer: its mask, once a slot has left."""
        now = self._pass
        if now is None or not now.evicted or isinstance(now.cache.layers[layer], RaggedLayer):
            return None
        key = 0 if len(now.ledger.sets) == 1 else layer
        if key not in now.masks:
            now.masks[key] = attention.layer_mask(self.model, now.ledger, layer, now.n_new, now.own)
        return args, attention.with_mask(module, args, kwargs, now.masks[key])

    # 3.

    def see_block(self, block: int, _: nn.Module, __: Any, output: Any) -> None:
        """What runs after a block that the scorer named."""
        if self._pass is not None:
            self._pass.hidden[block] = output[0] if isinstance(output, tuple) else output

    def attend(
        self, layer: int, own: Callable[[], Tensor], query: Tensor, key: Tensor, _: Tensor, keywords: Mapping[str, Any]
    ) -> Tensor:
        """What runs as attention where that is needed: queries are noted, ragged heads attend one by one."""
        now = self._pass
        if now is None or layer not in self.layers:
            return own()
        held = now.cache.layers[layer]
        output = attend(held, query, keywords, now.own, self.kernel) if isinstance(held, RaggedLayer) else own()
        started = perf_counter()
        rule = self.means.rules[layer] = Rule.of_call(query, None, keywords)
        if QUERIES in self.scorer.needs:
            now.queries[layer] = query[:, :, max(0, query.shape[2] - self.scorer.n_queries) :].clone()
        if self.scorer.needs & {RECEIVED, SPREAD}:
            before = now.ledger.set_of(layer) if now.ledger.sets else None
            asked = query[:, :, -(self.scorer.n_received or now.n_new) :]
            found = received(held, asked, rule, before, now.positions, spread=SPREAD in self.scorer.needs)
            now.received[layer] = found[0]
            if found[1] is not None:
                now.spread[layer] = found[1]
        if NOTES in self.scorer.needs:
            new = key[:, :, key.shape[2] - now.n_new :]
            these = Asked(layer, now.positions, query, new, rule, self.means.rotations.get(layer))
            now.notes[layer] = self.scorer.note(now.ledger.state, these)
        self.log.scored(perf_counter() - started)
        return output

    # 4. and 5.

    def after(self, _: nn.Module, __: Any, output: Any) -> None:
        """What runs after the model: the scorer observes, slots leave."""
        now = self._passes.pop(get_ident(), None)
        if now is None:
            return
        now.ledger.driven, now.ledger.own = False, None
        if output is None:  # the model raised, and its layers may hold different tokens
            now.ledger.broken = True
            return
        now.ledger.broken = True
        with torch.no_grad():
            self._take_in(now)
            takeover.check_whole(now.cache, now.ledger)
            n_before = self._most_held(now.cache)
            if self._due(now):
                mean = budget.nominal(self.policy, self.tokens, now.ledger.n_prompt, self.layers)
                refresh(self.policy, now.cache, now.ledger, mean, self.log, self.means)
            elif now.ledger.in_prompt:  # rather than at the first eviction, in the middle of a text
                budget.check_prompt(self.policy, self.tokens, now.ledger.n_prompt, self.layers)
        now.ledger.broken = False
        now.ledger.step += 1
        self.log.hold(n_before, self._most_held(now.cache))

    def _most_held(self, cache: Cache) -> int:
        return max(cache.layers[index].n_held for index in self.layers)

    def _take_in(self, now: Pass) -> None:
        """4. One token by itself is decoded, also at the end of a prompt in chunks: choose chunks that leave none."""
        ledger, first = now.ledger, not now.ledger.sets
        ledger.in_prompt &= first or now.n_new > 1
        ledger.append(now.positions, padded=now.own is not None)
        ledger.n_own = now.positions.max(-1).values.add(1).maximum(ledger.n_own)
        if ledger.in_prompt:
            ledger.n_prompt = ledger.n_own
        started = perf_counter()
        new = {KEYS: {}, VALUES: {}}  # type: ignore[var-annotated]
        for name in self.scorer.needs & {KEYS, VALUES}:
            new[name] = {index: getattr(now.cache.layers[index], f"new_{name}") for index in self.layers}
        hidden = now.hidden if HIDDEN in self.scorer.needs else {}
        states = new[KEYS], new[VALUES], hidden, now.queries, now.received, now.spread
        seen = Seen(now.positions, ledger.in_prompt, *states, now.ids, now.notes)
        ledger.state = self.scorer.observe(ledger.state, seen)
        for index in self.layers:
            now.cache.layers[index].forget_new()
        self.log.scored(perf_counter() - started)

    def _due(self, now: Pass) -> bool:
        """Whether the trigger asks for an eviction after this pass."""
        ledger = now.ledger
        if self.policy.every is None:
            return ledger.in_prompt or now.n_new > 1
        ledger.since += now.n_new
        due = ledger.since >= self.policy.every
        ledger.since = 0 if due else ledger.since
        return due


@contextmanager
def apply(
    policy: Policy | str | Path, model: Any, *, record: bool = True, allow_mismatch: bool = False
) -> Iterator[Run]:
    """Within it the model generates under the policy; `model` is a kvlens Model or one of transformers.

    Args:
        policy: a policy, or the path of a policy file.
        record: keep what `run.events()` tells, about 16 bytes for each token and set of layers it left.
        allow_mismatch: take a policy file that was made for a model of another architecture.

    Threads may generate at once, each with a cache of its own; enter and leave while no other one uses the model.

    Raises: ModelRefused for a model without full-attention layers or with layers that hold no keys and values;
        InputError for a file that is no policy or one of another architecture and, at the forward pass, for a cache or
        a prompt that the policy cannot work with.
    """
    policy = policy if isinstance(policy, Policy) else read_policy(policy)
    with ExitStack() as stack:
        wrapped = model if isinstance(model, Model) else stack.enter_context(looked_over(model))
        if not allow_mismatch:
            check_model(policy, wrapped)
        run = Run(policy, wrapped, record=record)
        decoder, layers = wrapped.decoder, wrapped.layers

        def undo(handle: Any) -> Callable[[], None]:
            return handle.remove

        stack.callback(run.close)
        run.active = True
        stack.callback(undo(decoder.register_forward_pre_hook(run.before, with_kwargs=True, prepend=True)))
        for index in run.layers:
            hook = partial(run.see_layer, index)
            stack.callback(undo(layers[index].register_forward_pre_hook(hook, with_kwargs=True)))
        blocks = forward.blocks(wrapped) if HIDDEN in run.scorer.needs else []
        for block in sorted(set(run.scorer.hidden_layers(run.facts))):
            stack.callback(undo(blocks[block].register_forward_hook(partial(run.see_block, block))))
        stack.callback(undo(decoder.register_forward_hook(run.after, always_call=True)))
        if policy.storage == "ragged" or run.scorer.needs & {QUERIES, RECEIVED, SPREAD, NOTES}:
            stack.enter_context(around_attention(wrapped, run.attend))
        yield run
