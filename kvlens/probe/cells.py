"""Which layers and heads does an intervention touch? The text form `LAYERS[:HEADS]` and the array form.

`3`, `2-5`, `0,4,7-9` name layers (or heads), ends included; `10-20:0,3` is heads 0 and 3 of layers 10 to 20;
several groups are joined by `;`. Heads are query heads.
"""

from __future__ import annotations

import re

import numpy as np
from jaxtyping import Bool

from kvlens.errors import InputError

ALL = "all"


def parse_cells(text: str | None, n_layers: int, n_heads: int) -> Bool[np.ndarray, "layer head"] | None:
    """The (layer, head) cells a text names, or None for all of them.

    Raises: InputError for a malformed text or a layer or head the model does not have.
    """
    if text is None or text == ALL:
        return None
    cells = np.zeros((n_layers, n_heads), dtype=bool)
    for group in text.split(";"):
        layers, colon, heads = group.partition(":")
        chosen = _numbers(heads, n_heads, "head", text) if colon else list(range(n_heads))
        cells[np.ix_(_numbers(layers, n_layers, "layer", text), chosen)] = True
    return None if cells.all() else cells


def name_cells(cells: Bool[np.ndarray, "layer head"] | None) -> str:
    """The shortest text that `parse_cells` reads back to the same cells: what the `cells` column says."""
    if cells is None or bool(cells.all()):
        return ALL
    groups: dict[str, list[int]] = {}
    for layer in np.flatnonzero(cells.any(1)):
        heads = "" if cells[layer].all() else ":" + _ranges(np.flatnonzero(cells[layer]).tolist())
        groups.setdefault(heads, []).append(int(layer))
    return ";".join(_ranges(layers) + heads for heads, layers in groups.items())


def _numbers(text: str, n: int, what: str, whole: str) -> list[int]:
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", piece)
        if match is None:
            raise InputError(f"cells {whole!r}: {piece!r} is no {what}", "write LAYERS[:HEADS], for example 10-20:0,3")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high >= n:
            raise InputError(f"cells {whole!r}: {what} {piece.strip()} does not exist", f"{what}s are 0 to {n - 1}")
        found.extend(range(low, high + 1))
    return found


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
