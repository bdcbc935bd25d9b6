"""Presses of kvpress under kvlens' hooks: what leaves, what is only marked, and that nothing of it stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import made_audit as made
import pytest
import tiny_runs
import torch
from made_audit import seen_and_new, state_of
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvlens
from kvlens.auditing.bytes import storage_bytes
from kvlens.auditing.enforce import SHAPES, Enforced
from kvlens.auditing.fidelity import fidelity
from kvlens.auditing.methods import Full
from kvlens.auditing.press_table import NEEDS_NETWORK, NOT_HERE, PRESSES, kvpress_module, make_press, read_press
from kvlens.auditing.presses import PressMethod, chosen, predict, visible
from kvlens.auditing.settings import settle
from kvlens.errors import InputError
from kvlens.model import Model, new_cache
from kvlens.policy import Protect

# not importorskip, which would import it plainly and leave its patches behind
pytestmark = pytest.mark.skipif(find_spec("kvpress") is None, reason="the extra `presses` is not installed")
SETTLED: dict[str, Any] = {"keep_fraction": 0.5, "sinks": 2, "recent": 3, "enforce": False}
PROTECT = Protect(sinks=2, recent=3)
MARKING = [name for name, row in PRESSES.items() if row.marks]
INNER = ("Chunk", "Block", "CriticalKV", "AdaKV", "CriticalAdaKV", "KeyRerotation")
SMALL = {f"{name}Press": "press=KnormPress" for name in INNER} | {
    "SnapKVPress": "window_size=4",
    "PyramidKVPress": "window_size=4",
    "ThinKPress": "window_size=4",
    "LagKVPress": "lag_size=8",
    "SimLayerKVPress": "n_recent=16",
    "LeverageScorePress": "sketch_dimension=4",
    "CompactorPress": "sketch_dimension=4",
    "ChunkKVPress": "chunk_length=5:press=KnormPress",
}


def method(name: str, keep: float = 0.5) -> PressMethod:
    words = f"{name}:{SMALL[name]}" if name in SMALL else name
    return PressMethod(read_press(words), keep, PROTECT)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_runs.model(head_dim=8)  # presses read it from the config


@pytest.mark.parametrize("name", PRESSES)
def test_every_press_runs_and_leaves_nothing(model: Model, name: str) -> None:
    seen, new = seen_and_new(model)
    before, table = state_of(model), dict(ALL_ATTENTION_FUNCTIONS.items())
    with torch.inference_mode():
        with Full().compressed(model, seen) as held:
            full, n_full = held.predict(new, 8)[0], storage_bytes(held.keys_values)
        with method(name).compressed(model, seen) as held:
            n_held = storage_bytes(held.keys_values)
            assert torch.isfinite(held.predict(new, 8)).all()
        again = Full()
        with again.compressed(model, seen) as held:
            assert torch.equal(held.predict(new, 8)[0], full)
    whole = PRESSES[name].marks or name in ("ThinKPress", "SimLayerKVPress")
    assert n_held == n_full if whole else n_held <= n_full / 2 * 1.05
    assert state_of(model) == before
    assert all(ALL_ATTENTION_FUNCTIONS[key] is function for key, function in table.items())


@pytest.mark.parametrize("name", PRESSES)
def test_keeping_everything_changes_nothing(model: Model, name: str) -> None:
    if name == "SimLayerKVPress":
        pytest.skip("its budget is a number of tokens")
    seen, new = seen_and_new(model)
    with torch.inference_mode():
        with Full().compressed(model, seen) as held:
            full = held.predict(new, 8)[0]
        with method(name, keep=1.0).compressed(model, seen) as held:
            assert fidelity(full, held.predict(new, 8)[0]).kl_nats < 1e-9


@pytest.mark.parametrize("name", MARKING)
def test_deleting_what_was_marked_changes_no_logit(model: Model, name: str) -> None:
    seen, new = seen_and_new(model)
    shipped = method(name)
    with torch.inference_mode():
        with shipped.compressed(model, seen) as held:
            wanted, claimed, kept = held.predict(new, 8), held.claimed_bytes, held.kept_tokens
        assert kept < 60 * model.n_layers * model.n_kv_heads
        for shape in SHAPES[:2]:
            with Enforced(shipped, shape).compressed(model, seen) as held:
                n_held = storage_bytes(held.keys_values)
                assert held.kept_tokens == kept
                assert held.claimed_bytes - held.declared_bytes == claimed
                torch.testing.assert_close(held.predict(new, 8), wanted, rtol=1e-4, atol=1e-4)
            if shape == "ragged":
                assert n_held == kept * 2 * model.d_head * 4
        with Enforced(shipped, "uniform_cap").compressed(model, seen) as held:
            assert storage_bytes(held.keys_values) <= claimed


def test_a_mask_hides_what_a_press_marks(model: Model) -> None:
    """Against a cache in which the marked keys are a thousand lengths away from every query."""
    seen, new = seen_and_new(model, n_new=1)
    with torch.inference_mode(), method("AdaKVPress").pressed(model, seen) as (_, cache, _):
        masks = {index: visible(model, index, 60) for index in range(model.n_layers)}
        other = new_cache(model)
        for index, layer in enumerate(cache.layers):
            other.update(layer.keys.clone(), layer.values.clone(), index)
        got = predict(model, cache, masks, 60, new, 1)
        for index, mask in masks.items():
            assert mask is not None
            other.layers[index].values[0][~mask] = 1e6
        again = predict(model, other, masks, 60, new, 1)
    assert torch.equal(got, again)


def test_common_protection_and_the_exact_budget_choose_for_presses_that_score() -> None:
    scores = torch.zeros(1, 2, 20)
    scores[0, 0, 10], scores[0, 1, 11] = 1.0, torch.nan
    kept = chosen(scores, 7, Protect(sinks=2, recent=3))
    assert kept[0, 0].tolist() == [0, 1, 2, 10, 17, 18, 19]
    assert kept[0, 1].tolist() == [0, 1, 2, 3, 17, 18, 19]


class Raises:
    """A press that fails in its second layer, with hooks and attributes in place."""

    compression_ratio = 0.5

    def post_init_from_model(self, model: Any) -> None:
        """Nothing to read."""

    def compress(self, module: Any, hidden: Any, keys: Any, values: Any, attention: Any, kwargs: Any) -> Any:
        assert kwargs["past_key_values"] is kwargs["cache"]
        module.masked_key_indices = (torch.zeros(1, dtype=torch.long),) * 3
        if module.layer_idx == 1:
            raise ArithmeticError("half-way")
        return keys, values


def test_a_press_that_raises_half_way_leaves_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = seen_and_new(model)
    before = state_of(model)
    monkeypatch.setattr(PressMethod, "make", lambda self: Raises())
    with pytest.raises(ArithmeticError), torch.inference_mode(), method("KnormPress").compressed(model, seen):
        pass
    assert state_of(model) == before


def test_importing_kvpress_leaves_every_attention_function_as_it_was() -> None:
    """In a new process, where it is imported for the first time; a plain import is the control."""
    code = (
        "import json, warnings; warnings.simplefilter('ignore')\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table\n"
        "from kvlens.auditing.press_table import kvpress_module\n"
        "before = dict(table.items())\n"
        "{}\n"
        "print(json.dumps([len(before), sum(table[name] is not before.get(name) for name in table)]))"
    )
    changed = {}
    for how in ("kvpress_module()", "import kvpress"):
        done = subprocess.run([sys.executable, "-c", code.format(how)], capture_output=True, text=True, check=True)
        n_functions, changed[how] = json.loads(done.stdout.splitlines()[-1])
        assert n_functions > 3
    assert changed["kvpress_module()"] == 0
    assert changed["import kvpress"] > 3


@pytest.mark.parametrize("name", [*NEEDS_NETWORK, *NOT_HERE])
def test_what_cannot_run_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=name):
        read_press(name)


def test_every_press_of_kvpress_is_known() -> None:
    module = kvpress_module()
    names = {name for name in module.__all__ if name.endswith("Press")} - {"BasePress", "ScorerPress"}
    assert names == {*PRESSES, *NEEDS_NETWORK, *NOT_HERE}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("SnapKV:window=3", "cannot be made"),
        ("SnapKV:window_size", "no key=value"),
        ("AdaKV:press=ThinKPress", "takes a press that scores"),
        ("AdaKV:press=nothing", "there is no press"),
        ("snapvk", "there is no press"),
        ("nope", "there is no press"),
        ("Knorm:compression_ratio=0.9", "is what its budget is made of"),
        ("ThinK:key_channel_compression_ratio=0.1", "is what its budget is made of"),
    ],
)
def test_slips_are_refused(words: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        make_press(read_press(words), 0.5)
    assert refused.value.hint
    if words == "snapvk":
        assert "did you mean SnapKVPress?" in refused.value.hint
    if words == "nope":
        assert "did you mean" not in refused.value.hint
        assert all(name.removesuffix("Press") in refused.value.hint for name in PRESSES)


def test_seeds_reach_presses_that_draw() -> None:
    assert [make_press(read_press("Random", seed), 0.5).seed for seed in (0, 7)] == [0, 7]
    assert make_press(read_press("Random:seed=3", 7), 0.5).seed == 3


def test_two_presses_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two methods are called 'SnapKVPress:window_size=4'"):
        settle((), (), ('SnapKV:window_size="4"', "SnapKV:window_size=4"), **SETTLED)


def test_a_press_named_twice_is_one() -> None:
    settled = settle((), (), ("knorm", "KnormPress", "Knorm", "tova"), **SETTLED)
    assert [method.name for method in settled.methods] == ["full", "KnormPress", "TOVAPress"]


def test_short_names_mean_the_same() -> None:
    assert read_press("snapkv") == read_press("SnapKV") == read_press("SnapKVPress")
    assert read_press("snapkv:window_size=16").parameters == {"window_size": 16}


def test_a_press_that_fails_says_so_in_its_row_and_the_others_are_finished(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PressMethod.make
    monkeypatch.setattr(PressMethod, "make", lambda self: Raises() if "TOVA" in self.name else make(self))
    run = kvlens.audit([made.TEXT], model, tmp_path, presses=["tova", "knorm"], keep_fraction=0.6)
    rows = {row["method"]: row for row in run.documents["audit"]["rows"]}
    assert rows["TOVAPress"]["verdict"] == "refused: ArithmeticError: half-way"
    assert rows["TOVAPress"]["claimed_bytes"] is None
    assert rows["KnormPress"]["verdict"] == "holds"
