"""Our scores against kvpress' on the same tensors: equal, or of the same order, or different for a reason.

A row a method; a new one needs its name, parameters on both sides, and what to expect. The reasons:

- `lagkv`: kvpress counts its chunks from behind the sinks, so both get none here, and by default it turns each chunk's
  scores into ranks over the chunk's length: every chunk then keeps the same number, and scores of two chunks are not
  compared. Ours adds the softmax of keys and of values as the paper has it, kvpress' `cross_scoring` takes their mean.
- `compactor`: kvpress masks the slots that fill up its last chunk with -1e-9 where it means a large negative number, so
  that they take a share of its attention; ours has no such slots. So the text is one chunk here, or whole chunks with
  the blend off. With it on, kvpress takes the share of what it evicts for the blend, and rounds otherwise.
- `snapkv`: kvpress gives its window the highest score there is, which ties with the best judged token; ours says
  nothing of the window (NaN), and what is not judged stays by its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import tiny_runs
import torch
from made_audit import seen_and_new
from torch import Tensor

from kvlens.auditing.methods import prefill
from kvlens.auditing.press_hooks import arguments_of, hooks, lent
from kvlens.auditing.press_table import kvpress_module
from kvlens.model import Model, new_cache
from kvlens.policy import Budget, Policy, ScorerChoice
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.refresh import of_layer

pytestmark = pytest.mark.skipif(find_spec("kvpress") is None, reason="the extra `presses` is not installed")
N_SEEN = 60


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-4, atol=1e-6)


def twice(ours: Tensor, theirs: Tensor) -> None:
    same(ours, 2 * theirs)


def same_order_in_chunks(ours: Tensor, theirs: Tensor) -> None:
    for one, other in zip(ours.unfold(-1, 8, 8).reshape(-1, 8), theirs.unfold(-1, 8, 8).reshape(-1, 8), strict=True):
        assert torch.equal(one.argsort(), other.argsort())


def same_order(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.expand(theirs.shape).argsort(), theirs.argsort())


@dataclass(frozen=True)
class Row:
    """One comparison; of the slots that our scorer judges."""

    scorer: str
    press: str
    expect: Callable[[Tensor, Tensor], None]
    parameters: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    n_judged: int = N_SEEN


ROWS = [
    Row("keynorm", "KnormPress", same),
    Row("snapkv", "SnapKVPress", same, {"window": 6, "pool": 5}, {"window_size": 6, "kernel_size": 5}, N_SEEN - 6),
    Row("snapkv", "SnapKVPress", same, {"window": 9, "pool": 1}, {"window_size": 9, "kernel_size": 1}, N_SEEN - 9),
    Row("tova", "TOVAPress", same_order, n_judged=N_SEEN - 1),
    Row("keydiff", "KeyDiffPress", same_order),
    Row("expected_attention", "ExpectedAttentionPress", same, n_judged=N_SEEN - 4),
    Row(
        *("compactor", "CompactorPress", same_order),
        {"chunk": 28, "sketch": 8, "blend": 0.0},
        {"chunk_size": 28, "sketch_dimension": 8, "sink_size_start": 4, "sink_size_end": 0, "blending": 0.0},
        N_SEEN - 4,
    ),
    Row("lagkv", "LagKVPress", twice, {"chunk": 8}, {"lag_size": 8, "n_sink": 0, "cross_scoring": True}, 48),
    Row("lagkv", "LagKVPress", same_order_in_chunks, {"chunk": 8}, {"lag_size": 8, "n_sink": 0}, 48),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_runs.model(head_dim=8)


def ours(model: Model, row: Row, ids: Tensor) -> list[Tensor]:
    """What our scorer says of every slot, layer by layer, after a prefill that evicts nothing."""
    choice = ScorerChoice(name=row.scorer, parameters=row.parameters)
    policy = Policy(scorer=choice, budget=Budget(tokens=10 * N_SEEN), reduce="head")
    with torch.inference_mode(), apply(policy, model) as run:
        cache = new_cache(model)
        prefill(model, ids, cache)
        ledger = ledger_of(cache)
        assert ledger is not None
        return [of_layer(cache, ledger, layer, ledger.set_of(layer), run.means) for layer in run.layers]


def theirs(model: Model, row: Row, ids: Tensor) -> list[Tensor]:
    """What the press says of every slot, layer by layer."""
    press, cache, found = getattr(kvpress_module(), row.press)(**row.settings), new_cache(model), []

    def after(index: int, module: Any, called: Any) -> None:
        hidden, kwargs, attention = called
        layer = cache.layers[index]
        arguments = arguments_of(cache, hidden, kwargs)
        found.append(press.score(module, hidden, layer.keys, layer.values, attention, arguments))

    with torch.inference_mode(), lent(model), hooks(model, after):
        prefill(model, ids, cache)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.scorer}-{row.expect.__name__}")
def test_scores_agree_with_kvpress(model: Model, row: Row) -> None:
    ids, _ = seen_and_new(model, n_seen=N_SEEN)
    pairs = list(zip(ours(model, row, ids), theirs(model, row, ids), strict=True))
    assert len(pairs) == model.n_layers
    for one, other in pairs:
        judged = ~one[0, 0].isnan()
        assert int(judged.sum()) == row.n_judged
        row.expect(one[..., judged], other[..., judged])
