"""What does the model look at when it says the whole text again? A pass over the cache that the cache never sees.

1. The text of each row is cut into chunks. For each the model is given: the prompt, the last tokens of the chunk before
   (so that it knows where to go on), and the chunk, at the positions that follow the row's last token.
2. In every layer these tokens attend to all slots held, then to one another causally, under the layer's own rule, in
   float32, a block of queries at a time. What attention puts out and what it looked at come from the same weights.
3. A slot is worth the largest weight that any query of any chunk gave it in any head of its group.
4. Rows with fewer tokens are filled up on the right: no real token sees the filling, and it asks nothing.

Keys and values are read where the cache holds them, and the wiring is a twin's (twin.py): nothing has to be put back.
A sliding layer has dropped what the pass would read, so models with one are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from kvlens.causal_lm import Model
from kvlens.errors import InputError, ModelRefused
from kvlens.forward import learned_positions
from kvlens.linear import fast_linear
from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import BLOCK, ROWS, Rule, weighted_values, weights_without
from kvlens.runtime.cache import Ledger
from kvlens.runtime.ragged import RaggedLayer
from kvlens.scorers.interface import EMPTY, Repeat
from kvlens.twin import Twin

LEAD = 8  # tokens of the chunk before


@dataclass(frozen=True)
class _Part:
    """One chunk of every row on its way: its tokens, their positions, and which of them are no filling."""

    ids: Int[Tensor, "batch new"]
    positions: Int[Tensor, "batch new"]
    own: Bool[Tensor, "batch new"]


class RepeatPass:
    """The repetition of a text over the cache that holds it.

    Raises: ModelRefused for a model with sliding layers or without the tokenizer that the prompt needs, or of which no
        twin can be made; when used, InputError where the text leaves no positions to repeat it at.
    Cost: three passes of three tokens; when used, one forward pass of the text over the cache.
    """

    def __init__(self, model: Model, repeat: Repeat) -> None:
        slides = [layer for layer, window in enumerate(model.sliding) if window is not None]
        if slides:
            raise ModelRefused(
                f"{model.name}: a repetition of the text reads layer {slides[0]}, which slides and drops rows",
                "use a scorer without a second pass",
            )
        if repeat.prompt and model.tokenizer is None:
            raise ModelRefused(
                f"{model.name} came without a tokenizer, which the prompt {repeat.prompt!r:.60} needs",
                "wrap it with one: kvlens.model.wrap(model, tokenizer); or set the parameter prompt to ''",
            )
        self.model, self.chunk = model, repeat.chunk
        self.prompt = model.tokenizer.encode(repeat.prompt, add_special_tokens=False) if repeat.prompt else []
        self._twin = Twin(model)

    @torch.inference_mode()
    def __call__(
        self, cache: Cache, ledger: Ledger, ids: Int[Tensor, "batch tokens"], _: Tensor | None = None
    ) -> dict[int, Float[Tensor, "batch kv_head slots"]]:
        """By layer what each slot is worth, NaN for an empty one; `ids` are each row's tokens, on the right."""
        shape = ids.shape[0], self.model.n_kv_heads
        worth = {
            layer: torch.zeros((*shape, ledger.set_of(layer).shape[-1]), device=cache.layers[layer].keys.device)
            for layer in ledger.layers
        }
        n_own = (ids != EMPTY).sum(-1)
        self._check(int(n_own.max()))
        for start in range(0, int(n_own.max()), self.chunk):
            part = self._part(ids, n_own, start)
            with fast_linear():
                self._twin.run(partial(_attend, cache, ledger, worth, part), ids=part.ids, positions=part.positions)
        return {
            layer: found.masked_fill((ledger.set_of(layer) == EMPTY).to(found.device), torch.nan)
            for layer, found in worth.items()
        }

    def _check(self, n_tokens: int) -> None:
        """Nothing; raises InputError where a model with learned positions has none left."""
        most = learned_positions(self.model)
        last = n_tokens + len(self.prompt) + LEAD + min(self.chunk, n_tokens)
        if most is not None and last > most:
            raise InputError(
                f"repeating {n_tokens} tokens needs positions up to {last}, and {self.model.name} has {most}",
                "give a smaller chunk, a shorter prompt, or use another scorer",
            )

    def _part(self, ids: Int[Tensor, "batch tokens"], n_own: Int[Tensor, " batch"], start: int) -> _Part:
        """1. and 4.: the chunk of every row that starts with its token `start`."""
        first = max(0, start - LEAD)
        place = torch.arange(first, min(start + self.chunk, int(n_own.max())), device=ids.device)
        own = place < n_own[:, None]
        index = (ids.shape[1] - n_own[:, None] + place).clamp(max=ids.shape[1] - 1)
        text = ids.gather(1, index).masked_fill(~own, 0).long()
        prompt = torch.tensor(self.prompt, dtype=torch.long, device=ids.device).expand(len(ids), -1)
        asks = (start < n_own)[:, None]  # a row that has ended before asks nothing at all
        own = torch.cat([asks.expand(-1, prompt.shape[1]), own & asks], -1)
        new = torch.cat([prompt, text], -1)
        return _Part(new, n_own[:, None] + torch.arange(new.shape[1], device=ids.device), own)


def _attend(
    cache: Cache,
    ledger: Ledger,
    worth: dict[int, Tensor],
    part: _Part,
    index: int,
    query: Float[Tensor, "batch head new d_head"],
    key: Float[Tensor, "batch kv_head new d_head"],
    value: Float[Tensor, "batch kv_head new d_head"],
    keywords: Mapping[str, Any],
) -> Float[Tensor, "batch head new d_head"]:
    """2. and 3. for one layer; heads of different lengths are taken one by one."""
    layer, rule, own = cache.layers[index], Rule.of_call(query, None, keywords), part.own.to(query.device)
    empty = (ledger.set_of(index) == EMPTY).to(query.device)
    if not isinstance(layer, RaggedLayer):
        output, most = _blocks(query, (layer.keys, layer.values), (key, value), rule, empty, own)
        worth[index] = torch.maximum(worth[index], most)
        return output
    batch, n_kv_heads = layer.shape
    group, output = query.shape[1] // n_kv_heads, torch.empty_like(query)
    empty = empty.expand(-1, n_kv_heads, -1)
    for row in range(batch):
        for head in range(n_kv_heads):
            place, heads = slice(row, row + 1), slice(head * group, (head + 1) * group)
            sinks = None if rule.sinks is None else rule.sinks[heads]
            ruled = Rule(rule.scale, rule.window, rule.softcap, sinks)
            held = tuple(states[None, None] for states in layer.pair(row, head))
            new = key[place, head : head + 1], value[place, head : head + 1]
            none = torch.zeros((1, 1, held[0].shape[2]), dtype=torch.bool, device=query.device)
            output[place, heads], most = _blocks(query[place, heads], held, new, ruled, none, own[place])
            real = ~empty[row, head]
            worth[index][row, head, real] = torch.maximum(worth[index][row, head, real], most[0, 0])
    return output


def _blocks(
    query: Float[Tensor, "batch head new d_head"],
    held: tuple[Float[Tensor, "batch kv_head slots d_head"], ...],
    new: tuple[Float[Tensor, "batch kv_head new d_head"], ...],
    rule: Rule,
    empty: Bool[Tensor, "batch heads slots"],
    own: Bool[Tensor, "batch new"],
) -> tuple[Float[Tensor, "batch head new d_head"], Float[Tensor, "batch kv_head slots"]]:
    """What attention puts out, and the largest weight that a query gave each slot held."""
    keys, values = (wide(torch.cat(pair, 2)) for pair in zip(held, new, strict=True))
    n_kv_heads, n_slots = empty.shape[1], held[0].shape[2]
    if n_kv_heads > 1:
        empty = empty.repeat_interleave(query.shape[1] // n_kv_heads, 1)
    most = torch.zeros((*keys.shape[:2], n_slots), device=query.device)
    output, n_new = torch.empty_like(query), query.shape[2]
    rows = max(ROWS, BLOCK // keys.shape[2])
    column = torch.arange(n_new, device=query.device)
    for start in range(0, n_new, rows):
        stop = min(start + rows, n_new)
        later = (column > column[start:stop, None]).expand(len(query), empty.shape[1], -1, -1)
        hidden = torch.cat([empty[:, :, None].expand(-1, -1, stop - start, -1), later], -1)
        weights = weights_without(wide(query[:, :, start:stop]), keys, rule, hidden)[0]
        output[:, :, start:stop] = weighted_values(weights, values).to(query.dtype)
        asked = weights[..., :n_slots].masked_fill_(~own[:, None, start:stop, None], 0.0)
        most = torch.maximum(most, asked.amax(2).unflatten(1, (keys.shape[1], -1)).amax(2))
    return output, most
