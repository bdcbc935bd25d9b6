"""`table`: what a table says, one row a layer of the model and one number a KV head; its mean is the nominal budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.allocate.interface import Cells, Plain


@dataclass(frozen=True)
class ByTable(Plain):
    """The numbers of `table[layer][kv_head]`, the same for every row of the batch."""

    table: tuple[tuple[int, ...], ...]

    def budgets(self, cells: Cells) -> list[Int[Tensor, "1 heads"]]:
        """The layer's row; its first number where heads keep the same tokens."""
        rows = torch.tensor(self.table, device=cells.mean.device)
        return [rows[layer, : held.shape[1]][None] for layer, held in zip(cells.layers, cells.positions, strict=True)]
