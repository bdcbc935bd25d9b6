"""How does a name become a model to measure?

1. Settle device, dtype and attention backend, and say what this machine lacks for them.
2. Read the weights (builtin.py, weights.py), look the model over (forward.py).
3. Check that caching, masks and overrides do on this model, with these versions, what every measurement rests on
   (selfcheck.py); the verdict is kept in the cache folder.

This is the door to everything that needs transformers' names: other files import from here.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvlens import forward
from kvlens.attention import (
    around_attention,
    attention_override,
    cache_from,
    cache_layers,
    ignores_masks,
    layer_masks,
    new_cache,
    private_cache,
    require_mask,
)
from kvlens.backends import causal_backend
from kvlens.builtin import default_folder
from kvlens.cached import DEFAULT_MODEL, DEFAULT_NOTE
from kvlens.causal_lm import Model, SelfCheck
from kvlens.decoding import generate, stop_ids
from kvlens.disk import as_path
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.forward import (
    attention_modules,
    blocks,
    check_ids,
    hidden,
    learned_positions,
    logits,
    watch_blocks,
    watch_input,
)
from kvlens.provenance import versions
from kvlens.selfcheck import checked, doctor_facts, hooks_bite, self_check
from kvlens.twin import Twin
from kvlens.unembedding import embedding_scale, log_normaliser, mean_embedding, unembed, unembed_at
from kvlens.weights import read_gguf, read_pretrained, recall, refusals, remember, stamp
from kvlens.wording import extra

__all__ = [
    "DEFAULT_MODEL",
    "Model",
    "SelfCheck",
    "Twin",
    "around_attention",
    "as_model",
    "attention_modules",
    "attention_override",
    "blocks",
    "cache_from",
    "cache_layers",
    "causal_backend",
    "check_ids",
    "doctor_facts",
    "embedding_scale",
    "generate",
    "hidden",
    "hooks_bite",
    "ignores_masks",
    "layer_masks",
    "learned_positions",
    "load",
    "log_normaliser",
    "logits",
    "mean_embedding",
    "new_cache",
    "private_cache",
    "require_mask",
    "self_check",
    "stop_ids",
    "unembed",
    "unembed_at",
    "watch_blocks",
    "watch_input",
    "wrap",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("sdpa", "eager", "flash_attention_2", "flex_attention")


def load(
    name: str = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    check: bool = True,
) -> Model:
    """The named model, checked: built-in default, Hugging Face id, local folder or .gguf file.

    Args:
        name: what `-m` takes.
        device: "auto" is the GPU where there is one.
        dtype: "auto" is float32 on the CPU and the checkpoint's own on a GPU.
        attention: "auto" is sdpa.
        check: run the self-check, or read its earlier verdict on the same weights, versions, dtype, device and backend.

    Raises: InputError, EnvironmentLacks, ModelRefused; each says what to do.
    """
    place = _device(device)
    backend = _backend(attention, place)
    if dtype not in ("auto", *DTYPES):
        raise InputError(f"unknown dtype '{dtype}'", f"one of auto, {', '.join(DTYPES)}")
    wanted = DTYPES.get(dtype) or (torch.float32 if place.type == "cpu" else "auto")
    source = _source(name)
    options = {"dtype": wanted, "attn_implementation": backend}
    if isinstance(source, Path) and source.is_file():
        hf_model, tokenizer, note = read_gguf(source, options)
    else:
        hf_model, tokenizer = read_pretrained(source, options)
        note = DEFAULT_NOTE if name == DEFAULT_MODEL else ""
    try:
        hf_model.to(place)
    except torch.OutOfMemoryError as error:
        raise EnvironmentLacks(
            f"'{name}' does not fit into the memory of {place}", "use --dtype bfloat16 or --device cpu"
        ) from error
    with refusals(name, local=True):
        model = _looked_over(hf_model, tokenizer, name=name, note=note, source=source)
    return replace(model, check=checked(model, keep=True)) if check else model


def as_model(model: str | Path | Model, **options: str) -> Model:
    """The model itself where it is loaded already, else `load(model, **options)`."""
    if isinstance(model, Model):
        return model
    if not isinstance(model, (str, Path)):
        kind = type(model).__name__
        raise InputError(f"a {kind} is no model to kvlens", "give a name, or kvlens.model.wrap(hf_model, tokenizer)")
    return load(str(model), **options)  # type: ignore[arg-type]


def wrap(hf_model: Any, tokenizer: Any = None, *, name: str = "in-memory", check: bool = False) -> Model:
    """A model already in memory, for Jupyter and tests; it is put in eval mode, its parameters without gradient.

    Raises: InputError for what is no causal LM; ModelRefused for a layer kind without ordinary keys and values, for a
        weight that is not finite, and, with `check`, for a failed self-check.
    """
    model = forward.wrap(hf_model, tokenizer, name=name)
    return replace(model, check=checked(model)) if check else model


def _source(name: str) -> Path | str:
    """Where a name leads: a model folder or a .gguf file (a Path), or a Hugging Face id (a string)."""
    if name == DEFAULT_MODEL:
        return default_folder()
    try:
        path = as_path(name, "model").expanduser() if name else Path()
    except RuntimeError as error:  # ~name of a user there is not
        raise InputError(f"no such model folder or file: '{name}'", "`kvlens models` lists what is cached") from error
    if name and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if name and path.exists():
        raise InputError(
            f"'{name}' is a file, but no .gguf file", "give a model folder, a .gguf file or a Hugging Face id"
        )
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is None or path.suffix == ".gguf":
        raise InputError(f"no such model folder or file: '{name}'", "`kvlens models` lists what is cached")
    return name


def _looked_over(hf_model: Any, tokenizer: Any, *, name: str, note: str, source: Path | str) -> Model:
    """The wrapped model; hashing its weights is left out where the very same files were hashed before."""
    files = stamp(source)
    key = None if files is None else f"weights-{files}-{hf_model.dtype}-{versions()['transformers']}"
    weights_hash = recall(key) if key else None
    model = forward.wrap(hf_model, tokenizer, name=name, note=note, weights_hash=weights_hash)
    if key and weights_hash is None:
        remember(key, model.fingerprint.partition("-")[2])
    return model


def _device(device: str) -> torch.device:
    """The device asked for."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"unknown device '{device}'", "one of auto, cpu, cuda") from error
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"device '{device}' is not supported", "one of auto, cpu, cuda")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise EnvironmentLacks(f"device '{device}' was asked for, but this machine has no such GPU", "use --device cpu")
    return place


def _backend(attention: str, place: torch.device) -> str:
    """The attention backend asked for, under transformers' name."""
    if attention == "auto":
        return "sdpa"
    if attention not in BACKENDS:
        raise InputError(f"unknown attention backend '{attention}'", f"one of auto, {', '.join(BACKENDS)}")
    if attention == "flex_attention" and place.type == "cpu":
        # torch's CPU kernel ends the whole process where queries and keys differ in number
        raise EnvironmentLacks("flex_attention needs a CUDA GPU", "use --attention sdpa")
    if attention == "flash_attention_2":
        if place.type != "cuda":
            raise EnvironmentLacks("flash_attention_2 needs a CUDA GPU", "use --attention sdpa")
        if importlib.util.find_spec("flash_attn") is None:
            raise EnvironmentLacks("flash_attention_2 needs the package flash-attn", extra("flash"))
    return attention
