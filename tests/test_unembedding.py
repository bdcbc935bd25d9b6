"""Logits of one token, their normaliser and the mean embedding: those of whole rows, on every way to make logits."""

from __future__ import annotations

import pytest
import torch
from allocations import peak_bytes
from tiny import ATTENTION_FAMILIES, COMMON, N_VOCAB, build, llama, token_ids
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from kvlens import unembedding
from kvlens.model import (
    Model,
    blocks,
    embedding_scale,
    hidden,
    log_normaliser,
    mean_embedding,
    unembed,
    unembed_at,
    wrap,
)

N = 26


@pytest.fixture(params=[*ATTENTION_FAMILIES, "cohere", "granite", "biased"])
def every_head(request: pytest.FixtureRequest) -> Model:
    """Every way to make logits: tied, capped, scaled up or down, with a bias."""
    if request.param in ATTENTION_FAMILIES:
        return wrap(ATTENTION_FAMILIES[request.param]())
    if request.param == "biased":
        hf_model = llama()
        hf_model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, N_VOCAB))
        return wrap(hf_model)
    if request.param == "cohere":
        return wrap(build(CohereForCausalLM, CohereConfig(**COMMON, logit_scale=0.3)))
    return wrap(build(GraniteForCausalLM, GraniteConfig(**COMMON, logits_scaling=3.0)))


def test_the_logit_of_one_token_is_the_one_in_the_row(every_head: Model) -> None:
    ids, others = token_ids(N, batch=2), token_ids(N, batch=2, seed=1)
    states = hidden(every_head, ids)
    rows = unembed(every_head, states)
    found = unembed_at(every_head, states, others)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, rows.gather(-1, others[..., None])[..., 0], atol=1e-5, rtol=0)
    assert found.std() > 0.3


def test_the_log_normaliser_is_that_of_the_row(every_head: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces of rows and vocabulary, those of one and the last short one included."""
    states = 4 * hidden(every_head, token_ids(N))[0]
    truth = unembed(every_head, states).double().logsumexp(-1)
    for rows, columns in ((512, 8192), (7, 10), (1, 1), (26, 96), (25, 97)):
        monkeypatch.setattr(unembedding, "NORMALISER_ROWS", rows)
        monkeypatch.setattr(unembedding, "NORMALISER_COLUMNS", columns)
        found = log_normaliser(every_head, states)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=0)
    assert truth.std() > 0.1


def test_no_row_of_logits_exists_whole() -> None:
    model = wrap(llama(vocab_size=60_000))
    states = torch.randn(600, 32)
    truth = unembed(model, states).logsumexp(-1)
    torch.testing.assert_close(log_normaliser(model, states), truth, atol=1e-5, rtol=0)
    whole = peak_bytes(lambda: unembed(model, states))
    assert whole >= 600 * 60_000 * 4
    assert peak_bytes(lambda: log_normaliser(model, states)) < whole / 2
    assert peak_bytes(lambda: unembed_at(model, states, torch.zeros(600, dtype=torch.long))) < whole / 100


def test_logits_that_overflow_an_exponential_have_a_finite_normaliser() -> None:
    model, states = wrap(llama()), 1e4 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    truth = unembed(model, states).double().logsumexp(-1)
    assert truth.min() > 1000
    torch.testing.assert_close(log_normaliser(model, states).double(), truth, atol=0, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_of_one_token_are_nearly_exact(every_head: Model, dtype: torch.dtype) -> None:
    """In float64 from the same states and weights; the row itself is rounded to half precision."""
    every_head.hf.to(dtype)
    ids = token_ids(N, seed=1)
    states = hidden(every_head, ids) * 4
    head = every_head.hf.get_output_embeddings()
    exact = (states.double() * head.weight.double()[ids]).sum(-1)
    rows = states.double() @ head.weight.double().T
    if head.bias is not None:
        exact, rows = exact + head.bias.double()[ids], rows + head.bias.double()
    config = every_head.hf.config
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    exact, rows = exact * scale, rows * scale
    if getattr(config, "final_logit_softcapping", None) is not None:
        cap = config.final_logit_softcapping
        exact, rows = cap * torch.tanh(exact / cap), cap * torch.tanh(rows / cap)
    found = unembed_at(every_head, states, ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)
    normaliser = log_normaliser(every_head, states[0])
    assert normaliser.dtype == torch.float32
    torch.testing.assert_close(normaliser.double(), rows[0].logsumexp(-1), atol=1e-4, rtol=0)


def test_the_mean_embedding_is_the_mean_of_all(every_head: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module puts out, not its weight: Gemma scales it."""
    weight = every_head.decoder.get_input_embeddings().weight.double()
    gemma = every_head.hf.config.model_type.startswith("gemma")
    truth = weight.mean(0) * (every_head.d_model**0.5 if gemma else 1.0)
    for columns in (8192, 10, 97, 1):
        monkeypatch.setattr(unembedding, "NORMALISER_COLUMNS", columns)
        found = mean_embedding(every_head)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=0)
    assert truth.abs().max() > 0.01


def test_the_scale_of_embeddings_is_what_the_first_block_gets(every_head: Model) -> None:
    """The difference of two embeddings, as it enters."""
    model, entered = every_head, list[Tensor]()
    if model.hf.config.model_type == "granite":
        model = wrap(build(GraniteForCausalLM, GraniteConfig(**COMMON, embedding_multiplier=5.0)))
        assert embedding_scale(model) == 5.0
    handle = blocks(model)[0].register_forward_pre_hook(
        lambda _, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    ids, others = token_ids(5), token_ids(5, seed=1)
    for row in (ids, others):
        hidden(model, row)
    handle.remove()
    embed = model.decoder.get_input_embeddings()
    apart = embedding_scale(model) * (embed(ids) - embed(others))
    torch.testing.assert_close(entered[0] - entered[1], apart, atol=1e-5, rtol=0)
