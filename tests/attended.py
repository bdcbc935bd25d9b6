"""What attention weights a scorer must have gone by: the model's own eager ones, over what a run held."""

from __future__ import annotations

import torch
from tiny import FAMILIES, gemma2, gpt_oss

from kvlens import model as models
from kvlens.model import Model
from kvlens.runtime.apply import Run
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.refresh import of_layer

MADE = FAMILIES | {"gemma2": gemma2, "gpt_oss": gpt_oss}  # a soft cap; a learned sink


def made(name: str) -> Model:
    """The model; with a soft cap under eager attention, since sdpa leaves the cap out."""
    model = models.wrap(MADE[name]())
    if name != "gemma2":
        return model
    model.hf.set_attn_implementation("eager")
    return models.wrap(model.hf)


def eager_weights(model: Model, ids: torch.Tensor, masks: dict[int, torch.Tensor] | None) -> dict[int, torch.Tensor]:
    """By full layer the model's own eager attention weights of a whole text, [head, query, key]."""
    before = model.decoder.config._attn_implementation
    model.hf.set_attn_implementation("eager")
    eager = models.wrap(model.hf)
    found: dict[int, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, out, layer=layer: found.update({layer: out[1][0]}))
        for layer, module in enumerate(eager.layers)
    ]
    try:
        with torch.no_grad():
            if masks is None:
                models.logits(eager, ids[None])
            else:
                with models.layer_masks(eager, masks):
                    models.logits(eager, ids[None])
    finally:
        [handle.remove() for handle in handles]
        model.hf.set_attn_implementation(before)
    return {layer: found[layer] for layer, window in enumerate(model.sliding) if window is None}


def held_and_scores(run: Run) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By layer positions and scores, [batch, kv_head, slots]."""
    ledger, found = ledger_of(run.cache), {}
    for layer in run.layers:
        held = ledger.set_of(layer)
        scores = of_layer(run.cache, ledger, layer, held, run.means)
        found[layer] = held.expand_as(scores), scores
    return found


def over_held(weights: torch.Tensor, held: list[int], window: int) -> torch.Tensor:
    """Weights of the last queries as a softmax over what is held now: a query gave the rest its share too."""
    kept = torch.zeros(weights.shape[-1], dtype=torch.bool)
    kept[held] = True
    found = weights.double().clone()
    found[:, -window:] = found[:, -window:].masked_fill(~kept, 0.0)
    found[:, -window:] /= found[:, -window:].sum(-1, keepdim=True)
    return found


def medoids_by_hand(distances: list[list[float]], there: list[int], k: int) -> set[int]:
    n = len(there)
    if n <= k:
        return set(there)
    chosen = {there[i] for i in range(n) if (i + 1) * k // n > i * k // n}
    for _ in range(8):
        groups: dict[int, list[int]] = {m: [m] for m in sorted(chosen)}
        for p in sorted(set(there) - chosen):
            groups[min(sorted(chosen), key=lambda m: distances[p][m])].append(p)
        moved = {min(sorted(g), key=lambda c: sum(distances[c][p] for p in g)) for g in groups.values()}
        if moved == chosen:
            break
        chosen = moved
    return chosen
