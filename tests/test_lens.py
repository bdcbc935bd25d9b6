"""Is the lens honest: its own copy, hooks that bite or a refusal, nothing left behind?"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from lenses import require_transformer_lens, tiny_lens
from tiny import FAMILIES, as_tokens, build, llama, token_ids
from tiny_tokenizers import byte_level
from transformers import HeliumConfig, HeliumForCausalLM

from kvlens import lens as lens_module
from kvlens.errors import EnvironmentLacks, InputError, ModelRefused
from kvlens.lens import Lens, open_lens
from kvlens.model import logits, wrap

TOKENS = as_tokens(token_ids(24), 4)
LAST = TOKENS.n_context - 1


@pytest.fixture
def needs_transformer_lens() -> None:
    require_transformer_lens()


@pytest.fixture
def lens(needs_transformer_lens: None) -> Lens:
    return tiny_lens("llama")


def hooks_in_place(lens: Lens) -> int:
    return sum(len(point.fwd_hooks) + len(point.bwd_hooks) for point in lens.bridge.hook_dict.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens_and_computes_the_models_numbers(family: str, needs_transformer_lens: None) -> None:
    lens = tiny_lens(family)
    truth = oracles.of_target(oracles.target_rows(lens.model, TOKENS), TOKENS)
    torch.testing.assert_close(torch.from_numpy(lens.log_probs(TOKENS)), truth, atol=2e-5, rtol=0)


def test_the_models_own_copy_is_wrapped_and_the_given_one_left_alone(needs_transformer_lens: None) -> None:
    model = wrap(llama(), byte_level.__wrapped__())  # not the cached one, which other lenses were given
    ids = token_ids(12)
    before = {name: weight.clone() for name, weight in model.hf.state_dict().items()}
    plain, modules = logits(model, ids), [type(module) for module in model.hf.modules()]
    own_kwargs, padding = dict(model.tokenizer.init_kwargs), model.tokenizer.pad_token
    lens = open_lens(model)
    lens.evict(TOKENS, (3, 5))
    assert torch.equal(logits(model, ids), plain)
    assert [type(module) for module in model.hf.modules()] == modules
    assert model.hf.config._attn_implementation == "sdpa" == model.attention
    assert not set(map(id, model.hf.modules())) & set(map(id, lens.bridge.original_model.modules()))
    assert model.hf.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in model.hf.state_dict().items())
    assert (model.tokenizer.init_kwargs, model.tokenizer.pad_token) == (own_kwargs, padding)


def test_hooks_are_removed_after_use_and_after_an_exception(lens: Lens) -> None:
    before = lens.log_probs(TOKENS)
    lens.evict(TOKENS, (3, 5))
    lens.run_with_cache(TOKENS, "blocks.0.hook_resid_post")
    assert hooks_in_place(lens) == 0

    def broken(scores: Any, hook: Any) -> Any:
        raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"):
        lens.log_probs(TOKENS, [*lens.hiding((3, 5), LAST), ("blocks.1.attn.hook_attn_scores", broken)])
    assert hooks_in_place(lens) == 0
    assert np.array_equal(lens.log_probs(TOKENS), before)


def test_an_effect_is_the_loss_of_log_prob(lens: Lens) -> None:
    evicted = lens.evict(TOKENS, (6, 9))
    full, hidden = lens.log_probs(TOKENS), oracles.masked_log_probs(lens.model, TOKENS, (6, 9), LAST)
    assert evicted.log_probs.shape == (TOKENS.n_target,)
    assert abs(evicted.effect_nats - float(full.sum() - hidden.sum())) < 1e-4
    assert abs(evicted.effect_nats) > 0.1


def test_hiding_in_no_cell_is_exactly_zero(lens: Lens) -> None:
    assert lens.evict(TOKENS, (6, 9), np.zeros((3, 4), dtype=bool)).effect_nats == 0.0


def test_hiding_works_at_any_cut(lens: Lens) -> None:
    """`lens.hiding` alone, as a notebook uses it: keys [4, 6) cut off from position 6 on is knockout."""
    truth = oracles.masked_log_probs(lens.model, TOKENS, (4, 6), 6)
    ours = lens.log_probs(TOKENS, lens.hiding((4, 6), 6))
    torch.testing.assert_close(torch.from_numpy(ours), truth, atol=2e-5, rtol=0)


def test_run_with_cache_gives_what_was_asked_for(lens: Lens) -> None:
    n = TOKENS.n_tokens - 1
    out, cache = lens.run_with_cache(TOKENS, ["blocks.0.attn.hook_pattern", "blocks.2.hook_resid_post"])
    assert out.shape == (1, n, lens.model.d_vocab)
    assert cache["blocks.2.hook_resid_post"].shape == (1, n, lens.model.d_model)
    pattern = cache["blocks.0.attn.hook_pattern"]
    assert pattern.shape == (1, lens.model.n_heads, n, n)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, lens.model.n_heads, n))
    _, cache = lens.run_with_cache(TOKENS, lambda name: name.endswith("hook_resid_post"))
    assert sum("hook_resid_post" in name for name in cache) >= lens.model.n_layers


@pytest.mark.parametrize(
    "names", ["blocks.0.no_such_hook", ["blocks.0.hook_resid_post", "hook_nowhere"], lambda _: False]
)
def test_asking_for_what_never_fires_is_refused(lens: Lens, names: Any) -> None:
    with pytest.raises(InputError, match="no activation was caught") as caught:
        lens.run_with_cache(TOKENS, names)
    assert "hook_dict" in caught.value.hint


def test_windows_and_cells_that_do_not_exist_are_refused(lens: Lens) -> None:
    for window in ((LAST, LAST + 1), (4, 4), (-1, 2)):
        with pytest.raises(InputError, match="is not inside"):
            lens.evict(TOKENS, window)
    with pytest.raises(InputError, match="3 layers of 4 heads"):
        lens.evict(TOKENS, (2, 3), np.ones((4, 4), dtype=bool))


# What is refused at the door


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch, needs_transformer_lens: None) -> None:
    """The real bridge whose hooks are accepted and thrown away: the trap the probe is there for."""
    from transformer_lens.model_bridge import TransformerBridge

    def run(self: Any, ids: Any, fwd_hooks: Any = (), **kw: Any) -> Any:
        return self(ids, **kw)

    monkeypatch.setattr(TransformerBridge, "run_with_hooks", run)


def test_hooks_that_do_not_bite_are_refused(deaf: None) -> None:
    with pytest.raises(ModelRefused, match=r"fires in 0 of 3 layers.*does not move the logits.*transformers 5"):
        open_lens(wrap(llama(), byte_level()))


def test_a_bridge_with_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, needs_transformer_lens: None) -> None:
    model = wrap(llama(), byte_level())
    other = wrap(llama(rms_norm_eps=0.3), byte_level())
    from transformer_lens.model_bridge import TransformerBridge

    boot = TransformerBridge.boot_transformers
    swapped = staticmethod(lambda name, hf_model, **kw: boot(name, hf_model=other.hf, **kw))
    monkeypatch.setattr(TransformerBridge, "boot_transformers", swapped)
    with pytest.raises(ModelRefused, match="nats off the model's"):
        open_lens(model)


def test_an_architecture_the_bridge_does_not_know_is_refused_by_name(needs_transformer_lens: None) -> None:
    """The nine families all open; the rule is TransformerBridge's own list of architectures."""
    config = HeliumConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = wrap(build(HeliumForCausalLM, config), byte_level(), name="helium")
    with pytest.raises(ModelRefused, match=r"cannot wrap helium \(HeliumForCausalLM\)"):
        open_lens(model)


def test_a_model_without_a_tokenizer_is_refused_before_anything_is_fetched() -> None:
    require_transformer_lens()
    with pytest.raises(InputError, match="has no tokenizer") as caught:
        open_lens(wrap(llama()))
    assert "wrap(hf_model, tokenizer)" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "refused"), [("5.23.9", False), ("5.24.0", True), ("5.30.1.dev0", True), ("6.0", True)]
)
def test_a_transformers_that_makes_it_wrong_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(lens_module, "versions", lambda: {"transformers": version})
    for name in ("transformer_lens", "transformer_lens.model_bridge"):
        monkeypatch.setitem(sys.modules, name, None)  # so that the next refusal is the missing extra
    what = f"transformers {version}" if refused else "needs transformer-lens"
    with pytest.raises(EnvironmentLacks, match=what) as caught:
        open_lens(wrap(llama(), byte_level()))
    assert ("transformers<5.24" if refused else 'pip install ".[lens]"') in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.real
def test_the_default_model_gives_the_label_engines_effects(smollm2: Any, needs_transformer_lens: None) -> None:
    from kvlens.probe.occlusion import Intervention, Occluder

    lens = open_lens(smollm2)
    text = "The red box is under the table. The blue box is on the shelf. The red box is under the table."
    tokens = as_tokens(smollm2.tokenizer(text)["input_ids"], 4)
    engine = Occluder(smollm2, tokens, Intervention())
    for window in ((2, 3), (5, 7)):
        ours = engine.run([engine.counterfactual(window)]).log_probs[0]
        theirs = lens.evict(tokens, window)
        np.testing.assert_allclose(theirs.log_probs, ours.numpy(), atol=1e-4)
        assert abs(theirs.effect_nats - float((engine.reference.log_probs - ours).sum())) < 1e-4
