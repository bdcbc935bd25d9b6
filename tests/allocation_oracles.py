"""How many tokens each cell keeps, the slow and obvious way: one row in plain Python, sorted lists and fractions.

A cell is a list of (position, score, protected); a row is a list of layers, each a list of cells.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import chain

Slot = tuple[int, float, bool]
Row = list[list[list[Slot]]]


def rank(slot: Slot) -> tuple[int, float, int]:
    """What stays first sorts first: protected, then not judged (NaN), then by score, then by position."""
    position, score, safe = slot
    if safe:
        return 0, 0.0, position
    return (1, 0.0, position) if math.isnan(score) else (2, -score, position)


def whole(row: Row, mean: int) -> int:
    """The tokens that a row keeps."""
    cells = list(chain.from_iterable(row))
    return min(mean * len(cells), sum(map(len, cells)))


def contour(row: Row, mean: int) -> list[list[list[int]]]:
    """Positions that each cell keeps: the first of all slots in the order of ranks, then layers, then heads."""
    slots = [
        (rank(slot), layer, head) for layer, cells in enumerate(row) for head, cell in enumerate(cells) for slot in cell
    ]
    kept = [[[] for _ in cells] for cells in row]
    for (_, _, position), layer, head in sorted(slots)[: whole(row, mean)]:
        kept[layer][head].append(position)
    return [[sorted(cell) for cell in cells] for cells in kept]


def ada(row: Row, mean: int, alpha: str) -> list[list[list[int]]]:
    """The same for layers apart, every head's own best first; for layers that hold as much as their share."""
    floor, found = int(Fraction(alpha) * mean), []
    for cells in row:
        own = [sorted(cell, key=rank)[:floor] for cell in cells]
        marked = [
            [(position, score, safe or (position, score, safe) in mine) for position, score, safe in cell]
            for cell, mine in zip(cells, own, strict=True)
        ]
        found += contour([marked], mean)
    return found


def one_by_one(wanted: list[float], least: list[int], most: list[int], total: int) -> list[int]:
    """Whole numbers between bounds, by raising t until the next token would be too many, fractions as they come."""
    steps = sorted({Fraction(k) - Fraction(w) for w in wanted for k in range(-max(most) - 50, max(most) + 50)})
    found = least
    for t in steps:
        bounds = zip(wanted, least, most, strict=True)
        more = [min(max(math.floor(Fraction(w) + t), low), high) for w, low, high in bounds]
        if sum(more) > total:
            for cell in range(len(wanted)):  # several reach a whole number at once: the first of them
                if sum(found) < total:
                    found = [*found[:cell], more[cell], *found[cell + 1 :]]
            return found
        found = more
    return found


def dropped(cell: list[Slot], mean: int) -> Fraction:
    """The share of a cell's mass outside its best slots."""
    mass = sorted((Fraction(score) for _, score, _ in cell if not math.isnan(score)), reverse=True)
    return sum(mass[mean:], Fraction(0)) / sum(mass) if sum(mass) else Fraction(0)
