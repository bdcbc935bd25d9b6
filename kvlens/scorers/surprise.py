"""`surprise`, `surprise_fast`: tokens that the cached future does not predict are kept.

1. Carried beside the cache, slot by slot: token ids, and for `surprise_fast` the states that entered the last block.
2. When an eviction is due, one pass over what is held, each row seeing later rows alone (`observables/surprise.py`);
   the score is minus the logit of the token that stands there. The whole model runs, or the last block without MLP.
3. The last min_gap + 1 tokens have no future: NaN, not judged yet, so they stay.

All layers and heads keep the same tokens (`reduce: all`). `variant` adds words: `logprob`, `no_self`, `skip_mlp`,
`gap=N`, `past`. Units longer than a token need the text, which a decoder does not have.

Source: counter-causal surprise, arXiv 2607.27600.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables.surprise_variant import Variant, read_variant
from kvlens.scorers.interface import HIDDEN, IDS, Facts, Kept, Plain, Seen, Views

Words = Annotated[str, Field(max_length=200)]


@dataclass(frozen=True)
class Carried:
    """Ids (int32) and, for a pass that starts late, states of every slot, empty ones too; None before the first."""

    ids: Int[Tensor, "batch slots"] | None = None
    states: Float[Tensor, "batch slots d_model"] | None = None

    def select(self, kept: Kept) -> Carried:
        """The slots that stayed."""
        if self.ids is None:
            return self
        index = kept.index[0][:, 0]
        states = self.states
        if states is not None:
            states = states.gather(1, index.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))
        return Carried(self.ids.gather(1, index), states)


@dataclass(frozen=True)
class Surprise(Plain):
    """The whole model runs over the cache."""

    variant: Words = ""

    base = "full"
    together = True

    def __post_init__(self) -> None:
        if self.second_pass.unit is not None:
            raise InputError(
                f"scorer parameter variant '{self.variant}': units of text are not known while a model generates",
                "score tokens: leave sentence and clause out",
            )

    @property
    def second_pass(self) -> Variant:  # type: ignore[override]
        """What runs, and what is read off it."""
        return read_variant(f"{self.base},{self.variant}" if self.variant else self.base)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Ids, and states where the pass starts late."""
        return frozenset({IDS} if self.second_pass.layers is None else {IDS, HIDDEN})

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """The block before the pass's first; none where that is the model's first."""
        before = facts.n_layers - (self.second_pass.layers or facts.n_layers) - 1
        return () if before < 0 else (before,)

    def init(self, facts: Facts) -> Carried:
        """Nothing seen."""
        return Carried()

    def observe(self, state: Carried, seen: Seen) -> Carried:
        """1. for the new tokens, padding included, so that rows stand where slots do."""
        if seen.ids is None:
            raise InputError("a scorer that reads token ids was shown none")
        ids, states = seen.ids.to(torch.int32), next(iter(seen.hidden.values()), None)
        if state.ids is None:
            return Carried(ids, states)
        if state.states is not None and states is not None:
            states = torch.cat([state.states, states], 1)
        return replace(state, ids=torch.cat([state.ids, ids], 1), states=states)

    def score(self, state: Carried, views: Views) -> Float[Tensor, "batch one kept"]:
        """2. and 3."""
        if views.reread is None or state.ids is None:
            return views.positions.new_full(views.positions.shape, torch.nan, dtype=torch.float32)
        return views.reread(state.ids, state.states)


@dataclass(frozen=True)
class SurpriseFast(Surprise):
    """The last block alone, its MLP skipped, from the states that entered it."""

    base = "fast"
