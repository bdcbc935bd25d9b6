"""What is audited? Ways to compress a cache, each with what it claims; here those of kvlens itself.

1. A `Method` takes a model and the tokens seen so far, and inside its `compressed` block offers a `Held`: the cache it
   left, what else it keeps, what it claims to hold, and a way to predict over it.
2. `Full` keeps everything: the reference of every other row.
3. `PolicyMethod` puts a policy on the model as `kvlens.apply` does. Its claim is what the policy says (`budget`, or the
   mean of `allocate.table`) in keys and values, and the state that its scorer declares (claims.py). It evicts once,
   when all of the context is seen, whatever trigger the policy names: so do all methods of an audit.
4. `undecided` says so where its scores decided nothing: tokens that are not judged yet stay first, and on a short text
   they can fill the budget alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import model as models
from kvlens.auditing.claims import declared_bytes
from kvlens.linear import fast_linear
from kvlens.model import Model
from kvlens.policy import Policy
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.cache import HeldLayer, all_tensors, ledger_of
from kvlens.scorers.interface import EMPTY

AS_SHIPPED = "as shipped"


@dataclass
class Held:
    """What a method left: `keys_values` are the cache's tensors, `state` all else it keeps."""

    keys_values: Sequence[Tensor]
    state: Sequence[Tensor]
    claimed_bytes: int  # keys and values, and the state that is declared
    declared_bytes: int  # that state alone
    kept_tokens: int  # pairs of key and value that attention sees, over all layers and KV heads
    # (new tokens, n) -> logits of the last n of them
    predict: Callable[[Int[Tensor, "1 new"], int], Float[Tensor, "1 _ d_vocab"]]
    note: str = ""  # what a reader of its numbers must know


@runtime_checkable
class Method(Protocol):
    """One row of an audit."""

    @property
    def name(self) -> str:
        """What it is called, once in an audit."""

    @property
    def source(self) -> str:
        """Where it is from: scorer, policy or press; none for the full cache."""

    @property
    def storage(self) -> str:
        """The shape of its storage."""

    def compressed(self, model: Model, ids: Int[Tensor, "1 seen"]) -> AbstractContextManager[Held]:
        """A block that offers the `Held` of a cache which saw these tokens; afterwards the model is as it was."""


@dataclass(frozen=True)
class Full:
    """Every key and value."""

    name: str = "full"
    source: str = "none"
    storage: str = AS_SHIPPED

    @contextmanager
    def compressed(self, model: Model, ids: Int[Tensor, "1 seen"]) -> Iterator[Held]:
        """The cache of a plain prefill."""
        cache = models.new_cache(model)
        prefill(model, ids, cache)
        held = [part for pair in models.cache_layers(cache) for part in pair]
        n_bytes = sum(part.untyped_storage().nbytes() for part in held)
        kept = model.n_layers * model.n_kv_heads * ids.shape[1]
        yield Held(held, (), n_bytes, 0, kept, partial(_predict, model, cache))


@dataclass(frozen=True)
class PolicyMethod:
    """A policy of kvlens under its own runtime."""

    name: str
    source: str
    policy: Policy

    @property
    def storage(self) -> str:
        """As the policy says."""
        return self.policy.storage

    @contextmanager
    def compressed(self, model: Model, ids: Int[Tensor, "1 seen"]) -> Iterator[Held]:
        """The cache that the policy leaves at the end of the prompt."""
        once = self.policy.model_copy(update={"trigger": f"every:{ids.shape[1]}"})  # not again after the target
        with apply(once, model, record=False) as run:
            cache = models.new_cache(model)
            prefill(model, ids, cache)
            managed = [layer for layer in cache.layers if isinstance(layer, HeldLayer)]
            plain = [layer for layer in cache.layers if not isinstance(layer, HeldLayer)]
            ledger = ledger_of(cache)
            keys_values = [part for layer in cache.layers for part in (layer.keys, layer.values)]
            beside = [tensor for _, tensor in all_tensors(cache)]
            slides = sum(part.untyped_storage().nbytes() for layer in plain for part in (layer.keys, layer.values))
            declared = declared_bytes(self.policy, model, ids, run.facts, [] if ledger is None else ledger.sets)
            claimed = run.report().claimed_bytes + declared + slides
            positions = [] if ledger is None else [ledger.set_of(layer.index) for layer in managed]
            kept = (
                sum(
                    int((held != EMPTY).sum()) * (1 if held.shape[1] == model.n_kv_heads else model.n_kv_heads)
                    for held in positions
                )
                + len(plain) * model.n_kv_heads * ids.shape[1]
            )
            predict = partial(_predict, model, cache)
            note = "" if ledger is None else undecided(run, ledger.sets, ids.shape[1])
            yield Held(keys_values, beside, claimed, declared, kept, predict, note)


# 4.


def undecided(run: Run, stays: Sequence[Int[Tensor, "1 heads _"]], n_seen: int) -> str:
    """Words for an eviction that no score decided; empty where a score did, or nothing left. `stays`: positions held.

    Cost: a look at the positions.
    """
    protect = run.policy.protection()
    n_fixed = n_seen if protect.prompt else min(n_seen, protect.sinks + protect.recent)
    n_heads = sum(positions.shape[1] for positions in stays)
    n_ranked, n_judged = n_heads * (n_seen - n_fixed), int(run.log.n_scored)
    n_places = sum(int((positions != EMPTY).sum()) for positions in stays) - n_heads * n_fixed
    if not run.log.n_evictions or n_ranked - n_judged < n_places or not n_places:
        return ""
    if not n_judged:
        return "no token judged: kept by position alone"
    return f"{1 - n_judged / n_ranked:.0%} of tokens not judged yet: they fill the budget, no score decided"


def _predict(model: Model, cache: Any, new: Int[Tensor, "1 new"], last: int) -> Float[Tensor, "1 last d_vocab"]:
    return models.logits(model, new, cache=cache, last=last)


def prefill(model: Model, ids: Int[Tensor, "1 seen"], cache: Any) -> None:
    """The tokens go through the model into the cache; nothing is predicted."""
    with torch.inference_mode(), fast_linear():
        models.hidden(model, ids, cache=cache)
