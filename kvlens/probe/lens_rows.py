"""The rows of rows.py by another road: TransformerBridge's own patterns, for small studies and as a second opinion.

1. Hooks see each layer's values, keys, pattern (weights of all queries by all keys) and output in turn.
2. When the output comes, which is last, the chosen rows of the pattern are taken and the rest is let go: one layer's
   pattern exists at a time, but that is quadratic in the trace. rows.py is linear.

A learned sink logit has no column in the pattern: what a row lacks to 1 is its share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.errors import InputError
from kvlens.lens import Lens
from kvlens.observables.attention_weights import weighted_values
from kvlens.probe.row_block import RowBlock, RowCheck, make_block
from kvlens.probe.rows import check_queries
from kvlens.records import Tokens

# Where the bridge rotates keys by itself `hook_rot_k` comes after `hook_k`, else keys are as long after as before.
SEEN = {"hook_v": "values", "hook_k": "keys", "hook_rot_k": "keys", "hook_pattern": "weights", "hook_z": "own"}
NO_SHARE = 1e-5  # a sum of float32 weights may miss 1 by less


@torch.no_grad()
def read_rows_by_hooks(
    lens: Lens,
    tokens: Tokens,
    queries: Int[np.ndarray, "layer kv_head row"],
    take: Callable[[RowBlock], None],
) -> RowCheck:
    """The check of the rows at these queries, which `take` is given layer by layer, as `read_rows` does.

    Raises: InputError for queries the trace does not have, or a model in half precision, whose patterns are rounded to
        it; ModelRefused where the model's output is not finite.
    Cost: one forward pass of the bridge; memory one layer's weights of all queries by all keys.
    """
    model = lens.model
    check_queries(model, tokens, queries)
    if model.dtype != torch.float32:
        raise InputError(
            f"{model.name} is in {str(model.dtype)[6:]}, and TransformerBridge's patterns are rounded to it",
            "use --dtype float32, or kvlens.probe.rows, which recomputes the rows",
        )
    total, seen = RowCheck(), dict[str, Tensor]()

    def see(layer: int, name: str, states: Tensor, **_: Any) -> Tensor:
        nonlocal total
        seen[SEEN[name]] = states[0]
        if name == "hook_z":
            block = _from_hooks(tokens.trace.id, layer, queries, seen, model.sliding[layer])
            seen.clear()
            total += RowCheck.of(block)
            take(block)
        return states

    places = {
        f"blocks.{layer}.attn.{name}": partial(see, layer, name) for layer in range(model.n_layers) for name in SEEN
    }
    hooks = [(place, hook) for place, hook in places.items() if place in lens.bridge.hook_dict]
    lens.logits(torch.from_numpy(tokens.ids).to(model.device)[None], hooks)
    return total


def _from_hooks(
    trace_id: str,
    layer: int,
    queries: Int[np.ndarray, "layer kv_head row"],
    seen: dict[str, Tensor],
    window: int | None,
) -> RowBlock:
    """The rows of one layer, from what its hooks saw."""
    values, keys = (seen[name].transpose(0, 1) for name in ("values", "keys"))
    at = torch.from_numpy(queries[layer]).to(values.device)
    index = at.repeat_interleave(seen["weights"].shape[0] // values.shape[0], 0)[..., None]
    weights = seen["weights"].gather(1, index.expand(-1, -1, values.shape[1]))
    missing = 1 - weights.double().sum(-1)
    return make_block(
        trace_id,
        layer,
        at,
        weights,
        values,
        weighted_values(weights.double(), values),
        sink=torch.where(missing > NO_SHARE, missing, 0.0),
        keys=keys,
        own=seen["own"].transpose(0, 1).gather(1, index.expand(-1, -1, values.shape[-1])),
        plain=weighted_values(weights, values),
        window=window,
    )
