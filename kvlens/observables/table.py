"""Which signals are there, and what does each need? One row a signal; a new one is one file and one row here.

1. A row names what its `step` takes: an input that a forward pass gives, or the values of a row before it.
2. `needs` follows that down to what has to be captured: `hidden` (residual stream after each block), `keys_values`,
   `attention` (weights, recomputed blockwise), `logits`, `ids` (token ids of the run's traces).
3. `causal` says whether a token's value is known as soon as the token is: if not, it depends on tokens that come later.
4. Rows `ON_REQUEST` are not among `all`: each takes a second pass of its own.
5. `choose` turns what a user asked for into rows, in the order of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables import (
    age,
    attention_entropy,
    attention_mass,
    hidden_change,
    lag,
    lag_causal,
    log_frequency,
    norm,
    rolling,
    surprisal,
    variance,
)

ALL = "all"
# Of a trace or a piece of it; what a row with `per_layer` takes is of one layer, or has the layers in front.
NEEDS = {
    "hidden": "hidden",  # [pos, d_model]
    "keys": "keys_values",  # [kv_head, pos, d_head], as the cache holds them
    "values": "keys_values",
    "weights": "attention",  # [head, query, key]
    "logits": "logits",  # [pos, d_vocab]
    "ids": "ids",  # [pos]
    "counts": "ids",  # [pos]: how often each token's id stands in all traces of the run
    "full_pass": "full_pass",  # [pos]: scores of a pass over the cache, NaN where there is none
    "fast_pass": "fast_pass",
}


@dataclass(frozen=True)
class Signal:
    """One signal: its name, what it takes, and its functions.

    `step(state, *chunks)` gives the values that are known now; `finish(state)` the rest, where some come late.
    """

    name: str
    takes: tuple[str, ...]
    per_layer: bool
    causal: bool
    init: Callable[[], Any]
    step: Callable[..., tuple[Any, Tensor]]
    finish: Callable[[Any], Tensor] | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What a forward pass must capture for it."""
        found = [{NEEDS[name]} if name in NEEDS else BY_NAME[name].needs for name in self.takes]
        return frozenset().union(*found)

    def whole(self, *chunks: Tensor) -> Tensor:
        """The values of a whole trace, [pos] (or with the layers in front, as what it takes)."""
        state, values = self.step(self.init(), *chunks)
        return values if self.finish is None else torch.cat([values, self.finish(state)], -1)


def _nothing() -> None:
    """No state."""


def _as_given(_: None, values: Tensor) -> tuple[None, Tensor]:
    """What a pass has found already."""
    return None, values


HIDDEN, KEYS, VALUES, BOTH, WEIGHTS = ("hidden",), ("keys",), ("values",), ("keys", "values"), ("weights",)
CHANGE = ("hidden_change",)
# name, takes, per layer, causal, functions
TABLE = (
    Signal("hidden_change", HIDDEN, True, True, hidden_change.init, hidden_change.step),
    Signal("hidden_change_rolling", CHANGE, True, True, rolling.init, rolling.mean),
    Signal("hidden_change_z", CHANGE, True, True, rolling.init, rolling.zscore),
    Signal("key_var", KEYS, True, True, variance.init, variance.step),
    Signal("value_var", VALUES, True, True, variance.init, variance.step),
    Signal("key_norm", KEYS, True, True, norm.init, norm.step),
    Signal("value_norm", VALUES, True, True, norm.init, norm.step),
    Signal("attention_mass", WEIGHTS, True, False, attention_mass.init, attention_mass.step, attention_mass.finish),
    Signal("attention_entropy", WEIGHTS, True, True, attention_entropy.init, attention_entropy.step),
    Signal("lag", BOTH, True, False, lag.init, lag.step, lag.finish),
    Signal("lag_causal", BOTH, False, True, lag_causal.init, lag_causal.step),
    Signal("surprisal", ("logits", "ids"), False, True, surprisal.init, surprisal.step),
    Signal("age", ("ids",), False, False, age.init, age.step, age.finish),
    Signal("log_frequency", ("counts",), False, False, log_frequency.init, log_frequency.step),
)
ON_REQUEST = (
    Signal("surprise_full", ("full_pass",), False, False, _nothing, _as_given),
    Signal("surprise_fast", ("fast_pass",), False, False, _nothing, _as_given),
)
BY_NAME = {signal.name: signal for signal in (*TABLE, *ON_REQUEST)}


def choose(asked: str | Iterable[str] = ALL) -> tuple[Signal, ...]:
    """The rows asked for, by name, by comma-separated names or `all` (the rows of TABLE), in the table's order.

    Raises: InputError for a name that is no signal's, with the names nearest to it.
    """
    names = asked.split(",") if isinstance(asked, str) else list(asked) if isinstance(asked, Iterable) else [asked]
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"signals {asked!r:.80} are no names", f"name some of {', '.join(BY_NAME)}, or {ALL}")
    wanted = [name.strip() for name in names]
    for name in wanted:
        if name != ALL and name not in BY_NAME:
            near = get_close_matches(name, BY_NAME, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the signals are {', '.join(BY_NAME)}"
            raise InputError(f"there is no signal {name!r}", hint)
    if not wanted:
        raise InputError("no signal was asked for", f"name some of {', '.join(BY_NAME)}, or {ALL}")
    asked_for = {*wanted, *(row.name for row in TABLE if ALL in wanted)}
    return tuple(row for name, row in BY_NAME.items() if name in asked_for)


def with_sources(signals: Sequence[Signal]) -> tuple[Signal, ...]:
    """These rows and the rows whose values they take, each before what takes it."""
    rows = BY_NAME | {signal.name: signal for signal in signals}
    found: dict[str, Signal] = {}

    def add(signal: Signal) -> None:
        for name in signal.takes:
            if name in rows:
                add(rows[name])
        found[signal.name] = signal

    for signal in signals:
        add(signal)
    return tuple(found.values())


def read(signals: Sequence[Signal], chunks: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """By name, the values of every signal that these inputs are enough for, over one trace's chunks in their order.

    A chunk is the inputs by name for some new tokens; a whole trace may be one chunk.
    """
    states: dict[str, Any] = {}
    parts: dict[str, list[Tensor]] = {}
    for chunk in chunks:
        known = dict(chunk)
        for signal in signals:
            if all(name in known for name in signal.takes):
                state = states[signal.name] if signal.name in states else signal.init()
                states[signal.name], values = signal.step(state, *(known[name] for name in signal.takes))
                known[signal.name] = values
                parts.setdefault(signal.name, []).append(values)
    for signal in signals:
        if signal.name in states and signal.finish is not None:
            parts[signal.name].append(signal.finish(states[signal.name]))
    return {name: torch.cat(values, -1) for name, values in parts.items()}
