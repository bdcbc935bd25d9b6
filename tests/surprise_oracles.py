"""Counter-causal surprise, slow and obvious: the model's own decoder, an n x n mask in float64, the whole vocabulary.

Nothing is shared with the pass but the model: the original modules run, their attention is replaced by one written out
here over the cached keys, states are laid in and the last MLP is silenced by plain forward hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import tiny
import torch
from torch import Tensor

from kvlens.model import (
    Model,
    attention_override,
    blocks,
    cache_layers,
    hidden,
    new_cache,
    unembed,
    watch_blocks,
)
from kvlens.observables.surprise import State
from kvlens.observables.surprise_variant import Variant

Layers = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Held:
    """One sequence's cache: ids and positions [1, pos], keys and values of every layer, what every block put out."""

    ids: Tensor
    positions: Tensor
    layers: Layers
    outputs: list[Tensor]

    def state(self, start: int, units: Tensor | None = None) -> State:
        """What a pass from block `start` on needs."""
        return State(self.ids, self.positions, self.outputs[start - 1] if start else None, units)


def prefilled(model: Model, n: int, *, gone: Sequence[int] = (), seed: int = 0) -> Held:
    """`n` rows of a cache, of n + len(gone) random tokens, of which those at positions `gone` were evicted."""
    return cached_rows(model, tiny.token_ids(n + len(gone), seed=seed).to(model.device), gone)


@torch.no_grad()
def cached_rows(model: Model, ids: Tensor, gone: Sequence[int] = ()) -> Held:
    """What a cache holds of these tokens [1, pos] but for those at positions `gone`."""
    cache, outputs = new_cache(model), dict[int, Tensor]()
    with watch_blocks(model, lambda layer, states: outputs.update({layer: states.clone()})):
        hidden(model, ids, cache=cache)
    kept = torch.tensor([pos for pos in range(ids.shape[1]) if pos not in gone], device=model.device)
    layers = [(keys[:, :, kept].clone(), values[:, :, kept].clone()) for keys, values in cache_layers(cache)]
    return Held(ids[:, kept], kept[None], layers, [outputs[layer][:, kept] for layer in range(model.n_layers)])


def visible(n: int, variant: Variant, units: Sequence[int] | None = None) -> Tensor:
    """[row, row]: what each row sees under full attention."""
    units = list(range(n)) if units is None else list(units)
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mates = [j for j in range(n) if units[j] == units[i]]
        for j in range(n):
            seen[i, j] = j < mates[0] - variant.min_gap if variant.past else j > mates[-1] + variant.min_gap
    return seen


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[batch, head, query, d_head] in float64; a row that sees nothing gives 0."""
    repeat = query.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(repeat, 1) for states in (keys, values))
    scores = query.double() @ keys.mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return torch.where(seen, weights, 0.0) @ values


def within(seen: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """What a layer with this window lets through: rows fewer than `window` positions away, on either side."""
    if window is None:
        return seen
    apart = positions[..., :, None] - positions[..., None, :]
    return seen & (apart < window) & (apart > -window)


@torch.no_grad()
def scores(model: Model, held: Held, variant: Variant, units: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Values in float64 and whether they are known, [pos]; `units` as numbers, one a row."""
    n = held.ids.shape[1]
    seen = visible(n, variant, units).to(model.device)
    rows = unembed(model, _final_states(model, held, variant, seen))[0].double()
    if variant.logprob:
        rows = rows.log_softmax(-1)
    own = torch.stack([rows[i, int(held.ids[0, i])] for i in range(n)])
    if variant.unit is not None and units is not None:
        own = torch.stack([own[[j for j in range(n) if units[j] == units[i]]].sum() for i in range(n)])
    windows = model.sliding[0 if variant.layers is None else model.n_layers - variant.layers :]
    known = torch.stack([within(seen[None], held.positions, window)[0].any(1) for window in set(windows)]).any(0)
    return torch.where(known, -own, 0.0), known


def _final_states(model: Model, held: Held, variant: Variant, seen: Tensor) -> Tensor:
    stack = blocks(model)
    start = 0 if variant.layers is None else model.n_layers - variant.layers
    number = {id(module): layer for layer, module in enumerate(model.layers)}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kw: Any) -> Any:
        keys, values = held.layers[number[id(module)]]
        let_through = within(seen, held.positions, kw.get("sliding_window"))
        mixed = attention(query, keys, values, let_through, kw["scaling"], kw.get("softcap"), kw.get("s_aux"))
        return mixed.to(query.dtype).transpose(1, 2).contiguous(), None

    embed = model.decoder.get_input_embeddings()
    everything = embed(torch.arange(model.d_vocab, device=model.device)).double()
    blank = everything.mean(0).to(model.dtype).expand(1, held.ids.shape[1], -1)
    stored = held.outputs[start - 1] if start else None
    what: dict[str, Tensor] = {"input_ids": held.ids}
    if variant.no_self and stored is None:
        what = {"inputs_embeds": blank}
    elif variant.no_self and stored is not None:
        entered = (
            _first_input(model, {"input_ids": held.ids}, held),
            _first_input(model, {"inputs_embeds": blank}, held),
        )
        stored = (stored.double() - entered[0].double() + entered[1].double()).to(model.dtype)
    with ExitStack() as hooks, attention_override(model, attend):
        if stored is not None:
            lay_in = _in_place_of_states(stored)
            hooks.callback(stack[start - 1].register_forward_hook(lay_in).remove)
        if variant.skip_mlp:
            hooks.callback(stack[-1].mlp.register_forward_hook(lambda _, __, out: torch.zeros_like(out)).remove)
        return model.decoder(**what, position_ids=held.positions, use_cache=False).last_hidden_state


def _in_place_of_states(stored: Tensor) -> Any:
    return lambda _, __, out: (stored, *out[1:]) if isinstance(out, tuple) else stored


def _first_input(model: Model, what: dict[str, Tensor], held: Held) -> Tensor:
    """What enters the first block: the stream before any block has added to it."""
    found: list[Tensor] = []
    hook = blocks(model)[0].register_forward_pre_hook(
        lambda _, args, kwargs: found.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        model.decoder(**what, position_ids=held.positions, use_cache=False)
    finally:
        hook.remove()
    return found[0]


def kept(
    values: Sequence[float], known: Sequence[bool], n_held: int, frozen: int, recent: int, *, trailing: bool = True
) -> list[int]:
    """The rows of one sequence without padding that stay: protected, unknown (last first), highest, earliest ones."""
    n = len(values)
    if n <= n_held:
        return list(range(n))
    protected = [i < frozen or i >= n - recent or (trailing and not any(known[i:])) for i in range(n)]
    order = sorted(range(n), key=lambda i: (not protected[i], known[i], -values[i] if known[i] else -i, i))
    return sorted(order[:n_held])
