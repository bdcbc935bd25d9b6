"""`kvlens doctor`: what this machine offers and whether hooks bite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvlens.cli import options
from kvlens.cli.output import Output, columns
from kvlens.wording import size


def command(json: options.Json = False, quiet: options.Quiet = False) -> None:
    """Report versions, device, attention backends, the cache folder and whether hooks bite."""
    from kvlens.cached import cache_dir
    from kvlens.model import doctor_facts

    facts = doctor_facts()
    Output(json, quiet).answer(facts, text=columns(dict(_lines(facts))), paths=[cache_dir()])


def _lines(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each fact as a name and a value; a fact inside another is named by both."""
    for name, value in facts.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping) and value:
            yield from _lines(value, f"{label} ")
        elif isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif isinstance(value, (list, tuple)):
            yield label, ", ".join(str(item) for item in value) or "none"
        elif name.endswith("_bytes"):
            yield label.removesuffix(" bytes"), size(value)
        else:
            yield label, "none" if value is None or value == {} else str(value)
