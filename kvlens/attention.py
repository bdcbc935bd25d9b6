"""What does each attention layer see, and how is that changed without touching the model's code?

It offers, each for one call:

1. caches: a growing one that keeps every row of every layer (sliding layers too: the mask hides, the cache never
   drops), one built from given keys and values, and a private one that stores nothing;
2. masks: visibility (True = visible) turned into what the backend adds to its scores, the sliding window worked in;
3. an override: every attention layer calls a given function in place of its backend;
4. a function around attention: it is given what a layer attends to and the layer's own backend, ready to be called;
5. per-layer masks: some layers see another mask than the rest.

Contexts 3 to 5 restore everything on exit, on exceptions too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvlens.backends import OVERRIDE_PREFIX, AttentionFunction, backend_called, own_backend, unused_backend_name
from kvlens.causal_lm import Model
from kvlens.errors import InputError, ModelRefused

# (layer, the layer's own attention, query, key, value, keywords) -> output [batch, query, head, d_head]
AroundFunction = Callable[[int, Callable[[], Tensor], Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]


class PrivateLayer(DynamicLayer):
    """A cache layer that hands new keys and values straight back and stores nothing."""

    def __init__(self, n_seen: int) -> None:
        super().__init__()
        self.n_seen = n_seen

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.n_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The new tokens alone: as many keys as queries, the first at position `n_seen`."""
        return query_length, self.n_seen


def new_cache(model: Model) -> Cache:
    """An empty cache that keeps every row of every layer, sliding layers included.

    An empty transformers cache is falsy: test `cache is None`, never `not cache`.
    """
    return Cache(layers=[DynamicLayer() for _ in range(model.n_layers)])


def private_cache(model: Model, n_seen: int) -> Cache:
    """A cache of length `n_seen` tokens whose update returns just the new keys and values and stores nothing."""
    return Cache(layers=[PrivateLayer(n_seen) for _ in range(model.n_layers)])


def cache_layers(
    cache: Cache,
) -> list[tuple[Float[Tensor, "batch kv_head pos d_head"], Float[Tensor, "batch kv_head pos d_head"]]]:
    """Keys and values of every layer, as the cache holds them (not copies)."""
    empty = [index for index, layer in enumerate(cache.layers) if layer.keys is None]
    if empty:
        raise InputError(
            f"cannot read a cache: layer {empty[0]} holds no keys yet", "run the model with this cache first"
        )
    return [(layer.keys, layer.values) for layer in cache.layers]


def cache_from(
    model: Model,
    layers: Sequence[tuple[Float[Tensor, "batch kv_head _ d_head"], Float[Tensor, "batch kv_head _ d_head"]]],
) -> Cache:
    """A cache that starts from these keys and values, without copying them; appending never writes into them."""
    if len(layers) != model.n_layers:
        raise InputError(f"cannot build a cache from {len(layers)} layers: the model has {model.n_layers}")
    cache = DynamicCache()
    for keys, values in layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def additive(
    visible: Bool[Tensor, "batch heads query key"], dtype: torch.dtype
) -> Float[Tensor, "batch heads query key"]:
    """The visibility as a term of the attention scores: 0 where visible, the dtype's lowest finite number elsewhere.

    A lowest finite number, not -inf: a row that sees nothing then gives numbers, not NaN, on every backend.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def within_window(
    visible: Bool[Tensor, "#batch heads query key"],
    window: int | None,
    query_positions: Int[Tensor, "#batch query"],
    key_positions: Int[Tensor, "#batch key"],
) -> Bool[Tensor, "#batch heads query key"]:
    """The visibility a layer with this sliding window has: keys `window` or more tokens back are hidden as well."""
    if window is None:
        return visible
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    return visible & (distance < window)[:, None]


def default_key_positions(query_positions: Int[Tensor, "batch query"], n_keys: int) -> Int[Tensor, "batch key"]:
    """Key positions when nothing was dropped: cached rows count from 0, the new tokens follow with their own."""
    n_cached = n_keys - query_positions.shape[1]
    if n_cached < 0:
        raise InputError(
            f"mask has {n_keys} keys for {query_positions.shape[1]} new tokens: it must cover the new ones"
        )
    cached = torch.arange(n_cached, device=query_positions.device).expand(query_positions.shape[0], -1)
    return torch.cat([cached, query_positions], dim=1)


def check_mask(mask: Tensor) -> None:
    """Refuse a mask that is no 4-D bool tensor: a float mask would be read upside down."""
    if mask.dtype != torch.bool or mask.ndim != 4:
        raise InputError(
            f"attention mask of dtype {mask.dtype} and shape {tuple(mask.shape)}: not a visibility",
            "pass bool [batch, 1 or head, query, key], True = visible",
        )


def is_overridden(model: Model) -> bool:
    """Whether an attention override is in force on this model."""
    return str(model.decoder.config._attn_implementation).startswith(OVERRIDE_PREFIX)


def ignores_masks(model: Model) -> bool:
    """Whether the model's own attention backend takes no 4-D mask, by its name or by what the self-check saw."""
    return model.attention.startswith("flash") or (model.check is not None and not model.check.mask_ok)


def require_mask(model: Model) -> None:
    """Raise ModelRefused where the attention backend ignores a 4-D mask: masked numbers would be unmasked ones."""
    if ignores_masks(model) and not is_overridden(model):
        raise ModelRefused(
            f"{model.name}: a 4-D mask was asked for, but attention backend {model.attention!r} ignores such masks",
            "use --attention sdpa or eager",
        )


@contextmanager
def override(decoder: nn.Module, function: AttentionFunction) -> Iterator[None]:
    """Within it every attention layer below `decoder` calls `function`; before and after, the backend it had.

    The function is registered under a name of its own, and the configs that the layers read their backend from are
    pointed at it. transformers builds no mask for a backend it has no mask function for, so nothing n x n is made.
    """
    name = unused_backend_name()
    configs: dict[int, Any] = {
        id(module.config): module.config for module in decoder.modules() if hasattr(module, "config")
    }
    former = [(config, config._attn_implementation) for config in configs.values()]
    with backend_called(name, function):
        try:
            for config, _ in former:
                config._attn_implementation = name
            yield
        finally:
            for config, implementation in former:
                config._attn_implementation = implementation


@contextmanager
def attention_override(model: Model, function: AttentionFunction) -> Iterator[None]:
    """Within it every attention layer of the model calls `function` instead of its backend.

    The call is `function(module, query [batch, head, query, d_head], key [batch, kv_head, key, d_head], value,
    attention_mask, scaling=..., dropout=..., **kwargs) -> (output [batch, query, head, d_head], None)`. Families add
    keywords: `sliding_window` (None on full layers), `softcap`, `s_aux` (one sink logit per head). A model call without
    a mask gives `attention_mask=None`, whatever the layer kind: causality and window are then the function's work.
    Overrides nest: the innermost one is called.
    """
    with override(model.decoder, function):
        yield


@contextmanager
def around_attention(model: Model, function: AroundFunction) -> Iterator[None]:
    """Within it each attention layer puts out what `function(layer, own, query, key, value, keywords)` gives.

    `own()` is what the layer's own backend puts out, [batch, query, head, d_head], under the masks it always has: the
    rest of the model still reads the backend's name from its config, only the attention modules read another one.
    Shapes and keywords are those of `attention_override`.

    Raises: ModelRefused for a module whose own backend cannot be found.
    """
    name = unused_backend_name()
    former: list[Any] = [module.config for module in model.layers]
    own = {id(module): (layer, own_backend(module)) for layer, module in enumerate(model.layers)}

    def call(  # the mask by the name that some families pass it under
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **keywords: Any
    ) -> Any:
        layer, backend = own[id(module)]

        def output() -> Tensor:
            return backend(module, query, key, value, attention_mask, **keywords)[0]

        return function(layer, output, query, key, value, keywords), None

    copies = {id(config): copy.deepcopy(config) for config in former}
    for config in copies.values():
        config._attn_implementation = name
    with backend_called(name, call):
        try:
            for module, config in zip(model.layers, former, strict=True):
                module.config = copies[id(config)]
            yield
        finally:
            for module, config in zip(model.layers, former, strict=True):
                module.config = config


@contextmanager
def layer_masks(
    model: Model,
    masks: Mapping[int, Bool[Tensor, "batch heads query key"]],
    *,
    positions: Int[Tensor, "#batch query"] | None = None,
    key_positions: Int[Tensor, "#batch key"] | None = None,
) -> Iterator[None]:
    """Within it the named layers see these masks (True = visible) in place of the model call's own mask.

    `masks[layer]` is [batch, 1 or head, query, key]. Layers with a sliding window keep it: `positions` (of the queries,
    default the last ones) and `key_positions` (default 0, 1, ...) say what lies inside it.
    """
    require_mask(model)
    with ExitStack() as stack:
        for index, mask in masks.items():
            check_mask(mask)
            queries = positions
            if queries is None:
                queries = torch.arange(mask.shape[-1] - mask.shape[-2], mask.shape[-1], device=mask.device)[None]
            keys = default_key_positions(queries, mask.shape[-1]) if key_positions is None else key_positions
            term = additive(within_window(mask, model.sliding[index], queries, keys), model.dtype)
            handle = model.layers[index].register_forward_pre_hook(_replace_mask(term), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _replace_mask(term: Tensor) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    """A hook that puts `term` in the place of the attention mask a layer is called with."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "attention_mask" not in kwargs:
            raise ModelRefused(f"{type(module).__name__} takes its mask in a way per-layer masks do not know")
        return args, kwargs | {"attention_mask": term}

    return hook
