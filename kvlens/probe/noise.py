"""How small an effect can this run tell from nothing?

Repeats at one batch shape are bit-equal and prove nothing. So: recompute some windows of each trace in batches of
another shape and take the differences; for half precision also against a float32 copy of the same model. oneDNN's
linear layers give a row the same bits in every batch, so where the engine uses them the windows are recomputed with
PyTorch's own kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np
import torch
from jaxtyping import Float

from kvlens import model as models
from kvlens.linear import kernel
from kvlens.model import Model
from kvlens.probe.occlusion import Engine, Intervention, Occluder
from kvlens.records import Tokens

N_WINDOWS = 16
Window = tuple[int, int]


def spread(indices: Sequence[int], n: int = N_WINDOWS) -> list[int]:
    """Up to n of the indices, evenly spread over them."""
    if len(indices) <= n:
        return list(indices)
    return [indices[round(i * (len(indices) - 1) / (n - 1))] for i in range(n)]


def other_size(usual: Collection[int]) -> int:
    """A number of windows a batch that is none of the usual ones, and smaller than the largest where one is."""
    largest = max(usual, default=1)
    return next((size for size in (3, 2, 1) if size < largest and size not in usual), largest + 1)


def recompute(engine: Engine, windows: Sequence[Window], usual: Collection[int]) -> Float[np.ndarray, " window"]:
    """Effects in nats of the windows, in batches of a size that is none of the `usual` ones."""
    size = other_size(usual)
    found: list[float] = []
    for lo in range(0, len(windows), size):
        members = list(windows[lo : lo + size])
        filled = members + [members[-1]] * (size - len(members))
        effects = engine.run([engine.counterfactual(window) for window in filled])
        lost = (engine.reference.log_probs - effects.log_probs).sum(-1)
        found += lost[: len(members)].tolist()
    return np.array(found)


def fp32_copy(model: Model) -> Model:
    """The same weights in float32: what half precision is measured against."""
    twin = copy.deepcopy(model.hf).float()
    return models.wrap(twin, model.tokenizer, name=f"{model.name} (float32 copy)")


def in_float32(
    twin: Model, tokens: Tokens, how: Intervention, windows: Sequence[Window]
) -> Float[np.ndarray, " window"]:
    """Effects in nats of the windows on the float32 copy."""
    return recompute(Occluder(twin, tokens, how), windows, usual=())


def has_two_kernels(model: Model) -> bool:
    """Whether the engine multiplies this model's matrices by another kernel than PyTorch would choose."""
    return kernel() == "oneDNN" and model.dtype == torch.float32 and model.device.type == "cpu"


def is_half(model: Model) -> bool:
    """Whether the model computes in fewer than 32 bits."""
    return model.dtype in (torch.bfloat16, torch.float16)
