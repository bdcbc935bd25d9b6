"""Which scorers are there? One row a method; a new one is one file and one row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from kvlens.errors import InputError
from kvlens.scorers.attention_x_hidden import AttentionXHidden
from kvlens.scorers.band_adaptive import BandAdaptive
from kvlens.scorers.compactor import Compactor
from kvlens.scorers.expected_attention import ExpectedAttention
from kvlens.scorers.fitted import Fitted
from kvlens.scorers.h2o import H2O
from kvlens.scorers.h2o_keys import H2OKeys
from kvlens.scorers.hidden_change import EpiKV, HiddenChange
from kvlens.scorers.importance_sampling import ImportanceSampling
from kvlens.scorers.interface import Scorer
from kvlens.scorers.keydiff import KeyDiff
from kvlens.scorers.keynorm import KeyNorm
from kvlens.scorers.kvzip import KVzip
from kvlens.scorers.lagkv import LagKV
from kvlens.scorers.oracle import Oracle
from kvlens.scorers.raas import RaaS
from kvlens.scorers.random import Random
from kvlens.scorers.rkv import RKV
from kvlens.scorers.segment_hidden import SegmentHidden
from kvlens.scorers.sliding_window import SlidingWindow
from kvlens.scorers.snapkv import SnapKV
from kvlens.scorers.state_var import KeyVar, ValueVar
from kvlens.scorers.surprise import Surprise, SurpriseFast
from kvlens.scorers.thinkv import ThinKV
from kvlens.scorers.tova import TOVA

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
    "keydiff": KeyDiff,
    "tova": TOVA,
    "importance_sampling": ImportanceSampling,
    "h2o_keys": H2OKeys,
    "rkv": RKV,
    "raas": RaaS,
    "thinkv": ThinKV,
    "segment_hidden": SegmentHidden,
    "attention_x_hidden": AttentionXHidden,
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
    return made("scorer", TABLE, name, parameters)  # type: ignore[no-any-return]


def made(what: str, table: Mapping[str, type[Any]], name: str, parameters: Mapping[str, Any]) -> Any:
    """The same for any table of methods; `what` they are is how errors call them."""
    if name not in table:
        near = get_close_matches(name, table, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the {what}s are {', '.join(table)}"
        raise InputError(f"there is no {what} {name!r:.80}", hint)
    known = [part.name for part in fields(table[name])]
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InputError(f"{what} {name} has no parameter {unknown[0]!r:.80}", takes)
    hints = get_type_hints(table[name], include_extras=True)
    checked = {key: _checked(f"{what} {name}", key, hints[key], value) for key, value in parameters.items()}
    return table[name](**checked)


def _checked(method: str, key: str, kind: Any, value: Any) -> Any:
    """The value, if it is of the kind that the field's annotation says; nothing is converted but int to float."""
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].lower().removeprefix("input ")
        raise InputError(f"{method}: parameter {key} is {value!r:.80}, which {reason}") from error
