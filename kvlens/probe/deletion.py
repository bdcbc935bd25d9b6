"""What does evicting a window cost when its rows really leave the cache?

The engine for attention backends that take no 4-D mask (FlashAttention), and the second leg of the keystone identity:
hiding keys by a mask gives what deleting their rows gives. The model's own backend does all attention.

1. prefill positions [0, n - 1) once, in chunks, through an ordinary growing cache;
2. evict: copy the rows that stay into a fresh cache, absolute positions kept, rows of a batch grouped by how many
   keys they lose; substitute: expand the prefix before the window and recompute the rest with other ids;
3. run the remaining tokens over that cache and read the target.

A sliding-window layer asks how far back a key stands. Once rows are gone, a key's index in the cache no longer says
so; a mask over the keys' true positions does, so there the backend must honour masks or the model is refused. A key
that has left a layer's window is invisible there whether it is deleted or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model
from kvlens.probe.attention import KeyValues
from kvlens.probe.occlusion import PREFILL_CHUNK, Counterfactual, Engine, Intervention
from kvlens.probe.readout import Metric
from kvlens.records import Tokens


class DeletionOccluder(Engine):
    """The engine without masks: `evict` deletes cache rows, `substitute` recomputes; nothing else can be asked of it.

    Cost: as many recomputed tokens as the fast engine. Memory: a copy of the prefix cache for every row of a batch.
    Raises: InputError for knockout, lag or cells; ModelRefused where sliding-window layers meet a backend that
        ignores masks.
    """

    def __init__(self, model: Model, tokens: Tokens, how: Intervention, *, metric: Metric | None = None) -> None:
        refuse_what_needs_a_mask(model, how)
        super().__init__(model, tokens, how, metric=metric)

    def _prefill(self, ids: Int[Tensor, " pos"]) -> list[KeyValues]:
        cache = models.new_cache(self.model)
        for lo in range(0, max(1, ids.shape[0]), PREFILL_CHUNK):
            models.hidden(self.model, ids[None, lo : lo + PREFILL_CHUNK], cache=cache)
        return models.cache_layers(cache)

    def _states(self, batch: Sequence[Counterfactual]) -> Tensor:
        lost = [self._lost(c) for c in batch]
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (c, gone) in enumerate(zip(batch, lost, strict=True)):
            # Rows that lose nothing may start earlier than they need to; the others start where their keys go.
            groups.setdefault((len(gone), c.first if len(gone) else 0), []).append(row)
        states: dict[int, Tensor] = {}
        for rows in groups.values():
            found = self._group_states([batch[row] for row in rows], [lost[row] for row in rows])
            states |= dict(zip(rows, found, strict=True))
        return torch.stack([states[row] for row in range(len(batch))])

    def _lost(self, c: Counterfactual) -> Int[np.ndarray, " lost"]:
        """Positions of the cache rows a counterfactual deletes."""
        lost = np.flatnonzero(c.hidden) if c.hidden is not None else np.array([], dtype=np.int64)
        if len(lost) and (c.cut != c.first or lost[-1] >= c.first):
            raise InputError(
                f"{self.tokens.trace.id}: key {lost[-1]} is to be hidden from queries at {c.cut} on, tokens from "
                f"{c.first} on being recomputed: rows can only be deleted before the first recomputed token reads them",
                "use --attention sdpa or eager",
            )
        return lost

    def _group_states(self, rows: Sequence[Counterfactual], lost: Sequence[Int[np.ndarray, " lost"]]) -> Tensor:
        """Hidden states at the target's rows, for rows that each lose the same number of keys."""
        first = min(c.first for c in rows)
        kept = torch.from_numpy(np.stack([np.delete(np.arange(first), gone) for gone in lost])).to(self.ids.device)
        cache = models.cache_from(self.model, [self._rows_of(pair, kept) for pair in self.prefix])
        ids = self.row_ids(rows)[:, first:]
        positions = torch.arange(first, self.n_inputs, device=ids.device)
        mask = key_positions = None
        if any(self.model.sliding) and kept.shape[1] < first:
            key_positions = torch.cat([kept, positions.expand(len(rows), -1)], 1)
            mask = (key_positions[:, None, :] <= positions[:, None])[:, None]
        states = models.hidden(
            self.model, ids, positions=positions, cache=cache, mask=mask, key_positions=key_positions
        )
        return states[:, self.last - first :]

    @staticmethod
    def _rows_of(pair: KeyValues, kept: Int[Tensor, "row kept"]) -> KeyValues:
        """The kept rows of one layer's keys and values, [row, kv_head, kept, d_head], in memory of their own."""
        keys, values = (torch.stack([states[0].index_select(1, row) for row in kept]) for states in pair)
        return keys, values


def refuse_what_needs_a_mask(model: Model, how: Intervention) -> None:
    """Nothing; raises where an intervention on this model cannot be done by deleting cache rows."""
    asked = [
        name
        for name, present in (
            ("knockout", how.kind == "knockout"),
            ("a lag", how.lag is not None),
            ("a choice of layers and heads", how.cells is not None),
        )
        if present
    ]
    if asked:
        raise InputError(
            f"{model.name}, attention backend {model.attention!r}: {' and '.join(asked)} cannot be had by deleting "
            "cache rows, only by attention masks",
            "use --attention sdpa or eager, or evict or substitute without --lag and --cells",
        )
    if how.kind == "evict" and any(model.sliding):
        try:
            models.require_mask(model)
        except ModelRefused as error:
            raise ModelRefused(
                f"{model.name} has sliding-window layers: once rows are deleted only a mask tells what their window "
                f"holds, and backend {model.attention!r} ignores masks",
                "use --attention sdpa or eager, or --intervention substitute",
            ) from error
