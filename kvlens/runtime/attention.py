"""What may a new token see in a cache whose slots are no longer a prefix of the text?

1. As long as no layer has lost a slot, nothing is changed: transformers' own masks are right, bit for bit.
2. After that every managed layer gets a mask of its own, since layers and heads may hold different tokens: all held
   slots but the empty ones, then the new tokens causally, without padding. Every new token sees itself, so that no row
   sees nothing; what padding puts out is read by nobody.
3. One new token and no empty slot: no mask at all, the backend's fastest path.

Positions play no part: all held tokens came before all new ones.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from kvlens.attention import additive
from kvlens.causal_lm import Model
from kvlens.errors import InputError, ModelRefused
from kvlens.runtime.cache import Ledger
from kvlens.scorers.interface import EMPTY


def visible(
    ledger: Ledger, layer: int, n_heads: int, n_new: int, own: Bool[Tensor, "batch new"] | None
) -> Bool[Tensor, "batch heads new key"] | None:
    """2. and 3. for one layer, heads 1 or all; None: everything, causally."""
    held = ledger.set_of(layer)
    if own is None and not ledger.holes and n_new == 1:
        return None
    new = torch.ones(n_new, n_new, dtype=torch.bool, device=held.device).tril()[None, None]
    if own is not None:
        new = new & own[:, None, None] | torch.eye(n_new, dtype=torch.bool, device=held.device)
    full = held != EMPTY if ledger.holes else torch.ones((1, 1, held.shape[-1]), dtype=torch.bool, device=held.device)
    batch, heads = max(full.shape[0], new.shape[0]), full.shape[1]
    before = full[:, :, None].expand(batch, heads, n_new, -1)
    mask = torch.cat([before, new.expand(batch, heads, -1, -1)], -1)
    return mask if heads == 1 else mask.repeat_interleave(n_heads // heads, 1)


def layer_mask(
    model: Model, ledger: Ledger, layer: int, n_new: int, own: Bool[Tensor, "batch new"] | None
) -> Tensor | None:
    """The mask in the form that the model's backend takes."""
    if not model.attention.startswith("flash"):
        mask = visible(ledger, layer, model.n_heads, n_new, own)
        return mask if mask is None or model.attention == "sdpa" else additive(mask, model.dtype)
    # FlashAttention aligns its causal mask to the end by itself and takes [batch, key] for padding
    held = ledger.set_of(layer)
    if own is None and not ledger.holes:
        return None
    if held.shape[1] > 1:
        raise ModelRefused(
            f"{model.attention} takes no mask that differs from head to head",
            "use storage 'ragged', or attention sdpa",
        )
    new = torch.ones((held.shape[0], n_new), dtype=torch.bool, device=held.device) if own is None else own
    return torch.cat([held[:, 0] != EMPTY, new], -1)


def check_given_mask(mask: Tensor, ledger: Ledger, n_keys: int) -> None:
    """Raise InputError for a 4-D mask that cannot be laid over what the layers hold."""
    if mask.shape[-1] != n_keys or len(ledger.sets) > 1 or ledger.holes:
        raise InputError(
            f"an attention mask over {mask.shape[-1]} keys for an evicted cache of {n_keys}, new tokens included",
            "leave the mask out: held tokens are visible, new ones causally",
        )


def check_past(mask: Any, ledger: Ledger, n_seen: int, n_new: int) -> None:
    """Raise InputError for a mask of [batch, tokens] that hides tokens which were no padding when they came."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != n_seen + n_new:
        return
    shown = mask[:, :n_seen].to(device=ledger.n_own.device, dtype=torch.bool).sum(-1)
    if bool((shown != ledger.n_own).any()):
        raise InputError(
            "an attention mask over an evicted cache cannot hide what it was not told to be padding, nor show padding",
            "give the mask that these tokens came with, continued with ones",
        )


def with_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
    """The keywords of an attention module's call with this mask in them, where what it attends for is."""
    # its weights may be elsewhere: they are fetched for the call, and what it is given moves with them
    device = next(given.device for given in (*args, *kwargs.values()) if isinstance(given, Tensor))
    if "attention_mask" not in kwargs:
        raise ModelRefused(f"{type(module).__name__} takes its mask in a way that policies do not know")
    return kwargs | {"attention_mask": mask if mask is None else mask.to(device)}
