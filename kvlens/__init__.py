"""kvlens: which cached tokens matter, what shows it, how good any selection can be, what a policy really costs.

Every verb of the command line is a function here. Names are resolved when first used, so that `import kvlens` imports
neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> "module:attribute"
_PUBLIC = {
    "traces": "kvlens.probe.own_traces:traces",
    "label": "kvlens.probe.labels:label",
    "observe": "kvlens.probe.observe:observe",
    "bands": "kvlens.discover.bands:bands",
    "signals": "kvlens.discover.ranking:signals",
    "compare_labels": "kvlens.discover.agreement:compare_labels",
    "ceilings": "kvlens.studies.ceilings:ceilings",
    "surprise": "kvlens.probe.surprise:surprise",
    "export": "kvlens.exporting:export",
    "apply": "kvlens.runtime.apply:apply",
    "generate": "kvlens.runtime.generate:generate",
    "audit": "kvlens.auditing.audit:audit",
    "Policy": "kvlens.policy:Policy",
    "PolicyFile": "kvlens.policy_file:PolicyFile",
    "read_policy": "kvlens.policy_file:read_policy",
    "inspect": "kvlens.reporting:inspect",
    "doctor": "kvlens.model:doctor_facts",
    "models": "kvlens.cached:cached_models",
    "load": "kvlens.loading:load",
    "show": "kvlens.reporting:show",
    "Run": "kvlens.loading:Run",
    "KvlensError": "kvlens.errors:KvlensError",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 (the names are the table's)


def __getattr__(name: str) -> Any:
    if name == "plots":
        return importlib.import_module("kvlens.plots")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvlens' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
