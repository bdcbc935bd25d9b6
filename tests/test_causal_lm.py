"""The fingerprint: which weights, not where, how or by what they were loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, build, gemma3, llama
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvlens.causal_lm import fingerprint_of
from kvlens.errors import ModelRefused


def test_fingerprints_differ_between_families_and_repeat() -> None:
    prints = {name: fingerprint_of(make(), name) for name, make in FAMILIES.items()}
    assert len(set(prints.values())) == len(FAMILIES)
    assert all(len(text) == 33 and text[16] == "-" for text in prints.values())
    assert prints == {name: fingerprint_of(make(), "another name") for name, make in FAMILIES.items()}


def test_one_changed_number_changes_the_weights_half_only() -> None:
    model = llama()
    before = fingerprint_of(model, "m")
    with torch.no_grad():
        model.lm_head.weight[5, 3] += 1e-3
    after = fingerprint_of(model, "m")
    assert before[:17] == after[:17]
    assert before[17:] != after[17:]


def test_a_config_that_acts_otherwise_changes_the_config_half_only() -> None:
    one, two = fingerprint_of(llama(), "m"), fingerprint_of(llama(rms_norm_eps=1e-3), "m")
    assert one[:16] != two[:16]
    assert one[17:] == two[17:]


def test_path_backend_and_lossless_dtype_are_no_part_of_it(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    before = fingerprint_of(model, "m")
    model.save_pretrained(tmp_path)
    for options in ({"dtype": torch.float32}, {"dtype": torch.bfloat16, "attn_implementation": "eager"}):
        assert fingerprint_of(AutoModelForCausalLM.from_pretrained(tmp_path, **options), "other") == before


def test_tied_weights_count_once() -> None:
    model = gemma3()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = fingerprint_of(model, "m")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert fingerprint_of(model, "m") != before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    model: Any = build(LlamaForCausalLM, LlamaConfig(**dict(llama().config.to_dict())))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 2] = bad
    with pytest.raises(ModelRefused, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        fingerprint_of(model, "m")
