"""What does a call of the model bring, and how is the model taken as it is given and given back as it was?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvlens import forward
from kvlens.causal_lm import Model
from kvlens.errors import InputError
from kvlens.runtime.cache import Ledger
from kvlens.scorers.interface import EMPTY

CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on, and before


@dataclass
class Pass:
    """One forward pass under way."""

    ledger: Ledger
    cache: Cache
    positions: Int[Tensor, "batch new"]
    own: Bool[Tensor, "batch new"] | None
    evicted: bool
    hidden: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    spread: dict[int, Tensor] = field(default_factory=dict)
    ids: Int[Tensor, "batch new"] | None = None
    notes: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def n_new(self) -> int:
        return self.positions.shape[1]


def cache_of(decoder: nn.Module, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    """Under which keyword the decoder takes its cache, and what came under it."""
    for name in CACHE_NAMES:
        if name in kwargs:
            return name, kwargs[name]
    return next(name for name in CACHE_NAMES if name in signature(decoder.forward).parameters), None


def by_name(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call under the names that the decoder gives them, so that none is overlooked; the nameless."""
    parameters = signature(decoder.forward).parameters.values()
    names = [one.name for one in parameters if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    return args[len(names) :], dict(zip(names, args, strict=False)) | dict(kwargs)


def check_rows(ledger: Ledger, batch: int) -> None:
    """Raise InputError where a call brings other rows than its cache holds."""
    if len(ledger.n_own) != batch:
        raise InputError(
            f"this cache holds {len(ledger.n_own)} rows, and the call brings {batch}",
            "start a new cache, or choose its rows with batch_select_indices or batch_repeat_interleave",
        )


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], reader: str | None) -> Tensor:
    """The new tokens' ids, or their embeddings where the call gives those.

    Raises: InputError for embeddings where a scorer (`reader`) needs ids.
    """
    given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args]
    inputs: Tensor = next(inputs for inputs in given if inputs is not None)
    if reader is not None and inputs.ndim != 2:
        raise InputError(
            f"scorer {reader} reads token ids, and this call gives embeddings",
            "call the model with input_ids, or choose another scorer",
        )
    return inputs


@contextmanager
def looked_over(hf_model: Any) -> Iterator[Model]:
    """The model as kvlens sees it; training mode and gradients are put back after."""
    training = getattr(hf_model, "training", False)
    wanted = (
        [weight for weight in hf_model.parameters() if weight.requires_grad] if hasattr(hf_model, "parameters") else []
    )
    try:
        yield forward.wrap(hf_model, weights_hash="not-asked")
    finally:
        for weight in wanted:
            weight.requires_grad_(True)
        if training:
            hf_model.train()


def new_positions(
    ledger: Ledger, mask: Tensor | Mapping[str, Any] | None, n_new: int
) -> tuple[Int[Tensor, "batch new"], Bool[Tensor, "batch new"] | None]:
    """Positions of the next tokens of every row (-1 for padding), and which are no padding (None: all).

    `mask` is a model call's attention mask; one of [batch, tokens] says which tokens are padding.

    Raises: InputError for masks by kind of layer, which say nothing of padding.
    """
    if isinstance(mask, Mapping):
        raise InputError(
            f"a policy takes one attention mask, not one for each of {', '.join(map(str, mask))!r:.80}",
            "give the mask of [batch, tokens] that says which tokens are padding, or none",
        )
    before = ledger.n_own[:, None]
    if mask is not None and mask.ndim == 2:
        own = mask[:, mask.shape[1] - n_new :].to(device=before.device, dtype=torch.bool)
        if not bool(own.all()):
            return (before + own.cumsum(-1) - 1).masked_fill(~own, EMPTY), own
    return before + torch.arange(n_new, device=before.device), None
