"""What label runs are tried on: a tiny random model as a folder on disk or in memory, and a few short traces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tiny
import tiny_tokenizers

from kvlens.model import Model, wrap
from kvlens.records import Trace

BOX: dict[str, Any] = {
    "id": "box",
    "prompt": "The red box is under the table.\n",
    "reasoning": "Where is the box?\nStep 1: check the first line. Step 2: it is under the table.\n\n",
    "target": "So the box is under the table!",
    "answer": "under the table",
    "spans": [[4, 11], [21, 30]],
}
SUM: dict[str, Any] = {
    "id": "sum",
    "prompt": "Let a = 17 and b = a + 24. ",
    "reasoning": "Then b is 17 + 24.\nb is 41.\n",
    "target": "The answer is 41.",
    "answer": ["41"],
}
WRONG: dict[str, Any] = SUM | {"id": "wrong", "target": "The answer is 42."}
ROWS = (BOX, SUM)


def as_trace(row: Mapping[str, Any]) -> Trace:
    """The trace that a JSONL row describes."""
    answer = row.get("answer", ())
    spans = tuple(tuple(span) for span in row.get("spans", ()))
    return Trace(**{**row, "answer": (answer,) if isinstance(answer, str) else tuple(answer), "spans": spans})


def hf_model(**changes: Any) -> Any:
    """A random three-layer Llama whose vocabulary is the tiny tokenizer's."""
    own = {"vocab_size": len(tiny_tokenizers.byte_level()), "bos_token_id": 0, "eos_token_id": 2}
    return tiny.llama(**own | changes)


def model(**changes: Any) -> Model:
    """The same in memory."""
    return wrap(hf_model(**changes), tiny_tokenizers.byte_level(), name="tiny")


def save_model(folder: Path, **changes: Any) -> Path:
    """A folder that `-m` takes."""
    hf_model(**changes).save_pretrained(folder)
    tiny_tokenizers.byte_level().save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]] = ROWS) -> Path:
    """A JSONL file of traces."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def hashes(run: Path) -> dict[str, str]:
    """The SHA-256 of every table of a run."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(run.glob("*.parquet"))}


def state(run: Path) -> dict[str, Any]:
    """What `run.json` says."""
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found
