"""How is a causal LM looked at and called?

1. `wrap` looks at a causal LM once: it refuses layer kinds without ordinary keys and values by name, runs two tokens
   under an attention override that records which module attends in which layer, and reads sizes from what it saw;
2. `hidden` runs the decoder for given ids, positions, cache and visibility, up to the final norm;
3. `logits` turns that into float32 logits (unembedding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvlens.attention import (
    additive,
    check_mask,
    default_key_positions,
    is_overridden,
    override,
    require_mask,
    within_window,
)
from kvlens.causal_lm import Model, device_of, fingerprint_of
from kvlens.errors import InputError, ModelRefused
from kvlens.unembedding import unembed

LAYER_KINDS = ("full_attention", "sliding_attention")
# What families that learn a vector per position call their table.
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")


def wrap(
    hf_model: Any,
    tokenizer: Any = None,
    *,
    name: str = "in-memory",
    note: str = "",
    weights_hash: str | None = None,
) -> Model:
    """The model as kvlens sees it. The given model is put in eval mode, its parameters need no gradient from here on.

    Raises: InputError for what is no causal LM, ModelRefused where a layer has no ordinary keys and values, or a
        weight is not finite.
    Cost: one forward pass of two tokens and one pass over the weights.
    """
    parts = ("config", "get_decoder", "get_output_embeddings")
    if not all(hasattr(hf_model, part) for part in parts) or hf_model.get_output_embeddings() is None:
        raise InputError(f"{name}: {type(hf_model).__name__} is no causal LM of transformers", "give one, whole")
    hf_model.eval().requires_grad_(False)
    config = hf_model.config.get_text_config(decoder=True)
    sliding = _sliding_windows(name, hf_model, config)
    calls = _attention_calls(hf_model)
    if not calls or len(calls) != len(sliding):
        raise ModelRefused(
            f"{name} ({type(hf_model).__name__}): {len(calls)} of its {len(sliding)} layers attend through "
            "transformers' attention interface, so the others cannot be masked or measured",
            "use a model whose every layer is ordinary attention",
        )
    queries, keys, values = zip(*[shapes for _, shapes in calls], strict=True)
    if len({*queries}) > 1 or len({*keys, *values}) > 1:
        raise ModelRefused(
            f"{name}: layers or keys and values of unequal size (heads, d_head): {sorted({*keys, *values})}"
        )
    return Model(
        hf=hf_model,
        tokenizer=tokenizer,
        name=name,
        fingerprint=fingerprint_of(hf_model, name, weights_hash),
        n_layers=len(calls),
        n_heads=queries[0][0],
        n_kv_heads=keys[0][0],
        d_head=keys[0][1],
        d_model=int(config.hidden_size),
        d_vocab=int(hf_model.get_output_embeddings().weight.shape[0]),
        max_context=int(config.max_position_embeddings),
        sliding=sliding,
        attention=str(hf_model.get_decoder().config._attn_implementation),
        note=note,
        layers=tuple(module for module, _ in calls),
    )


def _sliding_windows(name: str, hf_model: Any, config: Any) -> tuple[int | None, ...]:
    """Per layer the sliding window in tokens, or None for full attention; refuses every other kind of layer by name."""
    unusual = {
        "an encoder": config.is_encoder_decoder or getattr(config, "add_cross_attention", False),
        "compressed (MLA) attention": getattr(config, "kv_lora_rank", None),
        "layers that share keys and values": getattr(config, "num_kv_shared_layers", None),
        "keys that serve as values": getattr(config, "attention_k_eq_v", False),
        "attention in both directions": getattr(config, "use_bidirectional_attention", False)
        or not getattr(config, "is_causal", True),
    }
    unusual |= {f"{kind} layers": True for kind in set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS)}
    layers = DynamicCache(config=config).layers
    unusual |= {
        f"{type(layer).__name__} layers": True
        for layer in layers
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
    }
    found = [what for what, present in unusual.items() if present]
    if found:
        raise ModelRefused(
            f"{name} ({type(hf_model).__name__}) has {', '.join(found)}: no ordinary keys and values to hide",
            "kvlens measures decoders with full or sliding-window attention",
        )
    windows: tuple[int | None, ...] = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    sizes = sorted({window for window in windows if window is not None})
    if len(sizes) > 1:
        raise ModelRefused(f"{name}: sliding windows of different sizes {sizes}", "one size is what kvlens handles")
    return windows


def _attention_calls(hf_model: Any) -> list[tuple[nn.Module, tuple[tuple[int, int], ...]]]:
    """In layer order, the module that attends and the (heads, d_head) of its queries, keys and values."""
    calls: list[tuple[nn.Module, tuple[tuple[int, int], ...]]] = []

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        shapes = tuple((states.shape[1], states.shape[3]) for states in (query, key, value))
        calls.append((module, shapes))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    device = device_of(hf_model)
    decoder = hf_model.get_decoder()
    with torch.no_grad(), override(decoder, record):
        decoder(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)
    return calls


def learned_positions(model: Model) -> int | None:
    """How many positions the model has vectors for, in tokens; None where positions are computed and have no end."""
    for name, module in model.decoder.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES:
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None


def check_ids(model: Model, ids: Iterable[int]) -> None:
    """Nothing; raises InputError for a token id the model has no embedding for: its tokenizer is another model's."""
    beyond = next((int(i) for i in ids if not 0 <= i < model.d_vocab), None)
    if beyond is not None:
        raise InputError(
            f"token {beyond} is outside the vocabulary of {model.name}, which ends at {model.d_vocab - 1}",
            "use the tokenizer that came with the model",
        )


def attention_modules(model: Model) -> list[nn.Module]:
    """The attention module of every layer, in layer order."""
    return list(model.layers)


def blocks(model: Model) -> list[nn.Module]:
    """The residual block of every layer, in layer order; a block's output is the residual stream after it."""
    for stack in model.decoder.modules():
        if not isinstance(stack, nn.ModuleList) or len(stack) != model.n_layers:
            continue
        if all(layer in block.modules() for layer, block in zip(model.layers, stack, strict=True)):
            return list(stack)
    raise ModelRefused(f"{model.name}: no list of {model.n_layers} blocks around its attention layers")


@contextmanager
def watch_blocks(model: Model, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Within it `see(layer, states)` is told the residual stream after every block, [batch, query, d_model], un-normed.

    The model's own `hidden_states` will not do: their last entry is after the final norm.
    """

    def hook(layer: int, _: nn.Module, __: Any, output: Any) -> None:
        see(layer, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as stack:
        for layer, block in enumerate(blocks(model)):
            stack.callback(block.register_forward_hook(partial(hook, layer)).remove)
        yield


@contextmanager
def watch_input(model: Model, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Within it `see(states)` is told what enters the first block, [batch, query, d_model]."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(args[0] if args else kwargs["hidden_states"])

    handle = blocks(model)[0].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def hidden(
    model: Model,
    ids: Int[Tensor, "batch query"],
    *,
    positions: Int[Tensor, "#batch query"] | Int[Tensor, " query"] | None = None,
    cache: Cache | None = None,
    mask: Bool[Tensor, "_ _ query key"] | None = None,
    key_positions: Int[Tensor, "#batch key"] | None = None,
) -> Float[Tensor, "batch query d_model"]:
    """Hidden states after the final norm, in the model's dtype.

    Args:
        positions: of the new tokens; default: they follow the cache.
        cache: read and appended to.
        mask: visibility, True = visible, [batch, 1 or head, query, key] over cached then new keys; default causal.
            Means the same for every model: layers with a sliding window hide what lies outside it on top.
        key_positions: where the keys stand, asked only by sliding layers; default: cached rows count from 0. Give it
            when rows were dropped from the cache.

    Cost: one forward pass. With a mask, one [batch, 1 or head, query, key] tensor per layer kind.
    """
    if positions is None:
        n_seen = 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(n_seen, n_seen + ids.shape[1], device=ids.device)
    positions = positions.reshape(-1, ids.shape[1])
    decoder = model.decoder
    # `past_key_values` up to transformers 5.23, `cache` from 5.24 on, family by family
    cache_keyword = "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"
    output = decoder(
        input_ids=ids,
        position_ids=positions.expand(ids.shape[0], -1),
        attention_mask=_backend_mask(model, mask, positions, cache, key_positions),
        use_cache=cache is not None,
        **{cache_keyword: cache},
    )
    return output.last_hidden_state


def _backend_mask(
    model: Model, mask: Tensor | None, positions: Tensor, cache: Cache | None, key_positions: Tensor | None
) -> Tensor | dict[str, Tensor] | None:
    """What to pass as attention_mask: one tensor, or one per layer kind where a model mixes kinds."""
    if mask is None:
        if is_overridden(model) or cache is not None or not bool((positions.diff() != 1).any()):
            return None
        # transformers reads a jump in positions as the border between packed texts and hides one from the other
        n_new = positions.shape[1]
        mask = torch.ones(n_new, n_new, dtype=torch.bool, device=positions.device).tril()[None, None]
    check_mask(mask)
    require_mask(model)
    if key_positions is None:
        key_positions = default_key_positions(positions, mask.shape[-1])
    terms = {
        window: additive(within_window(mask, window, positions, key_positions), model.dtype)
        for window in dict.fromkeys(model.sliding)
    }
    if len(terms) == 1:
        return terms[model.sliding[0]]
    return dict(zip(model.decoder.config.layer_types, (terms[window] for window in model.sliding), strict=True))


def logits(
    model: Model,
    ids: Int[Tensor, "batch query"],
    *,
    positions: Int[Tensor, "#batch query"] | Int[Tensor, " query"] | None = None,
    mask: Bool[Tensor, "_ _ query key"] | None = None,
    cache: Cache | None = None,
    last: int | None = None,
    key_positions: Int[Tensor, "#batch key"] | None = None,
) -> Float[Tensor, "batch rows d_vocab"]:
    """float32 logits of the new tokens, or of the last `last` of them only; arguments as in `hidden`."""
    states = hidden(model, ids, positions=positions, cache=cache, mask=mask, key_positions=key_positions)
    return unembed(model, states if last is None else states[:, states.shape[1] - last :])
