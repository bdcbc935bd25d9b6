"""Which scorers are there? One row a method; a new one is one file and one row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from kvlens.errors import InputError
from kvlens.scorers.band_adaptive import BandAdaptive
from kvlens.scorers.compactor import Compactor
from kvlens.scorers.expected_attention import ExpectedAttention
from kvlens.scorers.fitted import Fitted
from kvlens.scorers.h2o import H2O
from kvlens.scorers.hidden_change import EpiKV, HiddenChange
from kvlens.scorers.interface import Scorer
from kvlens.scorers.keynorm import KeyNorm
from kvlens.scorers.kvzip import KVzip
from kvlens.scorers.lagkv import LagKV
from kvlens.scorers.oracle import Oracle
from kvlens.scorers.random import Random
from kvlens.scorers.sliding_window import SlidingWindow
from kvlens.scorers.snapkv import SnapKV
from kvlens.scorers.state_var import KeyVar, ValueVar
from kvlens.scorers.surprise import Surprise, SurpriseFast

TABLE: dict[str, type[Any]] = {
    "random": Random,
    "sliding_window": SlidingWindow,
    "epikv": EpiKV,
    "hidden_change": HiddenChange,
    "keynorm": KeyNorm,
    "key_var": KeyVar,
    "value_var": ValueVar,
    "band_adaptive": BandAdaptive,
    "surprise": Surprise,
    "surprise_fast": SurpriseFast,
    "lagkv": LagKV,
    "snapkv": SnapKV,
    "h2o": H2O,
    "expected_attention": ExpectedAttention,
    "compactor": Compactor,
    "kvzip": KVzip,
    "fitted": Fitted,
    "oracle": Oracle,
}


def make(name: str, parameters: Mapping[str, Any]) -> Scorer:
    """The scorer of this name with these parameters.

    Raises: InputError for a name or a parameter that there is not, and for a value of the wrong type.
    """
    if name not in TABLE:
        near = get_close_matches(name, TABLE, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the scorers are {', '.join(TABLE)}"
        raise InputError(f"there is no scorer {name!r:.80}", hint)
    known = [part.name for part in fields(TABLE[name])]
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InputError(f"scorer {name} has no parameter {unknown[0]!r:.80}", takes)
    hints = get_type_hints(TABLE[name], include_extras=True)
    checked = {key: _checked(name, key, hints[key], value) for key, value in parameters.items()}
    return TABLE[name](**checked)  # type: ignore[no-any-return]


def _checked(scorer: str, key: str, kind: Any, value: Any) -> Any:
    """The value, if it is of the kind that the field's annotation says; nothing is converted but int to float."""
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].lower()
        raise InputError(f"scorer {scorer}: parameter {key} is {value!r:.80}: {reason}") from error
