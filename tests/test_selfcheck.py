"""The start-up check passes on every family and refuses models whose cache, mask, hidden states or override lie."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, build, gpt2, llama, token_ids
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from kvlens import selfcheck
from kvlens.cached import cache_dir
from kvlens.errors import ModelRefused
from kvlens.model import Model, doctor_facts, hooks_bite, logits, require_mask, self_check, wrap
from kvlens.provenance import versions
from kvlens.selfcheck import checked


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Model:
    return wrap(FAMILIES[request.param]())


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_every_family_passes_far_inside_the_tolerance(family: Model, backend: str) -> None:
    family.hf.set_attn_implementation(backend)
    result = self_check(family)
    assert (result.cached_ok, result.mask_ok, result.noop_ok, result.unembed_ok, result.override_ok) == (True,) * 5
    worst = max(result.cached_nats, result.mask_nats, result.noop_nats, result.unembed_nats, result.override_nats)
    assert worst < result.tolerance_nats / 10
    assert result.moved_nats > 10 * result.tolerance_nats
    assert result.reason == ""


def test_wrap_keeps_the_result_and_needs_no_gradient() -> None:
    model = wrap(llama(), check=True)
    assert model.check == self_check(model)
    require_mask(model)


class DeafAttention(LlamaAttention):
    """Ignores what the mask says beyond its shape; stays causal."""

    def forward(
        self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **kw: Any
    ) -> Any:
        if attention_mask is not None:
            n_query, n_key = attention_mask.shape[-2:]
            attention_mask = torch.full((n_query, n_key), -torch.inf).triu(n_key - n_query + 1)[None, None]
        return super().forward(hidden_states, position_embeddings, attention_mask, **kw)


class ForgetfulAttention(LlamaAttention):
    """Does not read its cache: sees the new tokens only."""

    def forward(
        self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **kw: Any
    ) -> Any:
        kw.pop("past_key_values", None)
        kw.pop("cache", None)
        return super().forward(hidden_states, position_embeddings, None, **kw)


class BackendOnlyAttention(LlamaAttention):
    """Does something to the output that goes missing with any other attention function than its own."""

    def forward(self, *args: Any, **kw: Any) -> Any:
        output, weights = super().forward(*args, **kw)
        return output * (1.2 if self.config._attn_implementation == "sdpa" else 1.0), weights


class StubbornAttention(LlamaAttention):
    """Calls its own attention in one layer, whatever the config says."""

    def forward(self, *args: Any, **kw: Any) -> Any:
        asked = self.config._attn_implementation
        if self.layer_idx == 1:
            self.config._attn_implementation = "sdpa"
        try:
            return super().forward(*args, **kw)
        finally:
            self.config._attn_implementation = asked


class ScaledHead(LlamaForCausalLM):
    """Scales its logits in a way nobody knows."""

    def forward(self, *args: Any, **kw: Any) -> Any:
        output = super().forward(*args, **kw)
        output.logits = output.logits * 1.1
        return output


def with_attention(attention: type[LlamaAttention]) -> Model:
    model = build(LlamaForCausalLM, LlamaConfig(**llama().config.to_dict()))
    model.set_attn_implementation("sdpa")
    for index, layer in enumerate(model.model.layers):
        other = attention(model.config, index).eval()
        other.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = other
    return wrap(model)


def test_attention_that_ignores_the_mask_is_recorded_and_refused_where_a_mask_is_needed() -> None:
    model = with_attention(DeafAttention)
    result = checked(model)
    assert (result.mask_ok, result.cached_ok, result.override_ok, result.noop_ok) == (False, True, True, True)
    model = dataclasses.replace(model, check=result)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ModelRefused, match="4-D mask"):
        logits(model, token_ids(4), mask=mask)
    with pytest.raises(ModelRefused, match="4-D mask"):
        require_mask(model)


@pytest.mark.parametrize(("attention", "what"), [(ForgetfulAttention, "cached"), (BackendOnlyAttention, "override")])
def test_broken_attention_is_refused_with_the_versions_named(attention: type[LlamaAttention], what: str) -> None:
    model = with_attention(attention)
    with pytest.raises(ModelRefused, match=f"{what} off by") as caught:
        checked(model)
    assert f"transformers {versions()['transformers']}" in caught.value.message
    assert f"torch {versions()['torch']}" in caught.value.message


def test_a_layer_that_cannot_be_overridden_is_refused_at_once() -> None:
    with pytest.raises(ModelRefused, match="2 of its 3 layers"):
        with_attention(StubbornAttention)


def test_logits_that_are_not_what_unembed_gives_are_refused() -> None:
    model = wrap(build(ScaledHead, LlamaConfig(**llama().config.to_dict())))
    with pytest.raises(ModelRefused, match="unembed off by"):
        checked(model)
    with pytest.raises(ModelRefused, match="unembed off by"):
        wrap(build(ScaledHead, LlamaConfig(**llama().config.to_dict())), check=True)


def test_what_a_model_raises_inside_the_check_is_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(llama())

    def broken(*_: Any) -> Any:
        raise ValueError("no such cache\nand more")

    monkeypatch.setattr(selfcheck, "_cached", broken)
    with pytest.raises(ModelRefused, match="ValueError: no such cache") as caught:
        checked(model)
    assert "\n" not in caught.value.message


def test_a_context_too_short_to_check_and_a_model_that_fails_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelRefused, match="context of 16 tokens is too short"):
        wrap(gpt2(n_positions=16), check=True)
    model = wrap(gpt2(n_positions=24))
    checked(model)
    model.hf.transformer.wpe = torch.nn.Embedding(20, 32)
    with pytest.raises(ModelRefused, match="fails on 24 tokens: IndexError"):
        checked(model)


def test_a_kept_verdict_is_read_and_a_damaged_one_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path))
    model = wrap(llama())
    first = checked(model, keep=True)
    (verdict,) = (cache_dir() / "checks").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "self_check", lambda _: pytest.fail("checked again"))
        assert checked(model, keep=True) == first
    content = bytearray(verdict.read_bytes())
    content[-5] ^= 1
    verdict.write_bytes(content)
    assert checked(model, keep=True) == first
    assert json.loads(verdict.read_bytes()[32:])["cached_ok"] is True
    other = dataclasses.replace(model, attention="eager")
    checked(other, keep=True)
    assert len(list((cache_dir() / "checks").iterdir())) == 2


def test_a_kept_verdict_does_not_cover_another_class_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path))
    model, other = wrap(llama()), wrap(build(ScaledHead, LlamaConfig(**llama().config.to_dict())))
    assert model.fingerprint == other.fingerprint
    checked(model, keep=True)
    with pytest.raises(ModelRefused, match="unembed off by"):
        checked(other, keep=True)


def test_a_refusal_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path))
    with pytest.raises(ModelRefused):
        checked(with_attention(ForgetfulAttention), keep=True)
    assert not (tmp_path / "checks").exists()


def test_hooks_bite_on_every_family_and_not_on_a_deaf_model(family: Model) -> None:
    assert hooks_bite(family)
    assert not hooks_bite(with_attention(DeafAttention))


def test_doctor_facts_name_what_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "not" / "there"))
    state = torch.random.get_rng_state()
    facts = doctor_facts()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert facts["torch"] == torch.__version__
    assert facts["hooks_bite"] is True
    assert facts["cache_dir"] == str(tmp_path / "not" / "there")
    assert not (tmp_path / "not").exists()
    assert {"python", "transformers", "kvlens", "device"} <= facts.keys()
    assert facts["memory_bytes"] >= facts["free_bytes"] > 0
    assert "sdpa" in facts["attention"]
    assert ("flex_attention" in facts["attention"]) == torch.cuda.is_available()
    json.dumps(facts)
