"""What is a scorer? A frozen value that holds its parameters, and a state that whoever decodes carries along.

1. `init(facts)` gives the state before the first token.
2. `observe(state, seen)` takes in the new tokens of one forward pass, prompt chunk or decoded token alike.
3. `score(state, views)` says what the tokens still held are worth, [batch, kv_head or 1, kept], float32 or wider,
   higher = keep. NaN means "not judged yet": such a token is kept before every token that has a score.
4. `state.select(kept)` follows an eviction: what the state remembers of tokens that no layer holds any more, goes.

A scorer sees what it says it `needs` and nothing else. A state is a frozen dataclass of tensors (None before the first
token), numbers, and tuples and dataclasses of those; every tensor in it has the batch in front. So its bytes can be
counted, its rows reordered and its tensors saved without the scorer's help, and nothing is left on a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from pydantic import BeforeValidator, Field
from torch import Tensor

from kvlens.observables.attention_weights import Rule
from kvlens.observables.rotation import Rotation
from kvlens.observables.surprise_variant import Variant

KEYS, VALUES, HIDDEN, QUERIES, IDS, RECEIVED = "keys", "values", "hidden", "queries", "ids", "received"
SPREAD, NOTES, ROTATION = "spread", "notes", "rotation"
EMPTY = -1  # the position of a slot without a token: padding, or the filling of a row or head that keeps fewer
State = TypeVar("State")
# What parameters are of; `table.make` holds them to it.
Window = Annotated[int, Field(ge=1, le=1_000_000)]
Depth = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
AS_TUPLE = BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)  # JSON has no tuples
# (ids, the states that entered the pass's first block) -> what the scorer's second pass says of the slots shown
Reread = Callable[[Int[Tensor, "batch tokens"], Float[Tensor, "batch tokens d_model"] | None], Tensor]


@dataclass(frozen=True)
class Repeat:
    """A second pass that repeats the whole text over the cache: which words it starts with, how many tokens at once."""

    prompt: str
    chunk: int


@dataclass(frozen=True)
class Facts:
    """What a scorer may know of the model. `layers` are the managed ones: those with full attention."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """What the new tokens attend with in one layer, as attention takes it; `rotation` is there for who needs it."""

    layer: int
    positions: Int[Tensor, "batch new"]
    queries: Float[Tensor, "batch head new d_head"]
    keys: Float[Tensor, "batch kv_head new d_head"]
    rule: Rule
    rotation: Rotation | None = None


@dataclass(frozen=True)
class Seen:
    """The new tokens of one forward pass.

    `positions` count a row's own tokens from 0; -1 is padding. `keys`, `values` (as stored), `hidden` (the residual
    stream after a block), `queries` (rotated, of the last `n_queries` new tokens) and `received` (the attention weights
    that the new tokens, or the last `n_received` of them, gave each slot of the layer, their own included: summed over
    queries, mean over the heads that share a KV head; NaN for an empty slot) are by layer; a scorer finds there what it
    needs, and of hidden states the layers it names. `spread` is by layer too, the mean over its heads of what each new
    token's weights look like: the share of visible keys that got less than a hundredth of the largest weight, and the
    entropy in nats; NaN for padding. `ids` are None where nobody needs them. `notes` are what the scorer's own `note`
    made of a layer.
    """

    positions: Int[Tensor, "batch new"]
    in_prompt: bool
    keys: Mapping[int, Float[Tensor, "batch kv_head new d_head"]] = field(default_factory=dict)
    values: Mapping[int, Float[Tensor, "batch kv_head new d_head"]] = field(default_factory=dict)
    hidden: Mapping[int, Float[Tensor, "batch new d_model"]] = field(default_factory=dict)
    queries: Mapping[int, Float[Tensor, "batch head last d_head"]] = field(default_factory=dict)
    received: Mapping[int, Float[Tensor, "batch kv_head slots"]] = field(default_factory=dict)
    spread: Mapping[int, Float[Tensor, "batch 2 new"]] = field(default_factory=dict)
    ids: Int[Tensor, "batch new"] | None = None
    notes: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Views:
    """The slots of one layer that are to be scored, in the order of their positions; position -1 is an empty slot.

    `rows` and `kv_heads` say which part of the batch and of the heads they are: all, or one where heads hold different
    numbers of tokens. `rule` is how the layer turns queries and keys into weights, `rotation` how their position turns
    them, for scorers that need these; `reread` runs the scorer's `second_pass`: [batch, heads, kept], NaN where there
    is no score. `keys_of` gives the keys of another layer, in the same slots for a scorer whose tokens are kept
    `together`.
    """

    layer: int
    positions: Int[Tensor, "batch heads kept"]
    keys: Float[Tensor, "batch kv_head kept d_head"]
    values: Float[Tensor, "batch kv_head kept d_head"]
    rows: slice = field(default_factory=lambda: slice(None))
    kv_heads: slice = field(default_factory=lambda: slice(None))
    rule: Rule | None = None
    reread: Reread | None = None
    keys_of: Callable[[int], Float[Tensor, "batch kv_head kept d_head"]] | None = None
    rotation: Rotation | None = None


@dataclass(frozen=True)
class Kept:
    """What is left after an eviction, for each set of tokens kept together: one for all managed layers, or one a layer.

    `positions` are those held (-1: filling), `index` says in which slots they stood before, `scores` what those slots
    were worth when it was decided (by slot before the eviction).
    """

    positions: Sequence[Int[Tensor, "batch heads _"]]
    index: Sequence[Int[Tensor, "batch heads _"]] = ()
    scores: Sequence[Float[Tensor, "batch heads _"]] = ()


@runtime_checkable
class Scorer(Protocol):
    """A method; its dataclass fields are its parameters."""

    @property
    def needs(self) -> frozenset[str]:
        """Of `keys`, `values`, `hidden`, `queries`, `ids`, `received`, `spread`, `notes`, `rotation`, what it reads."""

    @property
    def n_queries(self) -> int:
        """Of how many of the last new tokens `observe` reads the queries."""

    @property
    def n_received(self) -> int | None:
        """Of how many of the last new tokens `received` holds the weights; None: of all."""

    @property
    def per_layer(self) -> bool:
        """Whether a token is worth different things in different layers."""

    @property
    def second_pass(self) -> Variant | Repeat | None:
        """The pass over the cache that `score` runs; the tokens of a `Variant` are kept `together`."""

    @property
    def together(self) -> bool:
        """Whether all layers and heads must keep the same tokens (`reduce: all`), since the score is one for all."""

    @property
    def offline(self) -> bool:
        """Whether it knows what no decoder can know, so that it is no policy to export."""

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """The blocks whose output `observe` reads."""

    def init(self, facts: Facts) -> Any:
        """The state before the first token."""

    def note(self, state: Any, asked: Asked) -> tuple[Tensor, ...]:
        """What `observe` wants of one layer's queries, made while that layer attends, so that no layer's are kept."""

    def observe(self, state: Any, seen: Seen) -> Any:
        """The state after these tokens."""

    def score(self, state: Any, views: Views) -> Float[Tensor, "batch heads kept"]:
        """What each slot is worth; what it says of an empty slot does not count."""


class Plain:
    """What most scorers say: no need of anything, no state, the same worth in every layer."""

    needs: frozenset[str] = frozenset()
    n_queries = 0
    n_received: int | None = None
    per_layer = False
    second_pass: Variant | Repeat | None = None
    together = False
    offline = False

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """None."""
        return ()

    def init(self, facts: Facts) -> Any:
        """No state."""
        return None

    def note(self, state: Any, asked: Asked) -> tuple[Tensor, ...]:
        """Nothing."""
        return ()

    def observe(self, state: Any, seen: Seen) -> Any:
        """The state as it is."""
        return state


# States, whatever scorer they are of


def tensors(state: Any, name: str = "state") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with the path that leads to it."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, tuple):
        for number, part in enumerate(state):
            yield from tensors(part, f"{name}.{number}")
    elif is_dataclass(state):
        for part in fields(state):
            yield from tensors(getattr(state, part.name), f"{name}.{part.name}")


def mapped(state: State, change: Callable[[str, Any], Any], name: str = "state") -> State:
    """The same state with `change(path, leaf)` in place of every leaf."""
    if is_dataclass(state) and not isinstance(state, type):
        parts = {p.name: mapped(getattr(state, p.name), change, f"{name}.{p.name}") for p in fields(state)}
        return replace(state, **parts)
    if isinstance(state, tuple):
        return tuple(mapped(part, change, f"{name}.{i}") for i, part in enumerate(state))  # type: ignore[return-value]
    return change(name, state)  # type: ignore[no-any-return]


def rows_of(state: State, index: Int[Tensor, " rows"]) -> State:
    """The state of these rows of the batch, in this order."""
    return mapped(state, lambda _, leaf: leaf.index_select(0, index) if isinstance(leaf, Tensor) else leaf)


def select(state: State, kept: Kept) -> State:
    """The state after an eviction; a state that remembers nothing of single tokens has no `select` and stays."""
    follow = getattr(state, "select", None)
    return state if follow is None else follow(kept)
