"""What does an evicting cache hold? Layers that transformers' own Cache is made of, and one ledger beside them.

1. `HeldLayer` holds the kept keys and values of one layer, [batch, kv_head, kept, d_head]. It grows by blocks and is
   compacted into fresh storage when tokens leave, so that the bytes really go back. To transformers it says how many
   tokens it has *seen* (positions go on from there) and how many it *holds* (masks are that wide).
2. `Ledger` knows which token stands in which slot: absolute positions, one tensor for each set of layers that keep the
   same tokens. -1 is an empty slot: padding, or the filling of a row or head that keeps fewer than another. It also
   carries the scorer's state, and all that is moved when rows of the batch are.
3. `adopt` puts the two in place of the full-attention layers of an empty cache. All other layers stay.

A cache that was evicted from goes on only inside `apply`, where its masks are made; elsewhere it says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvlens.causal_lm import Model
from kvlens.errors import InputError, ModelRefused
from kvlens.scorers.interface import Scorer, rows_of, tensors

BLOCK_TOKENS = 32  # how much a full storage grows when tokens come one by one


@dataclass
class Ledger:
    """What an evicting cache knows beside keys and values; every tensor has the batch in front."""

    scorer: Scorer
    state: Any
    layers: tuple[int, ...]
    owner: weakref.ref[Any]
    n_own: Int[Tensor, " batch"]  # tokens of each row seen so far, padding not counted
    n_prompt: Int[Tensor, " batch"]  # those that came before the first decoded token
    model: str = ""  # which architecture filled it (takeover.py)
    sets: list[Int[Tensor, "batch heads _"]] = field(default_factory=list)
    in_prompt: bool = True
    since: int = 0  # tokens since the last eviction was due
    step: int = 0  # forward passes
    holes: bool = False  # whether any slot is empty
    lost: bool = False  # whether any token has left: a hole in its place need not make a layer narrower
    driven: bool = False  # whether a forward pass of a run is under way
    broken: bool = False  # whether one ended with an exception
    own: Bool[Tensor, "batch new"] | None = None  # which of the tokens under way are no padding; None: all

    def set_of(self, layer: int) -> Int[Tensor, "batch heads kept"]:
        """The positions that this layer holds."""
        return self.sets[0 if len(self.sets) == 1 else self.layers.index(layer)]

    def append(self, positions: Int[Tensor, "batch new"], *, padded: bool) -> None:
        """Take in the positions of new tokens, -1 for padding."""
        new = positions.to(torch.int32)[:, None]
        if not self.sets:
            self.sets = [new.clone()]
        else:
            self.sets = [torch.cat([held, new.expand(-1, held.shape[1], -1)], -1) for held in self.sets]
        self.holes |= padded

    def select_rows(self, index: Int[Tensor, " rows"]) -> None:
        """These rows of the batch, in this order."""
        index = index.to(self.n_own.device)
        self.sets = [held.index_select(0, index) for held in self.sets]
        self.n_own, self.n_prompt = self.n_own.index_select(0, index), self.n_prompt.index_select(0, index)
        self.state = rows_of(self.state, index)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything it holds, by name."""
        for number, held in enumerate(self.sets):
            yield f"positions.{number}", held
        yield from (("n_own", self.n_own), ("n_prompt", self.n_prompt))
        yield from tensors(self.state)


class HeldLayer(DynamicLayer):
    """The kept tokens of one layer; every head of a row holds as many slots."""

    is_ragged = False
    is_croppable = False  # what transformers asks before it assists decoding

    def __init__(self, ledger: Ledger, index: int) -> None:
        super().__init__()
        self.ledger, self.index = ledger, index
        self.n_seen = self.n_new = 0
        self._room: list[Tensor] = []  # keys and values with free slots at the end

    @property
    def n_kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def n_held(self) -> int:
        """Slots held."""
        return self.keys.shape[2] if self.is_initialized else 0

    def update(
        self,
        key_states: Float[Tensor, "batch kv_head new d_head"],
        value_states: Float[Tensor, "batch kv_head new d_head"],
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """The new tokens appended; what attention then reads."""
        self.check()
        held = self.n_held
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        if not self._room or held + new > self._room[0].shape[2] or is_frozen(self._room[0]):
            free = BLOCK_TOKENS - 1 if held and new < BLOCK_TOKENS else 0
            for part, states in enumerate((key_states, value_states)):
                self._grow(part, states, held, held + new + free)
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, held : held + new] = states
        self.keys, self.values = (room[:, :, : held + new] for room in self._room)
        self.n_seen, self.n_new = self.n_seen + new, new
        return self.keys, self.values

    def _grow(self, part: int, like: Tensor, held: int, slots: int) -> None:
        """Storage for that many slots with what was held in it; the old one goes before the next is asked for."""
        room = like.new_empty((like.shape[0], like.shape[1], slots, like.shape[3]))
        if held:
            room[:, :, :held] = self._room[part][:, :, :held]
        self._set_room(part, room)

    def _set_room(self, part: int, room: Tensor) -> None:
        if part == len(self._room):
            self._room.append(room)
        self._room[part] = room
        if part == 0:
            self.keys = room  # no view of the old storage stays behind
        else:
            self.values = room

    def check(self) -> None:
        """Raise InputError where going on would give wrong numbers."""
        if self.ledger.broken:
            raise InputError("a forward pass with this cache failed half-way, so it is not whole", "start a new one")
        if not self.ledger.driven and (self.ledger.holes or len(self.ledger.sets) > 1 or self.is_ragged):
            raise InputError(
                "this cache was evicted from and goes on outside kvlens.apply, where nobody makes its masks",
                "go on inside `with kvlens.apply(policy, model)`",
            )

    @property
    def new_keys(self) -> Float[Tensor, "batch kv_head new d_head"]:
        """Keys of the tokens that came in the last pass."""
        return self.keys[:, :, self.keys.shape[2] - self.n_new :]

    @property
    def new_values(self) -> Float[Tensor, "batch kv_head new d_head"]:
        """Values of the tokens that came in the last pass."""
        return self.values[:, :, self.values.shape[2] - self.n_new :]

    def restore(self, keys: Tensor, values: Tensor, n_seen: int) -> None:
        """Hold these, as if they had come."""
        self._room = []
        self._set_room(0, keys)
        self._set_room(1, values)
        self.device, self.dtype, self.n_seen = keys.device, keys.dtype, n_seen
        self.is_initialized: bool = True

    def forget_new(self) -> None:
        """The scorer has observed them."""

    def evict(self, index: Int[Tensor, "batch heads kept"]) -> None:
        """Keep these slots, in this order, in storage of exactly their size.

        Rows are taken from the storage seen as one list of rows: three to seven times as fast here as along an axis.
        """
        batch, heads, slots, width = self._room[0].shape
        first = torch.arange(batch * heads, device=index.device).view(batch, heads, 1) * slots
        rows = (index + first).reshape(-1)
        for part in range(2):
            room = self._room[part]
            kept = room.reshape(-1, width).index_select(0, rows.to(room.device))
            del room
            self._set_room(part, kept.view(batch, heads, -1, width))

    def get_seq_length(self) -> int:
        """How many tokens came by, so that the next position is right."""
        return self.n_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Held slots and new tokens; the first of them as if it stood that far before the end."""
        return self.n_held + query_length, self.n_seen - self.n_held

    def select_rows(self, index: Int[Tensor, " rows"]) -> None:
        """These rows of the batch, in this order; the first managed layer moves the ledger with it."""
        if not self.is_initialized:
            return
        index = index.to(self.keys.device)
        for part in range(2):
            self._set_room(part, (self.keys, self.values)[part].index_select(0, index))
        if self.index == self.ledger.layers[0]:
            self.ledger.select_rows(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(self.keys.shape[0], device=self.keys.device)
        self.select_rows(rows[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select_rows(torch.arange(self.keys.shape[0], device=self.keys.device).repeat_interleave(repeats))

    def crop(self, *_: Any) -> None:
        """Refused: what assisted decoding takes back has moved the policy's statistics and may have evicted others."""
        raise InputError(
            "assisted decoding and crop take tokens back, which a cache under an eviction policy cannot",
            "generate without assistant_model and prompt_lookup_num_tokens; to ask several questions of one cache, "
            "give each a copy.deepcopy of it",
        )

    def reset(self) -> None:
        raise InputError("a cache under an eviction policy is not reset", "start a new one")

    def offload(self) -> None:
        raise InputError("a cache under an eviction policy is not offloaded", "use a plain DynamicCache")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What it holds."""
        if self.is_initialized:
            yield from (("keys", self.keys), ("values", self.values))


def is_frozen(states: Tensor) -> bool:
    """Whether these were made under torch.inference_mode and nothing may be written into them outside it."""
    return states.is_inference() and not torch.is_inference_mode_enabled()


def ledger_of(cache: Cache) -> Ledger | None:
    """The ledger of an evicting cache; None for any other."""
    return next((layer.ledger for layer in getattr(cache, "layers", ()) if isinstance(layer, HeldLayer)), None)


def adopt(cache: Any, ledger: Ledger, model: Model) -> None:
    """Put evicting layers in place of the full-attention layers of a cache that is still empty.

    Raises: InputError for a cache that holds tokens already, ModelRefused for one of another kind, by name.
    """
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }
    offloaded = getattr(cache, "offloading", False)
    if not isinstance(cache, Cache) or not hasattr(cache, "layers") or kinds or offloaded:
        of = ", ".join(sorted(kinds)) or ("offloaded layers" if offloaded else "")
        raise ModelRefused(
            f"a policy cannot manage a {type(cache).__name__}{' of ' + of if of else ''}",
            "generate with transformers' default cache",
        )
    if cache.get_seq_length() > 0:
        raise InputError(
            f"this cache holds {cache.get_seq_length()} tokens that no policy has seen",
            "apply the policy before the first token",
        )
    while len(cache.layers) < model.n_layers:  # made without a config: transformers would add layers as they come
        cache.layers.append(DynamicLayer())
    for index in ledger.layers:
        cache.layers[index] = HeldLayer(ledger, index)


def all_tensors(cache: Cache) -> Iterator[tuple[str, Tensor]]:
    """Everything a cache holds, the policy's side included, by name."""
    ledger = ledger_of(cache)
    if ledger is not None:
        yield from ledger.tensors()
    for index, layer in enumerate(cache.layers):
        parts = layer.tensors() if isinstance(layer, HeldLayer) else (("keys", layer.keys), ("values", layer.values))
        yield from ((f"{index}.{name}", states) for name, states in parts if states is not None)


def storage_bytes(tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Bytes of the storages behind these tensors, each storage once: what the allocator holds for them."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in tensors}
    return sum(storages.values())


def physical_bytes(cache: Cache) -> int:
    """Bytes of all storages of a cache, a policy's own tensors included."""
    return storage_bytes(all_tensors(cache))
