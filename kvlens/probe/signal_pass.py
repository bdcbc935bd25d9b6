"""What do the signals say of one trace? One forward pass, every signal read off while it runs.

1. After each block its residual stream is turned into the signals that take it, and let go.
2. Where attention weights are asked for, attention itself is computed a block of queries at a time, and the signals see
   each block of weights before the next one is made: no tensor of all queries by all keys exists.
3. Keys and values are read from the cache that the pass leaves: as attention saw them.
4. Logits exist for a block of tokens at a time.

Steps 1, 3 and 4 work with every attention backend; step 2 puts kvlens' own attention in the backend's place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import ModelRefused
from kvlens.linear import fast_linear
from kvlens.model import Model
from kvlens.observables.attention_weights import Rule, blocks, weighted_values
from kvlens.observables.table import Signal, read, with_sources
from kvlens.probe.readout import BLOCK_ROWS

Columns = dict[str, Float32[np.ndarray, "..."]]
Chunks = Iterable[Mapping[str, Tensor]]


@torch.inference_mode()
def read_signals(
    model: Model, ids: Int[Tensor, " pos"], signals: Sequence[Signal], counts: Int[Tensor, " pos"]
) -> Columns:
    """By name, the values of each signal: [pos, layer] or [pos], NaN where a token has none.

    `counts` is how often each token's id stands in all traces of the run.

    Raises: ModelRefused where the model's hidden states are not finite.
    Cost: one forward pass; memory the trace's cache, and a block of attention weights where they are asked for.
    """
    wanted = with_sources(signals)
    needs = frozenset[str]().union(*(signal.needs for signal in wanted))
    per_layer = [signal for signal in wanted if signal.per_layer]
    scalars = [signal for signal in wanted if not signal.per_layer]
    rows: defaultdict[str, list[Tensor]] = defaultdict(list)  # by signal, [pos] for each layer

    def take(chunks: Chunks) -> None:
        for name, values in read(per_layer, chunks).items():
            rows[name].append(values)

    cache = models.new_cache(model) if "keys_values" in needs else None
    with ExitStack() as stack:
        if "hidden" in needs:
            stack.enter_context(models.watch_blocks(model, lambda _, states: take([{"hidden": states[0]}])))
        if "attention" in needs:
            stack.enter_context(models.attention_override(model, WatchedAttention(model, take)))
        with fast_linear():
            states = models.hidden(model, ids[None], cache=cache)[0]
    require_finite(states)
    inputs = {"ids": ids, "counts": counts}
    if cache is not None:
        pairs = [(keys[0], values[0]) for keys, values in models.cache_layers(cache)]
        for keys, values in pairs:
            take([{"keys": keys, "values": values}])
        if any("keys" in signal.takes for signal in scalars):
            inputs |= {"keys": torch.stack([k for k, _ in pairs]), "values": torch.stack([v for _, v in pairs])}
    found = read(scalars, [inputs])
    found |= read([signal for signal in scalars if "logits" in signal.takes], predictions(model, states, ids))
    found |= {name: torch.stack(values, -1) for name, values in rows.items()}
    return {signal.name: found[signal.name].float().cpu().numpy() for signal in signals}


def require_finite(states: Float[Tensor, "pos d_model"]) -> None:
    """Nothing; raises ModelRefused where a signal would be read off numbers that are none."""
    if not bool(torch.isfinite(states).all()):
        raise ModelRefused(
            "the model's hidden states hold NaN or infinity", "check its weights, or use --dtype float32"
        )


def predictions(model: Model, states: Float[Tensor, "pos d_model"], ids: Int[Tensor, " pos"]) -> Chunks:
    """Logits and ids of the trace, some tokens at a time."""
    for block, piece in zip(states.split(BLOCK_ROWS), ids.split(BLOCK_ROWS), strict=True):
        with fast_linear():
            logits = models.unembed(model, block)
        yield {"logits": logits, "ids": piece}


class WatchedAttention:
    """Attention in a transformers layer whose weights `take` sees, a block of queries at a time.

    It is called with one trace and all of its tokens at once; causality and sliding windows are its own work.
    """

    def __init__(self, model: Model, take: Callable[[Chunks], None]) -> None:
        self._take = take
        self._windows = {id(module): window for module, window in zip(model.layers, model.sliding, strict=True)}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any = None, **kwargs: Any
    ) -> tuple[Float[Tensor, "one query head d_head"], None]:
        """The attention output."""
        rule = Rule.of_call(query, self._windows[id(module)], kwargs)
        outputs: list[Tensor] = []

        def weights() -> Chunks:
            for block in blocks(query[0], key[0], rule):
                outputs.append(weighted_values(block, value[0, :, : block.shape[-1]]).to(query.dtype))
                yield {"weights": block}

        self._take(weights())
        return torch.cat(outputs, 1).transpose(0, 1)[None].contiguous(), None
