"""What do the signals say of one trace? One forward pass, every signal read off while it runs.

1. After each block its residual stream is turned into the signals that take it, and let go.
2. Where attention weights are asked for, attention itself is computed a block of queries at a time, and the signals see
   each block of weights before the next one is made: no tensor of all queries by all keys exists.
3. Keys and values are read from the cache that the pass leaves: as attention saw them.
4. Logits exist for a block of tokens at a time.
5. Where surprise is asked for, a second pass runs over the cache that the first one leaves.

All steps but 2 work with every attention backend; that one puts kvlens' own attention in the backend's place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from kvlens.observables.surprise import Layers, State, Surprise
from kvlens.observables.surprise_variant import FAST, FULL
from kvlens.observables.table import Signal, read, with_sources
from kvlens.probe.readout import BLOCK_ROWS

Columns = dict[str, Float32[np.ndarray, "..."]]
PASSES = {"full_pass": FULL, "fast_pass": FAST}
Chunks = Iterable[Mapping[str, Tensor]]


@torch.inference_mode()
def read_signals(
    model: Model,
    ids: Int[Tensor, " pos"],
    signals: Sequence[Signal],
    counts: Int[Tensor, " pos"],
    passes: Mapping[str, Surprise] | None = None,
) -> Columns:
    """By name, the values of each signal: [pos, layer] or [pos], NaN where a token has none.

    `counts` is how often each token's id stands in all traces of the run, `passes` what `passes_for` makes of these
    signals, where many traces are read.

    Raises: ModelRefused where the model's hidden states are not finite, and what `passes_for` raises.
    Cost: one forward pass, and what surprise costs where it is asked for;
        memory the trace's cache, and a block of attention weights where they are asked for.
    """
    wanted = with_sources(signals)
    needs = frozenset[str]().union(*(signal.needs for signal in wanted))
    per_layer = [signal for signal in wanted if signal.per_layer]
    scalars = [signal for signal in wanted if not signal.per_layer]
    rows: defaultdict[str, list[Tensor]] = defaultdict(list)  # by signal, [pos] for each layer

    def take(chunks: Chunks) -> None:
        for name, values in read(per_layer, chunks).items():
            rows[name].append(values)

    passes = passes_for(model, signals) if passes is None else passes
    cache = models.new_cache(model) if passes or "keys_values" in needs else None
    with ExitStack() as stack:
        entering = stack.enter_context(watch_entering(model, passes.values()))
        if "hidden" in needs:
            stack.enter_context(models.watch_blocks(model, lambda _, states: take([{"hidden": states[0]}])))
        if "attention" in needs:
            stack.enter_context(models.attention_override(model, WatchedAttention(model, take)))
        with fast_linear():
            states = models.hidden(model, ids[None], cache=cache)[0]
    require_finite(states)
    inputs = {"ids": ids, "counts": counts}
    if cache is not None:
        layers = models.cache_layers(cache)
        inputs |= _second_passes(passes, ids, entering, layers)
        pairs = [(keys[0], values[0]) for keys, values in layers]
        for keys, values in pairs:
            take([{"keys": keys, "values": values}])
        if any("keys" in signal.takes for signal in scalars):
            inputs |= {"keys": torch.stack([k for k, _ in pairs]), "values": torch.stack([v for _, v in pairs])}
    found = read(scalars, [inputs])
    found |= read([signal for signal in scalars if "logits" in signal.takes], predictions(model, states, ids))
    found |= {name: torch.stack(values, -1) for name, values in rows.items()}
    return {signal.name: found[signal.name].float().cpu().numpy() for signal in signals}


def passes_for(model: Model, signals: Sequence[Signal]) -> dict[str, Surprise]:
    """The second passes that these signals take, by the name of their input; ModelRefused where one cannot be run."""
    needs = frozenset[str]().union(*(signal.needs for signal in with_sources(signals)))
    return {name: Surprise(model, variant) for name, variant in PASSES.items() if name in needs}


def _second_passes(
    passes: Mapping[str, Surprise], ids: Int[Tensor, " pos"], entering: Mapping[int, Tensor], layers: Layers
) -> dict[str, Float[Tensor, " pos"]]:
    """By name the scores of each pass over the whole cache, NaN where there is none (5)."""
    positions = torch.arange(len(ids), device=ids.device)[None]
    found = {}
    for name, surprise in passes.items():
        scores = surprise.scores(State(ids[None], positions, entering.get(surprise.start)), layers)
        found[name] = scores.values.masked_fill(~scores.known, torch.nan)[0]
    return found


@contextmanager
def watch_entering(model: Model, passes: Iterable[Surprise]) -> Iterator[dict[int, Tensor]]:
    """Within it the states that enter the blocks at which these passes start are kept, by block."""
    starts = {surprise.start for surprise in passes} - {0}
    kept: dict[int, Tensor] = {}

    def see(layer: int, states: Tensor) -> None:
        if layer + 1 in starts:
            kept[layer + 1] = states

    with models.watch_blocks(model, see) if starts else nullcontext():
        yield kept


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
