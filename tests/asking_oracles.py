"""What a model asks with, read off the model itself while it runs: before rotation, after it, and what it looked at."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from tiny import FAMILIES, llama, phi3
from transformers import PreTrainedModel

from kvlens import model as models
from kvlens.model import Model
from kvlens.runtime.apply import Run
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.refresh import of_layer

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def yarn() -> PreTrainedModel:
    """Angles that are scaled, and products too."""
    return llama(rope_parameters=YARN)


def partial_phi3() -> PreTrainedModel:
    """Half of the dimensions turn."""
    return phi3(rope_parameters=PARTIAL)


MADE = FAMILIES | {"yarn": yarn, "partial_phi3": partial_phi3}


class Asking:
    """By layer, float64: queries and keys before (`plain`) and after rotation, and the function that turned them.

    `turn(layer, states [head, pos, d], positions)` turns other states as that layer turns its own.
    """

    def __init__(
        self, model: Model, ids: torch.Tensor, masks: Mapping[int, torch.Tensor] | None, monkeypatch: Any
    ) -> None:
        self.model = model
        self.plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        module = sys.modules[type(model.layers[0]).__module__]
        self.own = getattr(module, "apply_rotary_pos_emb", None)

        def record(q: torch.Tensor, k: torch.Tensor, *angles: Any, **more: Any) -> Any:
            self.plain.append((q[0].double(), k[0].double()))
            return self.own(q, k, *angles, **more)

        def see(layer: int, run: Any, query: torch.Tensor, key: torch.Tensor, *_: Any) -> torch.Tensor:
            self.asked[layer] = query[0].double(), key[0].double()
            return run()

        with monkeypatch.context() as patch, torch.no_grad():
            if self.own is not None:
                patch.setattr(module, "apply_rotary_pos_emb", record)
            with models.layer_masks(model, masks or {}), models.around_attention(model, see):
                models.logits(model, ids[None])
        if self.own is None:
            self.plain = [self.asked[layer] for layer in range(model.n_layers)]

    def turn(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.own is None:
            return states
        kinds = [self.model.decoder.config.layer_types[layer]] if "Gemma3" in type(self.model.hf).__name__ else []
        cos, sin = self.model.decoder.rotary_emb(torch.zeros(1, dtype=torch.float64), positions[None], *kinds)
        return self.own(states[None], states[None], cos, sin)[0][0]


def held_and_scores(run: Run) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By layer positions and scores, [batch, kv_head, slots]."""
    ledger, found = ledger_of(run.cache), {}
    for layer in run.layers:
        held = ledger.set_of(layer)
        scores = of_layer(run.cache, ledger, layer, held, run.means)
        found[layer] = held.expand_as(scores), scores
    return found


def seen_weights(
    model: Model, ids: torch.Tensor, masks: Mapping[int, torch.Tensor] | None = None
) -> dict[int, torch.Tensor]:
    """By layer the model's own eager attention weights of a text, [head, query, key]."""
    before = model.decoder.config._attn_implementation
    model.hf.set_attn_implementation("eager")
    eager, found = models.wrap(model.hf), {}
    handles = [
        module.register_forward_hook(lambda _, __, out, layer=layer: found.update({layer: out[1][0].double()}))
        for layer, module in enumerate(eager.layers)
    ]
    try:
        with torch.no_grad(), models.layer_masks(eager, masks or {}):
            models.logits(eager, ids[None])
    finally:
        [handle.remove() for handle in handles]
        model.hf.set_attn_implementation(before)
    return found
