"""Forced weights inside the model: identities, an oracle written out with a boolean mask, every family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
import tiny
import torch
from allocations import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, wrap
from kvlens.probe.forced import compare, cross_entropy, forced_attention, random_cells, top_mass

N = 26
TOKENS = tiny.as_tokens(tiny.token_ids(N), 1)
IDS = torch.from_numpy(TOKENS.ids)[None]
SIZE = 3


@pytest.fixture(params=tiny.ATTENTION_FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def family(name: str) -> Model:
    return wrap(tiny.ATTENTION_FAMILIES[name](), name=name)


def some_cells(model: Model) -> np.ndarray:
    """A part of the first layer, all of the second, none of the others."""
    cells = np.zeros((model.n_layers, model.n_heads), dtype=bool)
    cells[0, [0, 3]] = True
    cells[1] = True
    return cells


def written_out(model: Model, size: int, cells: np.ndarray) -> Callable[..., Any]:
    """Attention in float64, one query at a time: the kept keys by sorting, all others hidden by a boolean mask."""
    index = {id(module): layer for layer, module in enumerate(model.layers)}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kw: Any) -> Any:
        layer = index[id(module)]
        group = query.shape[1] // key.shape[1]
        output = torch.zeros(query.shape, dtype=torch.float64)
        for head in range(query.shape[1]):
            keys, values = key[0, head // group].double(), value[0, head // group].double()
            for pos in range(query.shape[2]):
                scores = keys @ query[0, head, pos].double() * kw["scaling"]
                if kw.get("softcap") is not None:
                    scores = kw["softcap"] * torch.tanh(scores / kw["softcap"])
                window = model.sliding[layer] or N
                seen = [k for k in range(pos + 1) if k > pos - window]
                if cells[layer, head]:
                    seen = sorted(seen, key=lambda k: (-float(scores[k]), k))[:size]
                hidden = torch.ones(len(scores), dtype=torch.bool)
                hidden[seen] = False
                scores = scores.masked_fill(hidden, -torch.inf)
                if kw.get("s_aux") is not None:
                    scores = torch.cat([scores, kw["s_aux"][head : head + 1].double()])
                output[0, head, pos] = scores.softmax(-1)[: len(values)] @ values
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    return attend


@pytest.mark.parametrize("size", [1, SIZE])
def test_forced_weights_are_attention_to_the_kept_keys_alone(name: str, size: int) -> None:
    model = family(name)
    cells = some_cells(model)
    with forced_attention(model, top_mass(size), cells):
        ours = models.logits(model, IDS)
    with models.attention_override(model, written_out(model, size, cells)):
        truth = models.logits(model, IDS)
    torch.testing.assert_close(ours, truth, atol=3e-4, rtol=0)
    assert (truth - models.logits(model, IDS)).abs().max() > 0.1


def test_sets_that_hold_everything_change_nothing(name: str) -> None:
    model = family(name)
    plain = models.logits(model, IDS)
    for size in (N, N + 1):
        with forced_attention(model, top_mass(size)):
            torch.testing.assert_close(models.logits(model, IDS), plain, atol=2e-4, rtol=0)
    with forced_attention(model, top_mass(N - 1)):  # one query lacks one key
        torch.testing.assert_close(models.logits(model, IDS)[:, :-1], plain[:, :-1], atol=2e-4, rtol=0)


def test_no_cells_change_not_a_bit(name: str) -> None:
    model = family(name)
    plain = models.logits(model, IDS)
    with forced_attention(model, top_mass(1), np.zeros((model.n_layers, model.n_heads), dtype=bool)):
        assert torch.equal(models.logits(model, IDS), plain)


def test_one_key_gives_its_value_and_other_heads_their_own_output(name: str) -> None:
    model = family(name)
    cells = some_cells(model)
    weights = oracles.eager_weights(tiny.ATTENTION_FAMILIES[name], IDS[0])[0]
    seen: list[tuple[Tensor, Tensor]] = []

    def see(layer: int, own: Any, query: Tensor, key: Tensor, value: Tensor, keywords: Any) -> Tensor:
        seen.append((own()[0], value[0]))
        return own()

    with models.around_attention(model, see):
        models.hidden(model, IDS)
    with forced_attention(model, top_mass(1), cells), models.around_attention(model, see):
        models.hidden(model, IDS)
    (plain, values), (forced, _) = seen[0], seen[model.n_layers]
    for head in range(model.n_heads):
        if not cells[0, head]:
            assert torch.equal(forced[:, head], plain[:, head])
            continue
        top = weights[head].argmax(-1)
        share = weights[head].max(-1) / (weights[head].max(-1) + 1 - weights[head].sum(-1))  # the sink's is kept too
        truth = values[head // (model.n_heads // model.n_kv_heads), top] * torch.from_numpy(share)[:, None]
        torch.testing.assert_close(forced[:, head], truth, atol=3e-5, rtol=0)
    assert bool(((1 - weights.sum(-1)) > 1e-4).any()) == (name == "gpt_oss")


@given(seed=st.integers(0, 999), size=st.integers(1, 9), n_key=st.integers(1, 8), levels=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_top_mass_takes_the_earlier_of_equals(seed: int, size: int, n_key: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, levels + 1, (2, 3, n_key), generator=generator) / 8
    kept = top_mass(size)(weights)
    for row, mask in zip(weights.flatten(0, 1).tolist(), kept.flatten(0, 1), strict=True):
        order = sorted(range(n_key), key=lambda k: (-row[k], k))
        assert torch.where(mask)[0].tolist() == sorted(k for k in order[:size] if row[k] > 0)


# Cross-entropy


def by_hand(model: Model) -> float:
    rows = models.logits(model, IDS)[0].double().log_softmax(-1)
    return -float(np.mean([rows[i, int(token)] for i, token in enumerate(IDS[0, 1:])]))


def test_cross_entropy_is_nats_per_predicted_token_of_each_arm() -> None:
    model = family("llama")
    other = tiny.as_tokens(tiny.token_ids(150, seed=3), 1)
    arms = {"some": some_cells(model), "none": np.zeros((3, 4), dtype=bool), "all": np.ones((3, 4), dtype=bool)}
    found = compare(model, [TOKENS, other], top_mass(SIZE), arms)
    assert [row.n_tokens for row in found] == [N - 1, 149]
    assert [list(row.replaced) for row in found] == [[*arms]] * 2
    assert found[0].unchanged == found[0].replaced["none"] == pytest.approx(by_hand(model), abs=1e-5)
    for arm in ("some", "all"):
        with models.attention_override(model, written_out(model, SIZE, arms[arm])):
            truth = by_hand(model)
        assert found[0].replaced[arm] == pytest.approx(truth, abs=1e-4)
        assert abs(truth - found[0].unchanged) > 0.01
    assert cross_entropy(model, other) == found[1].unchanged  # nothing is left behind


def test_random_cells_are_as_many_and_cover_all_in_turn() -> None:
    like = np.zeros((3, 4), dtype=bool)
    like[1, :3] = True
    draws = [random_cells(like, seed) for seed in range(60)]
    assert {int(cells.sum()) for cells in draws} == {3}
    assert np.any(draws, axis=0).all()
    assert np.array_equal(draws[0], random_cells(like, 0))


# What is refused, and what it costs


def test_what_cannot_be_is_refused() -> None:
    model = family("llama")
    arms = {"a": np.ones((3, 4), dtype=bool)}
    with pytest.raises(InputError, match="top-mass sets of 0 keys"):
        top_mass(0)
    with pytest.raises(InputError, match=r"cells of shape \(4, 3\).*3 layers of 4 heads"):
        compare(model, [TOKENS], top_mass(1), {"a": np.ones((4, 3), dtype=bool)})
    with pytest.raises(InputError, match="no document"):
        compare(model, [], top_mass(1), arms)
    with pytest.raises(InputError, match="'tiny' of 1 tokens"):
        compare(model, [TOKENS, tiny.as_tokens([5], 0)], top_mass(1), arms)
    with pytest.raises(InputError, match="keeps no key"):
        compare(model, [TOKENS], lambda weights: weights > 2, arms)
    with pytest.raises(InputError, match=r"gave \(4, 26\) of torch.bool"):
        compare(model, [TOKENS], lambda weights: weights[..., 0] > 0, arms)
    with pytest.raises(InputError, match="batch or a cache"), forced_attention(model, top_mass(1)):
        models.logits(model, tiny.token_ids(5, batch=2))
    model.hf.model.norm.weight.data[:] = math.nan
    with pytest.raises(ModelRefused, match="NaN"):
        compare(model, [TOKENS], top_mass(1), arms)


def test_memory_is_linear_in_the_document() -> None:
    """All weights of one layer would be 8 * 6,000 * 6,000 * 4 bytes = 1.2 GB."""
    model = wrap(tiny.llama(num_hidden_layers=1, num_attention_heads=8, max_position_embeddings=8192))
    peaks = {}
    for n in (3000, 6000):
        tokens = tiny.as_tokens(tiny.token_ids(n), 1)
        with forced_attention(model, top_mass(8)):
            peaks[n] = peak_bytes(lambda t=tokens: cross_entropy(model, t))
    assert 1e6 < peaks[6000] < 2.1 * peaks[3000] < 2e8


@pytest.mark.real
def test_the_default_model_loses_more_the_fewer_keys_it_keeps(smollm2: Model) -> None:
    text = (
        "The Rhine rises in the Swiss Alps and flows north through Germany and the Netherlands to the North Sea. "
        "For centuries it carried timber, wine and salt, and towns along it grew rich on tolls. In the nineteenth "
        "century its course was straightened, which shortened the journey of ships and made floods more severe."
    )
    tokens = tiny.as_tokens(smollm2.tokenizer(text)["input_ids"], 1)
    everywhere = {"all": np.ones((30, 9), dtype=bool)}
    nats = [compare(smollm2, [tokens], top_mass(size), everywhere)[0] for size in (1, 4, 16, tokens.n_tokens)]
    lost = [row.replaced["all"] - row.unchanged for row in nats]
    assert lost[0] > lost[1] > lost[2] > abs(lost[3])
    assert abs(lost[3]) < 1e-4
