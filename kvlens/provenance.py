"""Where a run comes from: versions, a hash of its input, and values that JSON can hold."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvlens import __version__

if TYPE_CHECKING:
    from kvlens.records import Trace

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "pandas", "transformer-lens")


def versions() -> dict[str, str]:
    """The versions of Python, the platform and the packages that numbers depend on (none is imported for it)."""
    found = {"kvlens": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def hash_traces(traces: Iterable[Trace]) -> str:
    """The SHA-256 (hex) of the traces' content in their order, whatever file form they came in."""
    digest = hashlib.sha256()
    for trace in traces:
        line = json.dumps(plain(trace), sort_keys=True)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: NaN as null, infinities as "inf" and "-inf", arrays as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain(item) for item in items]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas' missing values, without importing pandas
        return None
    raise TypeError(f"a {type(value).__name__} has no JSON form")
