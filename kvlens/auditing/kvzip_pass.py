"""How does KVzip's press decide? By its own methods, over a cache that was prefilled.

1. The press cuts the context into chunks and writes after each an instruction to repeat it (`prepare`).
2. Instruction and chunk go through the model over the cache; after each layer the press scores the chunk's keys by the
   attention they got (`score_kvzip`), and the layer holds the context alone again.
3. `compress_post` marks the lowest over all layers and heads; nothing leaves the storage.

The press' own `__call__` reads its tokenizer from the network and assumes that the context was rendered by a chat
template; here the model's tokenizer is at hand and the context is plain, so there is no prefix and a newline follows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvlens import model as models
from kvlens.auditing.press_hooks import arguments_of, hooks
from kvlens.errors import ModelRefused
from kvlens.linear import fast_linear
from kvlens.model import Model


def kvzip_pass(press: Any, model: Model, cache: Any, ids: Int[Tensor, "1 seen"]) -> dict[int, Tensor]:
    """The press' scores by layer; the modules carry what the press marked, the cache holds what it held.

    Raises: ModelRefused for a model with sliding layers, whose rows the press' scores are not for.
    Cost: a forward pass over as many tokens as the context has, over the context.
    """
    if any(window is not None for window in model.sliding):
        raise ModelRefused(f"{model.name}: KVzip's press scores every layer, and some of these slide", "leave it out")
    tokenizer = model.tokenizer
    press._context_ids, press._cache, press.prefix_length = ids, cache, 0
    press._suffix_ids = tokenizer.encode("\n", return_tensors="pt", add_special_tokens=False)
    press.context_length = ids.shape[1]

    def after(index: int, module: nn.Module, called: tuple[Any, ...]) -> None:
        hidden, kwargs, attention = called
        layer = cache.layers[index]
        keys, values = press.score_kvzip(
            module, hidden, layer.keys, layer.values, attention, kwargs | arguments_of(cache, hidden, kwargs)
        )
        layer.keys, layer.values = keys.clone(), values.clone()  # a slice would keep the longer storage alive

    shown = SimpleNamespace(
        model=SimpleNamespace(layers=[SimpleNamespace(self_attn=module) for module in model.layers]),
        config=model.decoder.config,
        dtype=model.dtype,
        device=model.device,
    )
    try:
        start = 0
        with torch.inference_mode(), fast_linear(), hooks(model, after):
            for chunk, repeat in press.prepare(shown, tokenizer):
                press.start_idx, press.end_idx = start, start + chunk.shape[1]
                models.hidden(model, repeat.to(model.device), cache=cache)
                start += chunk.shape[1]
        if press.compression_ratio > 0:
            press.compress_post(shown)
        return dict(enumerate(press.score_val))
    finally:
        press._reset_internal_parameters()
