"""How do final states become logits, and tokens the states that enter the first block?

1. `unembed`: float32 logits, the model's scaling and soft-capping included; `unembed_at` that of one token a row;
   `log_normaliser` the log-sum-exp of a row, without ever holding one.
2. `mean_embedding`: what stands for a token of which nothing is known; `embedding_scale`: what a decoder multiplies by.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens.causal_lm import Model

NORMALISER_ROWS, NORMALISER_COLUMNS = 512, 8192  # logits that exist at once: 17 MB


def unembed(model: Model, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_vocab"]:
    """float32 logits of hidden states after the final norm, equal to the model's own (self-checked at load)."""
    return _scaled(model, model.hf.get_output_embeddings()(hidden)).float()


def log_normaliser(model: Model, hidden: Float[Tensor, "rows d_model"]) -> Float[Tensor, " rows"]:
    """The float32 log-sum-exp of each row's logits, streamed over pieces of the vocabulary: no row exists whole.

    Cost: one unembedding; memory `NORMALISER_ROWS` times `NORMALISER_COLUMNS` logits.
    """
    head = model.hf.get_output_embeddings()
    bias = getattr(head, "bias", None)
    found = []
    for block in hidden.split(NORMALISER_ROWS):
        total = torch.full(block.shape[:1], -torch.inf, device=block.device)
        for start in range(0, model.d_vocab, NORMALISER_COLUMNS):
            columns = slice(start, start + NORMALISER_COLUMNS)
            offset = None if bias is None else bias[columns].float()
            rows = nn.functional.linear(block.float(), head.weight[columns].float(), offset)
            total = torch.logaddexp(total, _scaled(model, rows).logsumexp(-1))
        found.append(total)
    return torch.cat(found)


def mean_embedding(model: Model) -> Float[Tensor, " d_model"]:
    """The embedding of a token of which nothing is known: the mean over the vocabulary, float32."""
    embed = model.decoder.get_input_embeddings()
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for ids in torch.arange(model.d_vocab, device=model.device).split(NORMALISER_COLUMNS):
        total = total + embed(ids).double().sum(0)
    return (total / model.d_vocab).float()


def embedding_scale(model: Model) -> float:
    """What the decoder multiplies embeddings by on their way into the first block; Granite does."""
    return float(getattr(model.hf.config.get_text_config(decoder=True), "embedding_multiplier", 1.0))


def _scaled(model: Model, rows: Tensor) -> Tensor:
    """Logits as the model scales and caps them."""
    config = model.hf.config.get_text_config(decoder=True)
    # Names of one idea in different families: Cohere multiplies, Granite divides.
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    if scale != 1.0:  # a product with 1 would cost a second block of logits
        rows = rows * scale
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        rows = torch.tanh(rows / cap) * cap
    return rows


def unembed_at(
    model: Model, hidden: Float[Tensor, "*rows d_model"], ids: Int[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """The float32 logit of one token for each row: a dot product each, where `unembed` makes a row of the vocabulary.

    In float32 throughout, so for half precision models it is nearer to exact than their own product.
    """
    head = model.hf.get_output_embeddings()
    found = (hidden.float() * head.weight[ids].float()).sum(-1)
    if getattr(head, "bias", None) is not None:
        found = found + head.bias[ids].float()
    return _scaled(model, found)
