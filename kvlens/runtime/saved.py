"""How is an evicted cache put on disk and taken up again, policy state included?

1. One safetensors file: keys, values, positions, counts and the scorer's tensors by name, and a header of JSON with the
   few numbers beside them. Nothing in it is run when it is read.
2. `save` writes it whole or not at all.
3. `load` builds an empty cache, adopts it under the run, and puts everything in its place; a file of another model,
   scorer or shape is refused.

The scorer's state is rebuilt on the skeleton that its `init` gives, so its class is never named in the file.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvlens.causal_lm import Model
from kvlens.disk import as_path, disk, write_whole
from kvlens.errors import InputError
from kvlens.runtime.cache import HeldLayer, Ledger, adopt, all_tensors, ledger_of
from kvlens.runtime.ragged import RaggedLayer
from kvlens.runtime.takeover import check_shape, identity
from kvlens.scorers.interface import EMPTY, mapped, tensors

if TYPE_CHECKING:
    from kvlens.runtime.apply import Run

SCHEMA = "kvlens.cache/1"
_COUNTS = ("in_prompt", "since", "step", "holes", "lost")


def save(run: Run, cache: Cache, path: str | Path) -> None:
    """Nothing; the cache is in the file `path`. Raises: InputError for a cache without a policy."""
    ledger = ledger_of(cache)
    if ledger is None:
        raise InputError("this cache is under no policy, so there is nothing of kvlens to save in it")
    if ledger.broken or ledger.driven or not ledger.sets:
        raise InputError("no forward pass with this cache has ended well, so it is not whole", "save a new one")
    meta = _identity(run) | {name: getattr(ledger, name) for name in _COUNTS}
    meta["layers"] = [_numbers(layer) for layer in cache.layers]
    meta["state"] = sorted(name for name, _ in tensors(ledger.state))
    found = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in all_tensors(cache)
    }
    with disk(f"write {path}"):
        write_whole(as_path(path, "cache file"), to_bytes(found, metadata={"kvlens": json.dumps(meta)}))


def load(run: Run, path: str | Path) -> Cache:
    """The cache of the file, to be given to the next forward pass under this run.

    Raises: InputError for what is no such file, or one of another model or scorer.
    """
    path = as_path(path, "cache file")
    if not path.is_file():
        raise InputError(f"there is no cache file '{path}'", "save one with run.save(path)")
    try:
        with disk(f"read {path}"), safe_open(str(path), framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get("kvlens", "null"))
            found = {name: file.get_tensor(name).to(run.model.device) for name in file.keys()}  # noqa: SIM118
        mine = _identity(run)
        other = [name for name in mine if not isinstance(meta, dict) or meta.get(name) != mine[name]]
        if other:
            said = meta.get(other[0]) if isinstance(meta, dict) else None
            raise InputError(
                f"{path} holds a cache whose {other[0]} is {said!r:.100}, not {mine[other[0]]!r:.100}",
                "load it under the model and the scorer it was made with",
            )
        return _rebuilt(run, meta, found)
    except (SafetensorError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"{path} holds no evicted cache: {error!s:.120}", "save one with run.save(path)") from error


def _identity(run: Run) -> dict[str, Any]:
    """What a file and a run must agree on."""
    model = run.model
    return {
        "schema": SCHEMA,
        "model": identity(run),
        "scorer": run.policy.scorer.model_dump(mode="json"),
        "dtype": str(model.dtype),
        "managed": list(run.layers),
    }


def _numbers(layer: Any) -> dict[str, Any]:
    """What a layer knows beside its tensors."""
    if isinstance(layer, RaggedLayer):
        names = ("n_seen", "n_slots", "lengths", "starts", "shape")
        return {name: getattr(layer, name) for name in names}
    if isinstance(layer, HeldLayer):
        return {"n_seen": layer.n_seen}
    return {"n_seen": layer.get_seq_length(), "slides": isinstance(layer, DynamicSlidingWindowLayer)}


def _rebuilt(run: Run, meta: dict[str, Any], found: dict[str, Tensor]) -> Cache:
    """3."""
    cache = DynamicCache(config=run.model.decoder.config)
    skeleton = run.scorer.init(run.facts)
    state = mapped(skeleton, found.get)
    if meta["state"] != sorted(name for name in found if name.startswith("state")):
        raise ValueError("the scorer's state is not whole")
    ledger = Ledger(
        run.scorer, state, run.layers, weakref.ref(run), found["n_own"], found["n_prompt"], model=identity(run)
    )
    adopt(cache, ledger, run.model)
    n_sets = sum(name.startswith("positions.") for name in found)
    ledger.sets = [found[f"positions.{number}"] for number in range(n_sets)]
    for name in _COUNTS:
        setattr(ledger, name, type(getattr(ledger, name))(meta[name]))
    for index, numbers in enumerate(meta["layers"]):
        keys, values = found[f"{index}.keys"], found[f"{index}.values"]
        layer = cache.layers[index]
        if "lengths" in numbers:
            layer = cache.layers[index] = RaggedLayer(ledger, index, *numbers["shape"])
            layer.lengths, layer.starts = list(numbers["lengths"]), list(numbers["starts"])
            layer.n_slots = int(numbers["n_slots"])
        if isinstance(layer, HeldLayer):
            layer.restore(keys, values, int(numbers["n_seen"]))
        else:  # as transformers made it
            if not numbers["slides"]:  # a cache without a config keeps all that a sliding layer saw
                layer = cache.layers[index] = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = int(numbers["n_seen"])
    _check_sizes(run, cache, ledger)
    check_shape(run, cache, ledger)
    return cache


def _check_sizes(run: Run, cache: Cache, ledger: Ledger) -> None:
    """Raise ValueError where the parts of a file do not fit together."""
    model, rows = run.model, len(ledger.n_own)
    held = ledger.sets
    counts = ledger.n_own.shape == ledger.n_prompt.shape == (rows,) and len(held) in (1, len(ledger.layers))
    whole = [*held, ledger.n_own, ledger.n_prompt]
    if not counts or any(part.is_floating_point() or part.lt(EMPTY).any() for part in whole):
        raise ValueError("its positions are none")
    if any(part.ndim == 0 or len(part) != rows for _, part in ledger.tensors()):
        raise ValueError(f"not every part of it has {rows} rows")
    for index, layer in enumerate(cache.layers):
        keys, values = layer.keys, layer.values
        if keys.shape[:-1] != values.shape[:-1] or keys.dtype != values.dtype:
            raise ValueError(f"keys and values of layer {index} are of different kinds")
        if index in ledger.layers:
            _check_layer(model, layer, ledger.set_of(index), rows)


def _check_layer(model: Model, layer: HeldLayer, held: Tensor, rows: int) -> None:
    """The same for one managed layer and its positions."""
    ragged = isinstance(layer, RaggedLayer)
    shape = layer.shape if isinstance(layer, RaggedLayer) else layer.keys.shape[:2]
    fits = held.ndim == 3 and held.shape[1] in (1, model.n_kv_heads) and held.shape[-1] == layer.n_held
    fits = fits and tuple(shape) == (rows, model.n_kv_heads) and layer.keys.ndim == (2 if ragged else 4)
    if not fits or layer.keys.shape[-1] != model.d_head or layer.n_seen < layer.n_held:
        raise ValueError(f"layer {layer.index} and its positions are of different sizes")
    if isinstance(layer, RaggedLayer):
        ends = [s + n for s, n in zip(layer.starts, layer.lengths, strict=True)]
        real = (held != EMPTY).sum(-1).expand(-1, model.n_kv_heads).flatten().tolist()
        inside = max(ends) <= len(layer.keys) and all(e <= s for e, s in zip(ends, layer.starts[1:], strict=False))
        if min(layer.starts) < 0 or layer.lengths != real or not inside:
            raise ValueError(f"layer {layer.index} has heads that end outside their storage")
