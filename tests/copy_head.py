"""Llamas with weights set by hand, of which it is known by construction which key matters.

Tokens: 1 BOS, 2-5 filler, 6 relay, 7 question, 10-14 key tokens, 20-24 their answers.
- one hop: the question attends to the key token and writes its answer.
- two hops: the relay attends to the key token in layer 0 and carries what it says; the question reads the relay in
  layer 1 and writes the answer.
Every other token attends to BOS, whose value is nothing.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BOS, RELAY, QUESTION, KEY, ANSWER = 1, 6, 7, 10, 20
N_ANSWERS = 5
N_VOCAB, D_MODEL, D_HEAD = 32, 64, 16
CARRIED, WRITTEN = 32, 40  # residual dimensions behind the one-hot tokens: what is carried, what is answered
MATCH, SINK = 4, 5  # head dimensions in which queries meet keys; rotary angles there are below 1e-9
UNIT = D_MODEL**0.5  # a lone 1 in the residual stream after RMSNorm


def copy_head(hops: int) -> LlamaForCausalLM:
    """A Llama of `hops` layers of one head that answers by copying from the one key token of its context."""
    config = LlamaConfig(
        vocab_size=N_VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=8,
        num_hidden_layers=hops,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=D_HEAD,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :N_VOCAB] = torch.eye(N_VOCAB)
        for i in range(N_ANSWERS):
            model.lm_head.weight[ANSWER + i, WRITTEN + i] = 1.0
        askers = (QUESTION,) if hops == 1 else (RELAY, QUESTION)
        for layer, asker in zip(model.model.layers, askers, strict=True):
            attention = layer.self_attn
            attention.q_proj.weight[SINK, :N_VOCAB] = 1.0
            attention.k_proj.weight[SINK, BOS] = 0.5
            attention.q_proj.weight[MATCH, asker] = 4.0
            last = asker == QUESTION
            for i in range(N_ANSWERS):
                source = KEY + i if asker == askers[0] else CARRIED + i
                attention.v_proj.weight[i, source] = 1 / UNIT
                attention.o_proj.weight[(WRITTEN if last else CARRIED) + i, i] = 6.0
            matched = range(KEY, KEY + N_ANSWERS) if asker == askers[0] else [RELAY]
            attention.k_proj.weight[MATCH, list(matched)] = 1.0
    return model
