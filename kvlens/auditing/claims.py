"""How many bytes does a policy say its own state takes? Computed from parameters and shapes, never from what it stores.

1. The scorer is shown as many tokens as the text has, all of them zeros of the model's shapes and dtype.
2. It is told which positions stay (under `uniform` never more than the budget holds): a state that remembers tokens
   which any layer still holds is larger the less the layers agree.
3. The state it then has, and the positions of what stays, are what the policy declares beside keys and values.

So a runtime that keeps more than this (an old storage behind a view, rows that should have left) breaks its claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.auditing.bytes import storage_bytes
from kvlens.model import Model
from kvlens.observables.attention_weights import Rule
from kvlens.policy import Policy
from kvlens.runtime import budget
from kvlens.runtime.rotary import rotations
from kvlens.scorers.interface import (
    HIDDEN,
    IDS,
    KEYS,
    NOTES,
    QUERIES,
    RECEIVED,
    ROTATION,
    SPREAD,
    VALUES,
    Asked,
    Facts,
    Kept,
    Seen,
    select,
    tensors,
)


def declared_bytes(
    policy: Policy,
    model: Model,
    ids: Int[Tensor, "1 seen"],
    facts: Facts,
    stays: Sequence[Int[Tensor, "1 heads _"]],
) -> int:
    """Bytes of the state and the positions that this policy keeps beside keys and values; `stays` as the ledger has it.

    Cost: what the scorer's `observe` costs for one pass.
    """
    prompt = torch.tensor([ids.shape[1]], device=ids.device)
    kept = [positions.clone() for positions in stays]
    if policy.allocate.name == "uniform":
        tokens = budget.nominal(policy, budget.fixed_tokens(policy, model, facts.layers), prompt, facts.layers)
        kept = [positions[..., : int(tokens)].clone() for positions in kept]
    scorer = policy.scorer.make()
    state = scorer.init(facts)
    state = scorer.observe(state, _zeros(scorer, state, model, ids, facts))  # 1.
    if any(positions.shape[-1] < ids.shape[1] for positions in kept):
        worth = [torch.zeros((1, positions.shape[1], ids.shape[1]), device=ids.device) for positions in kept]
        state = select(state, Kept(kept, [positions.long().clamp(min=0) for positions in kept], worth))  # 2.
    counts = 2 * prompt.element_size()  # how many tokens came, and how many of them are prompt
    positions = sum(positions.numel() * positions.element_size() for positions in kept)
    return storage_bytes(tensor for _, tensor in tensors(state)) + positions + counts  # 3.


def _zeros(scorer: Any, state: Any, model: Model, ids: Int[Tensor, "1 seen"], facts: Facts) -> Seen:
    n = ids.shape[1]

    def made(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=ids.device)

    def by_layer(name: str, *shape: int, dtype: torch.dtype = model.dtype) -> dict[int, Tensor]:
        return {layer: made(*shape, dtype=dtype) for layer in facts.layers} if name in scorer.needs else {}

    hidden = {layer: made(1, n, model.d_model) for layer in scorer.hidden_layers(facts)}
    positions = torch.arange(n, device=ids.device)[None]
    notes: dict[int, tuple[Tensor, ...]] = {}
    if NOTES in scorer.needs:
        turns = rotations(model, facts.layers) if ROTATION in scorer.needs else {}
        for layer in facts.layers:
            query, key = made(1, facts.n_heads, n, facts.d_head), made(1, facts.n_kv_heads, n, facts.d_head)
            asked = Asked(layer, positions, query, key, Rule.of_call(query, None, {}), turns.get(layer))
            notes[layer] = scorer.note(state, asked)
    return Seen(
        positions=positions,
        in_prompt=True,
        keys=by_layer(KEYS, 1, facts.n_kv_heads, n, facts.d_head),
        values=by_layer(VALUES, 1, facts.n_kv_heads, n, facts.d_head),
        hidden=hidden if HIDDEN in scorer.needs else {},
        queries=by_layer(QUERIES, 1, facts.n_heads, min(n, scorer.n_queries), facts.d_head),
        received=by_layer(RECEIVED, 1, facts.n_kv_heads, n, dtype=torch.float32),
        spread=by_layer(SPREAD, 1, 2, n, dtype=torch.float32),
        ids=ids if IDS in scorer.needs else None,
        notes=notes,
    )
