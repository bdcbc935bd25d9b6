"""How does a scorer run where kvlens is not installed? As a program of torch.export: state in, state and score out.

1. `epikv`, `hidden_change`: (last hidden states, trailing windows, hidden states of the new token after both blocks) ->
   (the first two for the next token, its score). Before the first token both are NaN: it has no change.
2. `keynorm`: keys of any number of slots -> their scores; it has no state.
3. The file holds a graph of torch's own operators and a JSON header that says what goes in and out; the batch (and the
   number of slots) may differ from call to call. `torch.export.load(path).module()` is all that running it takes.

One new token a row and no padding: prompts go in token by token. Frozen numbers are the caller's to keep.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens import __version__
from kvlens.disk import as_path, disk, write_whole
from kvlens.errors import InputError
from kvlens.observables import hidden_change, rolling
from kvlens.scorers import table
from kvlens.scorers.hidden_change import HiddenChange, Moved
from kvlens.scorers.interface import Facts
from kvlens.scorers.keynorm import KeyNorm

SCHEMA = "kvlens.program/1"
HEADER = "kvlens.json"


class ChangeStep(nn.Module):
    """1. for one scorer."""

    def __init__(self, scorer: HiddenChange) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(
        self,
        last: Float[Tensor, "batch 2 d_model"],
        window: Float[Tensor, "batch 2 before"],
        hidden: Float[Tensor, "batch 2 d_model"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The state for the next token, and what this one is worth, [batch] float32."""
        after, changes = hidden_change.step(hidden_change.Last(last), hidden[:, :, None])
        state = Moved((0, 1), after, rolling.Trailing(self.scorer.window, window))
        trailing, number = self.scorer.number(state, changes)
        if after.hidden is None or trailing.values is None:
            raise AssertionError("a step has a state after it")
        return after.hidden, trailing.values, number[:, 0].float()


class NormStep(nn.Module):
    """2."""

    def forward(self, keys: Float[Tensor, "batch kv_head slots d_head"]) -> Tensor:
        """What every slot is worth, [batch, kv_head, slots] float32."""
        norm: Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
        return -norm


def program(
    name: str, parameters: dict[str, Any], facts: Facts, d_model: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """The program of a scorer for models of these sizes, whose states are of this dtype, and its header.

    Raises: InputError for a scorer that is none of the three.
    """
    header = _header(name, parameters, facts, d_model, dtype)
    scorer = table.make(name, parameters)
    batch = torch.export.Dim("batch", min=1, max=65_536)
    if isinstance(scorer, HiddenChange):
        last, window = initial_state(scorer, 2, d_model)
        example = last, window, torch.zeros(2, 2, d_model, dtype=dtype)
        made = torch.export.export(ChangeStep(scorer), example, dynamic_shapes=({0: batch},) * 3)
        return made, header
    slots = torch.export.Dim("slots", min=1, max=2**30)
    keys = torch.zeros(2, facts.n_kv_heads, 3, facts.d_head, dtype=dtype)
    return torch.export.export(NormStep(), (keys,), dynamic_shapes=({0: batch, 2: slots},)), header


def _header(name: str, parameters: dict[str, Any], facts: Facts, d_model: int, dtype: torch.dtype) -> dict[str, Any]:
    """What goes in and out of a scorer's program."""
    scorer = table.make(name, parameters)
    header = {"schema": SCHEMA, "kvlens_version": __version__, "scorer": name, "parameters": asdict(scorer)}  # type: ignore[call-overload]
    if isinstance(scorer, HiddenChange):
        return header | {
            "blocks": list(scorer.hidden_layers(facts)),
            "state": {"last": [2, d_model], "window": [2, scorer.window - 1], "before_the_first": "NaN"},
            "input": f"hidden states after both blocks, [batch, 2, {d_model}] {dtype}",
            "output": "last, window, score [batch]",
        }
    if isinstance(scorer, KeyNorm):
        shape = f"[batch, {facts.n_kv_heads}, slots, {facts.d_head}] {dtype}"
        return header | {"input": f"keys {shape}", "output": f"scores [batch, {facts.n_kv_heads}, slots]"}
    raise InputError(f"scorer {name} is no program that can leave kvlens", "export epikv, hidden_change or keynorm")


def initial_state(scorer: HiddenChange, batch: int, d_model: int) -> tuple[Tensor, Tensor]:
    """Last hidden states (float32) and windows (float64) before the first token."""
    last = torch.full((batch, 2, d_model), torch.nan)
    return last, torch.full((batch, 2, scorer.window - 1), torch.nan, dtype=torch.float64)


def save_program(
    path: str | Path,
    name: str,
    parameters: dict[str, Any],
    facts: Facts,
    d_model: int,
    dtype: torch.dtype = torch.float32,
    *,
    force: bool = False,
) -> None:
    """Nothing; the program is in the file `path`, whole or not at all. Raises: as `prepared` does."""
    prepared(path, name, parameters, facts, d_model, dtype, force=force)()


def prepared(
    path: str | Path,
    name: str,
    parameters: dict[str, Any],
    facts: Facts,
    d_model: int,
    dtype: torch.dtype = torch.float32,
    *,
    force: bool = False,
) -> Callable[[], None]:
    """What writes the program into the file `path`, once all that may refuse it has been asked.

    Raises: as `program` does; InputError where the file holds something else and `force` is not given.
    """
    file = as_path(path, "program file")
    header = _header(name, parameters, facts, d_model, dtype)
    with disk(f"writing '{file}'"):
        if file.is_dir() or not file.parent.is_dir():
            reason = "it is a folder" if file.is_dir() else f"there is no folder '{file.parent}'"
            raise InputError(f"writing '{file}' failed: {reason}", "name a file in a folder that is there")
    if not force and file.is_file() and _header_of(file) != json.loads(json.dumps(header)):
        raise InputError(
            f"'{file}' is there and holds something else", "choose another file, or add --force to replace it"
        )
    made, _ = program(name, parameters, facts, d_model, dtype)
    buffer = io.BytesIO()
    torch.export.save(made, buffer, extra_files={HEADER: json.dumps(header)})
    return partial(write_whole, file, buffer.getvalue())


def _header_of(file: Path) -> Any:
    """What a program's file says of itself; None for a file that is no program."""
    try:
        with disk(f"reading '{file}'"), zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith(f"/extra/{HEADER}"))
            return json.loads(archive.read(name))
    except (zipfile.BadZipFile, StopIteration, ValueError):
        return None
