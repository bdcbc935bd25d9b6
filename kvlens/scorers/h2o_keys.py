"""`h2o_keys`: heavy hitters without queries, the last keys asking in their place.

1. When an eviction is due, the keys of the last 256 slots of a KV head act as queries: the softmax of their products
   with the held keys over sqrt(d_head), each seeing the slots up to its own position.
2. Summed over these pseudo-queries, and added to what the slot had at the refreshes before; mean over the layers and
   heads that keep the same tokens (with `reduce: all`, the paper's form, over all of them).
3. The sum is gone with its slot. The newest have had few who asked: `protect.recent` (the paper: half the budget).

Defaults: `window` 256, half of the paper's budget of 512: give half of yours. Query-agnostic: keys ask. At refreshes,
prefill included; no attention weights. Cost: products of 256 keys with all, a layer and refresh; carried, 4 bytes a
slot, or a slot and KV head where heads keep different tokens.

Source: the H2O stand-in of counter-causal surprise, arXiv 2607.27600.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kvlens.observables.arithmetic import wide
from kvlens.observables.attention_weights import BLOCK, ROWS, Rule, unseen, weights_without
from kvlens.scorers.asking import QueryWindow
from kvlens.scorers.interface import EMPTY, Facts, Kept, Plain, Views
from kvlens.scorers.per_slot import gathered


@dataclass(frozen=True)
class Before:
    """What every slot had at the last refresh, by set of tokens kept together: one for all layers, or one a layer."""

    layers: tuple[int, ...]
    sums: tuple[Tensor | None, ...]

    def select(self, kept: Kept) -> Before:
        """2. for the slots that stayed: the scores that they were chosen by are their sums."""
        sums = [gathered(scores.float(), kept, which) for which, scores in enumerate(kept.scores)]
        return replace(self, sums=(*sums, *[None] * (len(self.layers) - len(sums))))

    def look_up(self, views: Views) -> Float[Tensor, "batch heads kept"] | float:
        """The sums of the slots shown, 0 for those that came since."""
        own = self.sums[self.layers.index(views.layer)]
        sums = self.sums[0] if own is None else own
        if sums is None:
            return 0.0
        sums = sums[views.rows]
        if views.kv_heads.start is not None:  # one head, without its empty slots
            sums = sums[:, views.kv_heads] if sums.shape[1] > 1 else sums
            sums = sums[~sums.isnan()][None, None]
        sums = sums.to(views.keys.device).nan_to_num(0.0)
        return pad(sums, (0, views.positions.shape[-1] - sums.shape[-1]))


@dataclass(frozen=True)
class H2OKeys(Plain):
    """The weights that the last keys give."""

    window: QueryWindow = 256

    per_layer = True

    def init(self, facts: Facts) -> Before:
        """No refresh."""
        return Before(facts.layers, (None,) * len(facts.layers))

    def score(self, state: Before, views: Views) -> Float[Tensor, "batch heads kept"]:
        """1. and 2."""
        keys = wide(views.keys)
        positions = views.positions.to(keys.device).expand(-1, keys.shape[1], -1)
        # the last real slots of every head, wherever its empty ones stand
        last = (positions != EMPTY).to(torch.int8).sort(dim=-1, stable=True).indices[..., -self.window :]
        asking = keys.take_along_dim(last[..., None], 2)
        asked = positions.take_along_dim(last, -1)
        rule, total = Rule(keys.shape[-1] ** -0.5), torch.zeros_like(keys[..., 0])
        rows = max(ROWS, BLOCK // keys.shape[2])
        for start in range(0, asking.shape[2], rows):
            some = slice(start, start + rows)
            hidden = unseen(positions, asked[:, :, some])
            weights = weights_without(asking[:, :, some], keys, rule, hidden)[0]
            if hidden.shape[-1] == keys.shape[2]:  # else every key that asks sees a slot
                weights.masked_fill_(hidden, 0.0)
            total += weights.sum(2)
        return total + state.look_up(views)
