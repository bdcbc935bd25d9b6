"""A scorer's program gives the scores that kvlens gives, in a process that cannot import kvlens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from eviction import policy, streamed_logits
from tiny import llama, token_ids

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.refresh import of_layer
from kvlens.scorers.program import program, save_program

RUN = """
import sys, json, torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("kvlens", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
extra = {"kvlens.json": ""}
step = torch.export.load(sys.argv[1], extra_files=extra).module()
given = torch.load(sys.argv[2])
header = json.loads(extra["kvlens.json"])
if "state" in header:
    batch = given.shape[1]
    last = torch.full((batch, *header["state"]["last"]), torch.nan)
    window = torch.full((batch, *header["state"]["window"]), torch.nan, dtype=torch.float64)
    scores = []
    for hidden in given:
        last, window, score = step(last, window, hidden)
        scores.append(score)
    found = torch.stack(scores, 1)
else:
    found = step(given)
assert not [name for name in sys.modules if name.partition(".")[0] in ("kvlens", "transformers")]
torch.save(found, sys.argv[3])
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("epikv", {}),
        ("epikv", {"window": 9, "exclude_current": True}),
        ("hidden_change", {"window": 5}),
        ("keynorm", {}),
    ],
)
def test_the_same_scores_without_kvlens(
    name: str, parameters: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model, ids = models.wrap(llama().to(dtype)), token_ids(40, batch=3)
    hidden: dict[int, torch.Tensor] = {}
    with (
        apply(policy(name, tokens=100, parameters=parameters), model) as run,
        models.watch_blocks(model, hidden.__setitem__),
    ):
        streamed_logits(model, ids, [40])
    ledger, layer = ledger_of(run.cache), run.cache.layers[1]
    expected = of_layer(run.cache, ledger, 1, ledger.sets[0], run.means)
    save_program(tmp_path / "scorer.pt2", name, parameters, run.facts, model.d_model, dtype)
    given = layer.keys if name == "keynorm" else torch.stack([hidden[1], hidden[2]], 2).transpose(0, 1)
    torch.save(given.clone(), tmp_path / "given.pt")
    files = [str(tmp_path / file) for file in ("scorer.pt2", "given.pt", "found.pt")]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *files], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")
    expected = expected if name == "keynorm" else expected[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert found[..., 1:].isfinite().all()


def test_the_header_says_what_goes_in(tmp_path: Path) -> None:
    model = models.wrap(llama())
    with apply(policy("epikv"), model) as run:
        pass
    _, header = program("epikv", {"window": 7}, run.facts, model.d_model)
    assert header["blocks"] == [1, 2]
    assert header["state"] == {"last": [2, 32], "window": [2, 6], "before_the_first": "NaN"}
    assert header["parameters"]["window"] == 7
    save_program(tmp_path / "scorer.pt2", "epikv", {"window": 7}, run.facts, model.d_model)
    extra = {"kvlens.json": ""}
    torch.export.load(tmp_path / "scorer.pt2", extra_files=extra)
    assert json.loads(extra["kvlens.json"]) == header


def test_other_scorers_do_not_leave() -> None:
    model = models.wrap(llama())
    with apply(policy("random"), model) as run:
        pass
    with pytest.raises(InputError, match="no program"):
        program("surprise", {}, run.facts, model.d_model)
