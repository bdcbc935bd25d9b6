"""Tiny random models of every supported family: the real classes, seeded, no network.

Weights are drawn wide (`initializer_range` .3), so that attention is far from uniform and hiding a key moves the
log-probs by whole nats instead of rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvlens.records import Tokens, Trace

N_VOCAB = 97
N_LAYERS = 3
WINDOW = 8
COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def build(model_class: type[PreTrainedModel], config: Any, *, seed: int = 0) -> PreTrainedModel:
    """A model of this class and config with seeded random weights, norms included, in eval mode."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = model_class(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or "ln_" in name or name.endswith("bias"):
                    weight.add_(0.2 * torch.randn_like(weight))
    finally:
        torch.random.set_rng_state(state)
    return model.eval()


def llama(**changes: Any) -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**COMMON | changes))


def qwen2(**changes: Any) -> PreTrainedModel:
    return build(Qwen2ForCausalLM, Qwen2Config(**COMMON | changes))


def qwen3(**changes: Any) -> PreTrainedModel:
    return build(Qwen3ForCausalLM, Qwen3Config(**COMMON | {"head_dim": 8} | changes))


def gemma3(**changes: Any) -> PreTrainedModel:
    """Four layers, sliding and full in turn, a query scale that is not 1/sqrt(head_dim), capped final logits."""
    own = {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 5,
        "final_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    }
    return build(Gemma3ForCausalLM, Gemma3TextConfig(**COMMON | own | changes))


def mistral(**changes: Any) -> PreTrainedModel:
    return build(MistralForCausalLM, MistralConfig(**COMMON | {"sliding_window": WINDOW} | changes))


def olmo2(**changes: Any) -> PreTrainedModel:
    return build(Olmo2ForCausalLM, Olmo2Config(**COMMON | changes))


def phi3(**changes: Any) -> PreTrainedModel:
    return build(Phi3ForCausalLM, Phi3Config(**COMMON | changes))


def gpt2(**changes: Any) -> PreTrainedModel:
    own = {
        "vocab_size": N_VOCAB,
        "n_embd": 32,
        "n_layer": N_LAYERS,
        "n_head": 4,
        "n_positions": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return build(GPT2LMHeadModel, GPT2Config(**own | changes))


def gpt_neox(**changes: Any) -> PreTrainedModel:
    own = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    return build(GPTNeoXForCausalLM, GPTNeoXConfig(**own | changes))


def gemma2(**changes: Any) -> PreTrainedModel:
    """Soft-capped scores, every other layer with a sliding window."""
    own = {"head_dim": 8, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0, "sliding_window": WINDOW}
    return build(Gemma2ForCausalLM, Gemma2Config(**COMMON | own | changes))


def gpt_oss(**changes: Any) -> PreTrainedModel:
    """A learned sink logit in every head, every other layer with a sliding window; eager only."""
    own = {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}
    own |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return build(GptOssForCausalLM, GptOssConfig(**COMMON | own | changes))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama_6_over_3": partial(llama, hidden_size=48, num_attention_heads=6, num_key_value_heads=3),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "mistral": mistral,
    "olmo2": olmo2,
    "phi3": phi3,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
}

# What only the files that recompute attention are tried on, besides.
ATTENTION_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = FAMILIES | {
    "gemma2": partial(gemma2, attn_implementation="eager"),
    "gpt_oss": gpt_oss,
}


def token_ids(n_tokens: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, n_tokens] without the special ones."""
    return torch.randint(3, N_VOCAB, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


def plain_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kw: Any,
) -> tuple[torch.Tensor, None]:
    """Attention written out: causal from the end, sliding window, soft-cap and given mask, softmax in float64."""
    repeat = query.shape[1] // key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(repeat, 1).mT * kw["scaling"]
    if kw.get("softcap") is not None:
        scores = torch.tanh(scores / kw["softcap"]) * kw["softcap"]
    if attention_mask is not None:
        scores = scores + attention_mask.double()
    else:
        n_query, n_key = scores.shape[-2:]
        distance = torch.arange(n_key - n_query, n_key)[:, None] - torch.arange(n_key)[None]
        visible = distance >= 0
        if kw.get("sliding_window") is not None:
            visible &= distance < kw["sliding_window"]
        scores = scores.masked_fill(~visible, -torch.inf)
    output = scores.softmax(-1) @ value.double().repeat_interleave(repeat, 1)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def as_tokens(ids: Any, n_target: int, *, n_prompt: int | None = None) -> Tokens:
    """Token ids as a tokenised trace without a text; the last `n_target` of them are the target."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    n_context = len(ids) - n_target
    spans = np.full((len(ids), 2), -1, dtype=np.int32)
    return Tokens(Trace("tiny"), ids, n_context if n_prompt is None else n_prompt, n_context, "", spans)
