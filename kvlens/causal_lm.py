"""What is a model to kvlens, and which model is it?

1. `Model`: a causal LM with the facts every stage needs, and `SelfCheck`: what the start-up check found on it.
2. `fingerprint_of`: two hashes, of the config and of the weights, the same wherever and however the model was loaded.
   On the way every weight is looked at once: NaN or infinity is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvlens.errors import ModelRefused

# Where and by what a model was loaded and run is no part of which model it is.
_NOT_IDENTITY = {
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
}


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the start-up check found: five verdicts, the largest differences behind them, all in nats.

    Differences are root mean squares over the vocabulary of two log-prob rows, the largest row counts.
    `moved_nats` is how far hiding keys moved the rows: a mask that moves nothing was not honoured.
    """

    cached_ok: bool
    mask_ok: bool
    noop_ok: bool
    unembed_ok: bool
    override_ok: bool
    cached_nats: float
    mask_nats: float
    moved_nats: float
    noop_nats: float
    unembed_nats: float
    override_nats: float
    tolerance_nats: float
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Model:
    """A causal LM ready to be asked, with the facts every stage needs; made by `load` and `wrap`.

    `hf` is the transformers model (eval mode, no gradients), `name` what `-m` said, `fingerprint` two hashes (config,
    weights), `sliding` per layer the window in tokens or None for full attention, `attention` the backend, `note` what
    every table must say about the weights, `layers` the attention modules in layer order, `check` the self-check if it
    ran.
    """

    hf: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str
    fingerprint: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    d_vocab: int
    max_context: int
    sliding: tuple[int | None, ...]
    attention: str
    note: str = ""
    layers: tuple[nn.Module, ...] = field(default=(), repr=False)
    check: SelfCheck | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """The device of the model's weights; of the first that runs where they lie on several, or come when asked."""
        return device_of(self.hf)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return next(self.hf.parameters()).dtype

    @property
    def decoder(self) -> Any:
        """The part from token ids to final-normed hidden states."""
        return self.hf.get_decoder()


def device_of(hf_model: nn.Module) -> torch.device:
    """Where a model takes its input: where its first weights are, or where accelerate brings them for a call."""
    first = next(hf_model.parameters()).device
    if first.type == "meta":
        hooks = (getattr(module, "_hf_hook", None) for module in hf_model.modules())
        places = (getattr(hook, "execution_device", None) for hook in hooks)
        return next((torch.device(place) for place in places if place is not None), first)
    return first


def fingerprint_of(hf_model: Any, name: str, weights_hash: str | None = None) -> str:
    """`<config sha256[:16]>-<weights sha256[:16]>`, the same for every device, path and lossless wider dtype.

    `weights_hash` is the second half where it is known already.

    Raises: ModelRefused on a weight that is NaN or infinite, naming it.
    Cost: one pass over the weights, about a second per GB.
    """
    canonical = json.dumps(_identity(hf_model.config.to_diff_dict()), sort_keys=True, default=str)
    weights_hash = weights_hash or _weights_hash(hf_model, name)
    return f"{hashlib.sha256(canonical.encode()).hexdigest()[:16]}-{weights_hash[:16]}"


def _identity(config: Any) -> Any:
    """The config without the keys that say where and by what it was loaded, at every depth."""
    if isinstance(config, dict):
        return {str(key): _identity(value) for key, value in config.items() if key not in _NOT_IDENTITY}
    return config


def _weights_hash(hf_model: Any, name: str) -> str:
    """The sha256 over name, shape and float32 values of every weight in order of name, tied weights once."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    for key, weight in sorted(hf_model.state_dict(keep_vars=True).items()):
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        values = weight.detach()
        if values.is_floating_point():
            low, high = values.aminmax() if values.numel() else (torch.zeros(()), torch.zeros(()))
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                raise ModelRefused(
                    f"{name}: weight '{key}' holds NaN or infinite numbers, so every result would",
                    "fetch or convert the weights again",
                )
            values = values.float()
        digest.update(f"{key}{tuple(values.shape)}".encode())
        digest.update(memoryview(values.contiguous().cpu().numpy()).cast("B"))
    return digest.hexdigest()
