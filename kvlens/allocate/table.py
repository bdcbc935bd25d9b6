"""Which allocators are there? One row a method; a new one is one file and one row here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlens.allocate.ada import Ada
from kvlens.allocate.by_table import ByTable
from kvlens.allocate.contour import Contour
from kvlens.allocate.contour_mass import ContourMass
from kvlens.allocate.interface import Allocator
from kvlens.allocate.pyramid import Pyramid
from kvlens.allocate.uniform import Uniform
from kvlens.scorers.table import made

TABLE: dict[str, type[Any]] = {
    "uniform": Uniform,
    "table": ByTable,
    "pyramid": Pyramid,
    "ada": Ada,
    "contour": Contour,
    "contour_mass": ContourMass,
}


def make(name: str, parameters: Mapping[str, Any]) -> Allocator:
    """The allocator of this name with these parameters.

    Raises: InputError for a name or a parameter that there is not, and for a value of the wrong type.
    """
    return made("allocator", TABLE, name, parameters)  # type: ignore[no-any-return]
