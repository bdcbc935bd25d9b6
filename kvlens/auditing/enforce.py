"""What is a method worth that only marks what it drops, once the marked slots really leave? In three shapes of storage.

1. The press runs as it ships; what it marked, and how it ranked the slots of every head, is noted.
2. kvlens' runtime evicts on a cache of its own, after a prefill of its own: per head as many slots as the press left
   unmarked, those. (A head with none left keeps its best one: there is no attention over nothing.) `ragged` stores each
   head's own number (deleting what was masked changes no logit), `padded` makes every head of a layer as wide as its
   widest, `uniform_cap` cuts each head to the mean number, lowest ranked first. The claim is the press' own, and the
   positions that the runtime keeps beside the slots.

Peak bytes are those of both, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.auditing.methods import Held, PolicyMethod
from kvlens.auditing.press_hooks import full_layers
from kvlens.auditing.presses import PressMethod, claimed_bytes, visible
from kvlens.model import Model
from kvlens.policy import Allocate, Budget, Policy, Protect, ScorerChoice
from kvlens.scorers.interface import Plain, Scorer, Views

SHAPES: tuple[Literal["ragged", "padded", "uniform_cap"], ...] = ("ragged", "padded", "uniform_cap")


@dataclass(frozen=True, eq=False)
class Given(Plain):
    """What was decided elsewhere, for every layer, KV head and position."""

    worth: Float[Tensor, "layer kv_head pos"]

    per_layer = True

    def score(self, _: None, views: Views) -> Float[Tensor, "batch kv_head kept"]:
        """The worth of every slot."""
        worth = self.worth[views.layer, views.kv_heads]
        place = views.positions.clamp(min=0).long().expand(-1, len(worth), -1)
        return worth.expand(place.shape[0], -1, -1).gather(-1, place)


class GivenChoice(ScorerChoice):
    """A choice of a scorer that is at hand."""

    made: Any = None

    def make(self) -> Scorer:
        """The scorer itself."""
        found: Scorer = self.made
        return found


@dataclass(frozen=True)
class Enforced:
    """A press that marks, with what it marked evicted."""

    press: PressMethod
    storage: Literal["ragged", "padded", "uniform_cap"]
    source: str = "press"

    @property
    def name(self) -> str:
        """The press' name, and the shape of storage."""
        return f"{self.press.name}+{self.storage}"

    @contextmanager
    def compressed(self, model: Model, ids: Int[Tensor, "1 seen"]) -> Iterator[Held]:
        """The evicted cache, under kvlens' runtime."""
        counts, worth, claimed = self._decided(model, ids)
        policy = Policy(
            scorer=GivenChoice(name="given", made=Given(worth)),
            budget=Budget(tokens=int(counts.max())),
            protect=Protect(sinks=0, recent=0),
            trigger="prefill",
            reduce="head",
            storage=self.storage,
            allocate=Allocate(name="table", table=tuple(map(tuple, counts.tolist()))),
        )
        with PolicyMethod(self.name, self.source, policy).compressed(model, ids) as held:
            yield replace(held, claimed_bytes=claimed + held.declared_bytes)

    def _decided(
        self, model: Model, ids: Int[Tensor, "1 seen"]
    ) -> tuple[Int[Tensor, "layer kv_head"], Float[Tensor, "layer kv_head pos"], int]:
        """1. How many slots each head keeps (1 at least), its slots' order (kept ones first), the bytes claimed."""
        n_seen = ids.shape[1]
        counts = torch.full((model.n_layers, model.n_kv_heads), n_seen)
        order = torch.zeros(model.n_layers, model.n_kv_heads, n_seen, dtype=torch.float64, device=model.device)
        with self.press.pressed(model, ids) as (press, _, worth):
            claimed = claimed_bytes(model, press.compression_ratio, n_seen)
            for layer in full_layers(model):
                seen = visible(model, layer, n_seen)
                if seen is None:
                    continue
                counts[layer] = seen.sum(-1).clamp(min=1).cpu()
                best_first = worth[layer][0].float().sort(dim=-1, descending=True, stable=True).indices
                rank = best_first.argsort(-1).to(order)
                order[layer] = n_seen * seen - rank
        return counts, order, claimed
