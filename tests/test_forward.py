"""Logits, hidden states and masks of every family; what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import COMMON, FAMILIES, N_VOCAB, WINDOW, build, gemma3, gpt2, llama, token_ids
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from kvlens.errors import ModelRefused
from kvlens.model import (
    Model,
    cache_from,
    cache_layers,
    hidden,
    logits,
    new_cache,
    unembed,
    watch_blocks,
    wrap,
)

N = 26
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Model:
    return wrap(FAMILIES[request.param]())


def causal(n_tokens: int) -> Tensor:
    return torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril()[None, None]


def test_sizes_are_read_from_what_the_layers_do() -> None:
    model = wrap(llama())
    assert (model.n_layers, model.n_heads, model.n_kv_heads, model.d_head) == (3, 4, 2, 8)
    assert (model.d_model, model.d_vocab, model.max_context) == (32, N_VOCAB, 256)
    assert (model.attention, model.name, model.dtype, model.device.type) == ("sdpa", "in-memory", torch.float32, "cpu")
    assert not model.hf.training
    assert not any(weight.requires_grad for weight in model.hf.parameters())
    assert wrap(gemma3()).sliding == (WINDOW, None, WINDOW, None)
    assert wrap(gpt2()).n_kv_heads == 4


def test_tiny_models_are_worth_testing_on(family: Model) -> None:
    """Log-probs spread over nats, and hiding one key moves them: else agreement below would mean nothing."""
    ids = token_ids(N)
    mask = causal(N)
    mask[..., -3:, N - 6] = False
    before = logits(family, ids).log_softmax(-1)
    assert before.std(-1).min() > 0.5
    assert (logits(family, ids, mask=mask).log_softmax(-1) - before)[:, -3:].abs().max() > 0.05


def test_logits_equal_the_models_own(family: Model) -> None:
    ids = token_ids(N, batch=2)
    truth = family.hf(input_ids=ids).logits
    torch.testing.assert_close(logits(family, ids), truth, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(family, ids, last=3), truth[:, -3:], atol=1e-5, rtol=0)
    torch.testing.assert_close(unembed(family, hidden(family, ids)), truth, atol=1e-5, rtol=0)
    assert logits(family, ids, last=0).shape == (2, 0, N_VOCAB)


def test_logits_are_float32_in_bfloat16_too(family: Model) -> None:
    family.hf.to(torch.bfloat16)
    assert hidden(family, token_ids(4)).dtype == torch.bfloat16
    assert logits(family, token_ids(4)).dtype == torch.float32
    assert logits(family, token_ids(4), mask=causal(4)).isfinite().all()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_hiding_by_mask_is_deleting_rows(name: str, backend: str) -> None:
    """The keystone: same rows out of the cache, positions kept, on both backends."""
    hf_model = FAMILIES[name]()
    hf_model.set_attn_implementation(backend)
    model = wrap(hf_model)
    assert model.attention == backend
    ids, cache = token_ids(N), new_cache(model)
    logits(model, ids[:, :20], cache=cache)
    kept = [pos for pos in range(20) if pos not in (13, 14, 17)]
    positions, key_positions = torch.arange(20, N), torch.tensor([[*kept, *range(20, N)]])
    short = cache_from(model, [(keys[:, :, kept], values[:, :, kept]) for keys, values in cache_layers(cache)])
    mask = causal(N)[..., 20:, key_positions[0]]
    deleted = logits(model, ids[:, 20:], positions=positions, cache=short, mask=mask, key_positions=key_positions)
    hide = causal(N)
    hide[..., 20:, [13, 14, 17]] = False
    masked = logits(model, ids, mask=hide)[:, 20:]
    torch.testing.assert_close(masked, deleted, atol=TOLERANCE, rtol=0)
    assert (masked - logits(model, ids, last=6)).abs().max() > 0.05
    if not any(model.sliding):
        short = cache_from(model, [(keys[:, :, kept], values[:, :, kept]) for keys, values in cache_layers(cache)])
        bare = logits(model, ids[:, 20:], positions=positions, cache=short)
        torch.testing.assert_close(bare, deleted, atol=TOLERANCE, rtol=0)


def test_a_mask_that_hides_nothing_or_the_future_changes_nothing(family: Model) -> None:
    ids = token_ids(N, batch=2)
    before = logits(family, ids)
    for mask in (causal(N), causal(N).expand(2, family.n_heads, N, N)):
        torch.testing.assert_close(logits(family, ids, mask=mask), before, atol=TOLERANCE, rtol=0)
    cache = new_cache(family)
    logits(family, ids[:, :20], cache=cache)
    rest = logits(family, ids[:, 20:], cache=cache, mask=causal(N)[..., 20:, :])
    torch.testing.assert_close(rest, before[:, 20:], atol=TOLERANCE, rtol=0)


def test_a_mask_per_head_hides_from_that_head_only() -> None:
    model, ids = wrap(llama()), token_ids(N)
    mask = causal(N).repeat(1, model.n_heads, 1, 1)
    mask[:, 1, -4:, 10] = False
    moved = (logits(model, ids, mask=mask) - logits(model, ids)).abs().amax((0, 2))
    assert moved[:-4].max() < TOLERANCE < 100 * TOLERANCE < moved[-4:].max()


def test_rows_packed_under_a_block_mask_are_the_separate_rows(family: Model) -> None:
    """Two continuations behind one prefix in one row, each at the positions it would have alone."""
    prefix, one, two = token_ids(14), token_ids(5, seed=1), token_ids(5, seed=2)
    cache = new_cache(family)
    logits(family, prefix, cache=cache)
    mask = torch.zeros(1, 1, 10, 24, dtype=torch.bool)
    mask[..., :14] = True
    mask[0, 0, :5, 14:19] = mask[0, 0, 5:, 19:24] = causal(5)[0, 0]
    positions = torch.arange(14, 19).repeat(2)
    packed = logits(family, torch.cat([one, two], 1), positions=positions, cache=cache, mask=mask)
    for rows, continuation in zip(packed.split(5, dim=1), (one, two), strict=True):
        alone = logits(family, torch.cat([prefix, continuation], 1), last=5)
        torch.testing.assert_close(rows, alone, atol=TOLERANCE, rtol=0)


def test_positions_with_a_gap_do_not_hide_the_text_before_it(family: Model) -> None:
    """transformers takes such a jump for the border between two texts; here it is a position."""
    ids = token_ids(8)
    positions = torch.tensor([0, 1, 2, 3, 6, 7, 8, 9])
    cache = new_cache(family)
    first = logits(family, ids[:, :4], cache=cache, positions=positions[:4])
    second = logits(family, ids[:, 4:], cache=cache, positions=positions[4:])
    if any(family.sliding):  # by storage order transformers' own sliding mask would see further than 8 positions back
        mask = causal(8)[..., 4:, :]
        cache = new_cache(family)
        logits(family, ids[:, :4], cache=cache, positions=positions[:4])
        second = logits(
            family, ids[:, 4:], cache=cache, positions=positions[4:], mask=mask, key_positions=positions[None]
        )
    whole = logits(family, ids, positions=positions)
    torch.testing.assert_close(whole, torch.cat([first, second], 1), atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_blocks_are_watched_in_order_before_the_final_norm_and_left_alone(family: Model) -> None:
    """What a block puts out is what the next one takes in, and what the final norm takes after the last."""
    ids, seen = token_ids(9, batch=2), dict[int, Tensor]()
    with watch_blocks(family, lambda layer, states: seen.update({layer: states.clone()})):
        normed = hidden(family, ids)
    assert list(seen) == list(range(family.n_layers))
    reported = family.hf(ids, output_hidden_states=True, use_cache=False).hidden_states
    for layer in range(family.n_layers - 1):
        torch.testing.assert_close(seen[layer], reported[layer + 1], atol=1e-4, rtol=0)
    norms = [module for name, module in family.decoder.named_children() if "norm" in name or name == "ln_f"]
    torch.testing.assert_close(norms[-1](seen[family.n_layers - 1]), normed, atol=1e-4, rtol=0)
    seen.clear()
    with pytest.raises(KeyError), watch_blocks(family, lambda *_: seen.update({0: ids})):
        raise KeyError("from inside")
    hidden(family, ids)
    assert not seen


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (CohereForCausalLM, CohereConfig(**COMMON, logit_scale=0.3)),
        (GraniteForCausalLM, GraniteConfig(**COMMON, logits_scaling=3.0)),
    ],
)
def test_scaled_logits_are_the_models_own(model_class: Any, config: Any) -> None:
    model, ids = wrap(build(model_class, config), check=True), token_ids(N)
    torch.testing.assert_close(logits(model, ids), model.hf(input_ids=ids).logits, atol=1e-5, rtol=0)


SMALL = {key: value for key, value in COMMON.items() if key not in ("initializer_range", "intermediate_size")}
REFUSED: dict[str, tuple[Any, Any]] = {
    "MLA": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **COMMON | {"num_key_value_heads": 4},
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            first_k_dense_replace=3,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
        ),
    ),
    "linear_attention": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **COMMON | {"num_hidden_layers": 2},
            layer_types=["linear_attention", "full_attention"],
            head_dim=8,
            num_experts=0,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    "chunked_attention": (
        Llama4ForCausalLM,
        Llama4TextConfig(
            **COMMON | {"num_hidden_layers": 2},
            layer_types=["chunked_attention", "full_attention"],
            attention_chunk_size=8,
            head_dim=8,
            num_local_experts=1,
            interleave_moe_layer_step=5,
            intermediate_size_mlp=16,
        ),
    ),
    "share keys and values": (
        Gemma3nForCausalLM,
        Gemma3nTextConfig(
            **COMMON | {"num_hidden_layers": 4, "pad_token_id": 0},
            vocab_size_per_layer_input=N_VOCAB,
            hidden_size_per_layer_input=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=8,
            head_dim=8,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
        ),
    ),
    "0 of its 2 layers": (BloomForCausalLM, BloomConfig(vocab_size=N_VOCAB, hidden_size=16, n_layer=2, n_head=2)),
    "MambaForCausalLM": (MambaForCausalLM, MambaConfig(vocab_size=N_VOCAB, hidden_size=16, num_hidden_layers=2)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_layers_without_ordinary_keys_and_values_are_refused_by_name(what: str) -> None:
    model_class, config = REFUSED[what]
    with pytest.raises(ModelRefused, match=what):
        wrap(build(model_class, config))


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(ModelRefused, match="both directions"):
        wrap(gemma3(use_bidirectional_attention=True))


def test_wrapping_leaves_the_config_as_it_was() -> None:
    hf_model = llama()
    before = hf_model.config.to_dict()
    wrap(hf_model)
    assert hf_model.config.to_dict() == before
    assert hf_model.config._attn_implementation == "sdpa"
    assert isinstance(hf_model.config, LlamaConfig)
