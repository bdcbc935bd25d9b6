"""`fitted`: the combination of streaming signals that was fitted to a model's own labels.

1. Every signal is what `kvlens observe` calls so, in the layer that the fit chose, computed as tokens come:
   `hidden_change`, its rolling mean and z-score, `key_var`, `value_var`, `key_norm`, `value_norm`, `lag_causal`.
2. The score is the sum of weight * (value - mean) / scale, frozen when the token is made; NaN where a signal has no
   value (the first token has no change).

The parameters are five lists of one entry a feature, so that a policy file holds the whole of it. Signals that read the
future are no streaming signals; those that need attention weights or logits are left out too, since no decoder under
FlashAttention has them.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables import hidden_change, rolling
from kvlens.observables.arithmetic import deviation, wide
from kvlens.observables.lag import CHUNK
from kvlens.scorers.frozen import Frozen
from kvlens.scorers.interface import AS_TUPLE, EMPTY, HIDDEN, KEYS, VALUES, Facts, Kept, Number, Plain, Seen, Views
from kvlens.scorers.lagkv import causal_numbers, of_the_last
from kvlens.scorers.ranges import Ranges

CHANGES = ("hidden_change", "hidden_change_rolling", "hidden_change_z")
OF_STATES = {"key_var": KEYS, "key_norm": KEYS, "value_var": VALUES, "value_norm": VALUES}
LAG = "lag_causal"
SIGNALS = (*CHANGES, *OF_STATES, LAG)

Names = Annotated[tuple[str, ...], AS_TUPLE]
Layers = Annotated[tuple[Annotated[int, Field(ge=0, lt=100_000)] | None, ...], AS_TUPLE]
Numbers = Annotated[tuple[Number, ...], AS_TUPLE]
Scales = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], AS_TUPLE]


@dataclass(frozen=True)
class Signals:
    """What the signals remember, and every held token's number."""

    ranges: Ranges
    last: hidden_change.Last = field(default_factory=hidden_change.init)
    last_position: Int[Tensor, " batch"] | None = None
    changes: rolling.Trailing = field(default_factory=rolling.init)
    key_var: rolling.Trailing = field(default_factory=rolling.init)
    value_var: rolling.Trailing = field(default_factory=rolling.init)
    frozen: Frozen = field(default_factory=Frozen)

    def select(self, kept: Kept) -> Signals:
        """After an eviction."""
        return replace(self, frozen=self.frozen.select(kept))


@dataclass(frozen=True)
class Fitted(Plain):
    """The weighted sum of standardised signals; `layers` is None for a signal without layers."""

    signals: Names = ()
    layers: Layers = ()
    means: Numbers = ()
    scales: Scales = ()
    weights: Numbers = ()

    def __post_init__(self) -> None:
        sizes = {len(part) for part in (self.signals, self.layers, self.means, self.scales, self.weights)}
        if sizes == {0}:
            raise InputError("scorer fitted: it holds no signal", "take its parameters from a fitted.json")
        if len(sizes) > 1:
            raise InputError(f"scorer fitted: lists of {sorted(sizes)} entries", "give one entry for each signal")
        for name, layer in zip(self.signals, self.layers, strict=True):
            if name not in SIGNALS:
                raise InputError(
                    f"scorer fitted: a decoder cannot compute signal {name!r:.80} as tokens come",
                    f"fit to {', '.join(SIGNALS)}",
                )
            if (layer is None) != (name == LAG):
                raise InputError(f"scorer fitted: signal {name} {'has no' if name == LAG else 'needs a'} layer")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What its signals are made of."""
        made_of = {HIDDEN for name in self.signals if name in CHANGES}
        made_of |= {OF_STATES[name] for name in self.signals if name in OF_STATES}
        return frozenset(made_of | ({KEYS, VALUES} if LAG in self.signals else set()))

    def _layers(self, *names: str) -> tuple[int, ...]:
        """The layers in which any of these signals is asked for."""
        pairs = zip(self.signals, self.layers, strict=True)
        return tuple(sorted({layer for name, layer in pairs if name in names and layer is not None}))

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """The blocks whose change is asked for."""
        return self._layers(*CHANGES)

    def init(self, facts: Facts) -> Signals:
        """Nothing seen. Raises: InputError for layers that this model does not have, or that slide."""
        for what, layers, there in (
            ("block", self._layers(*CHANGES), range(facts.n_layers)),
            ("full-attention layer", self._layers(*OF_STATES), facts.layers),
        ):
            wrong = [layer for layer in layers if layer not in there]
            if wrong:
                raise InputError(f"scorer fitted: this model has no {what} {wrong[0]}", "fit to labels of this model")
        return Signals(Ranges(CHUNK, facts.layers))

    def observe(self, state: Signals, seen: Seen) -> Signals:
        """1. and 2. for the new tokens."""
        found: dict[tuple[str, int | None], Tensor] = {}
        if self._layers(*CHANGES):
            state = self._changes(state, seen, found)
        for name, states in (("key_norm", seen.keys), ("value_norm", seen.values)):
            for place in self._layers(name):
                found[name, place] = torch.linalg.vector_norm(wide(states[place]), dim=-1).mean(1)
        state = replace(state, key_var=self._variances("key_var", state.key_var, seen.keys, seen, found))
        state = replace(state, value_var=self._variances("value_var", state.value_var, seen.values, seen, found))
        if LAG in self.signals:
            pairs = {layer: (seen.keys[layer], seen.values[layer]) for layer in state.ranges.layers}
            ranges = state.ranges.extended(seen.positions, pairs)
            found[LAG, None] = causal_numbers(ranges, seen.positions, pairs)
            state = replace(state, ranges=of_the_last(ranges))
        total = torch.zeros(seen.positions.shape, dtype=torch.float64, device=seen.positions.device)
        rows = zip(self.signals, self.layers, self.means, self.scales, self.weights, strict=True)
        for name, layer, mean, scale, weight in rows:
            total += weight * (found[name, layer].to(total.device).double() - mean) / scale
        return replace(state, frozen=state.frozen.append(seen.positions, total))

    def _changes(self, state: Signals, seen: Seen, found: dict[tuple[str, int | None], Tensor]) -> Signals:
        """The change of the residual stream, its rolling mean and z-score, of every block asked for."""
        blocks, positions = self._layers(*CHANGES), seen.positions
        hidden = torch.stack([seen.hidden[block].to(positions.device) for block in blocks], 1)
        last, changes = hidden_change.step(state.last, hidden)
        before = positions.roll(1, -1)
        before[:, 0] = EMPTY if state.last_position is None else state.last_position
        changes = changes.masked_fill(((positions == EMPTY) | (before == EMPTY))[:, None], torch.nan)
        after, means = rolling.mean(state.changes, changes)
        _, z = rolling.zscore(state.changes, changes)
        for number, block in enumerate(blocks):
            for name, values in zip(CHANGES, (changes, means, z), strict=True):
                found[name, block] = values[:, number]
        return replace(state, last=last, last_position=positions[:, -1].clone(), changes=after)

    def _variances(
        self,
        name: str,
        trailing: rolling.Trailing,
        states: Mapping[int, Float[Tensor, "batch kv_head new d_head"]],
        seen: Seen,
        found: dict[tuple[str, int | None], Tensor],
    ) -> rolling.Trailing:
        """The rolling variance of keys or values in every layer asked for."""
        layers = self._layers(name)
        if not layers:
            return trailing
        rows = [deviation(states[layer]).square().mean(1).to(seen.positions.device) for layer in layers]
        padding = (seen.positions == EMPTY)[:, None]
        trailing, means = rolling.mean(trailing, torch.stack(rows, 1).masked_fill(padding, torch.nan))
        found |= {(name, layer): means[:, number] for number, layer in enumerate(layers)}
        return trailing

    def score(self, state: Signals, views: Views) -> Float[Tensor, "batch heads kept"]:
        """The frozen number of every slot."""
        return state.frozen.look_up(views)


def parameters_of(document: Mapping[str, Any], target: Literal["ridge", "logistic"] = "ridge") -> dict[str, Any]:
    """The parameters of this scorer from what a `fitted.json` says, with the weights of one of its two fits."""
    rows = document["features"]
    names = {"signals": "signal", "layers": "layer", "means": "mean", "scales": "std", "weights": target}
    return {parameter: [row[column] for row in rows] for parameter, column in names.items()}
