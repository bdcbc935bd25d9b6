"""Surprise: every variant of every family against the whole mask and vocabulary; direction, dtypes, batches, state."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import surprise_oracles as oracle
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from surprise_oracles import Held, cached_rows, prefilled
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvlens.backends import backend_called
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, wrap
from kvlens.observables.refresh import refresh
from kvlens.observables.surprise import Scores, State, Surprise, unit_edges, unit_sums
from kvlens.observables.surprise_variant import FAST, FULL, Variant, read_variant

N = 21
GONE = (3, 4, 11, 19, 23)  # evicted positions: the rows of a cache are not next to each other in the text
TOLERANCE = 1e-4
RUNS = ("full", "fast", "layers=2", "layers=1", "layers=2,skip_mlp", "skip_mlp")
UNITS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 7, 8, 8, 8]])


def granite() -> Any:
    """Multiplies its embeddings after the embedding module, and what each block adds."""
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
    return tiny.build(GraniteForCausalLM, GraniteConfig(**tiny.COMMON | scales))


FAMILIES: dict[str, Callable[[], Any]] = tiny.ATTENTION_FAMILIES | {"granite": granite}


@cache
def family(name: str) -> Model:
    return wrap(FAMILIES[name]())


@cache
def cached(name: str, n: int, gone: tuple[int, ...] = GONE) -> Held:
    return prefilled(family(name), n, gone=gone)


def words(i: int, runs: Any, no_self: Any, past: Any, gap: int) -> str:
    """A variant; what is scored, and of what, goes round with its number, so that every word meets every other."""
    of = ("logit", "sentence", "logprob", "clause", "logprob,token", "logit,token", "sentence")[i % 7]
    return ",".join([runs, of, "no_self" if no_self else "with_self", f"gap={gap}", *["past"] * past])


PASSES = itertools.product(RUNS, (False, True), (False, True), (0, 1))
VARIANTS = [words(i, *some, gap + 2 * ((i // 2 + i // 4 + i // 8) % 2)) for i, (*some, gap) in enumerate(PASSES)]


def check(model: Model, held: Held, variant: Variant, units: Tensor | None = None, atol: float = TOLERANCE) -> Scores:
    """The pass equals the oracle, and so does what stays of the cache."""
    surprise = Surprise(model, variant)
    state = held.state(surprise.start, units)
    found = surprise.scores(state, held.layers)
    truth, known = oracle.scores(model, held, variant, None if units is None else units[0].tolist())
    assert found.values.dtype == torch.float32
    assert torch.equal(found.known[0], known)
    torch.testing.assert_close(found.values[0].double(), truth, atol=atol, rtol=0)
    n, protected = held.ids.shape[1], int((~known).sum())
    budget = max(n // 2, protected + 3)
    ours = refresh(state, found, budget, frozen=2, recent=3)
    trailing = state.units is None
    assert ours[0].tolist() == oracle.kept(truth.tolist(), known.tolist(), budget + 2, 2, 3, trailing=trailing)
    return found


def refuses(name: str, variant: Variant) -> bool:
    """The MLP of gpt_oss gives router scores as well; a pass that skips it cannot be had."""
    return name == "gpt_oss" and variant.skip_mlp


@pytest.mark.parametrize("name", FAMILIES)
def test_every_variant_equals_the_mask_and_the_whole_vocabulary(name: str) -> None:
    found = []
    for text in VARIANTS:
        variant = read_variant(text)
        if refuses(name, variant):
            with pytest.raises(ModelRefused, match=r"GptOssDecoderLayer.*'mlp'"):
                Surprise(family(name), variant)
            continue
        found.append(check(family(name), cached(name, N), variant, UNITS if variant.unit else None).values)
    # variants differ, or the agreement says little
    apart = [(one - two).abs().max() > 0.01 for one, two in itertools.pairwise(found)]
    assert sum(apart) > 0.8 * len(apart)


@pytest.mark.parametrize("name", FAMILIES)
def test_short_caches_equal_the_mask_too(name: str) -> None:
    """Also those of which no row sees another."""
    for n, gap, runs, past in itertools.product((1, 2, 3), (0, 1, 2, 3), ("full", "fast"), (False, True)):
        variant = read_variant(",".join([runs, f"gap={gap}", *["past"] * past]))
        if refuses(name, variant):
            continue
        known = check(family(name), cached(name, n, gone=(1,)), variant).known[0]
        assert int(known.sum()) == max(0, n - gap - 1)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("runs", ["full", "fast"])
def test_rows_that_see_nothing_have_no_score_and_stay(runs: str, past: bool) -> None:
    held = cached("llama", N)
    for gap in range(4):
        surprise = Surprise(family("llama"), read_variant(",".join([runs, f"gap={gap}", *["past"] * past])))
        state = held.state(surprise.start)
        found = surprise.scores(state, held.layers)
        blind = slice(0, gap + 1) if past else slice(N - gap - 1, N)
        expected = torch.ones(1, N, dtype=torch.bool)
        expected[:, blind] = False
        assert torch.equal(found.known, expected)
        assert torch.equal(found.values[~expected], torch.zeros(gap + 1))
        assert found.values.isfinite().all()
        assert (found.values[expected] != 0).all()
        lowest = Scores(found.values.masked_fill(~expected, -1e9), found.known)  # kept whatever their value says
        kept = refresh(state, lowest, gap + 2)
        assert set(torch.arange(N)[blind].tolist()) < set(kept[0].tolist())


# Direction of dependence


TOKEN_VARIANTS = ["full", "fast", "full,no_self", "fast,no_self,logprob", "layers=2,gap=2", "full,past", "skip_mlp"]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("text", TOKEN_VARIANTS)
def test_a_tokens_text_enters_its_own_score_alone(name: str, text: str) -> None:
    held, surprise = cached(name, N), Surprise(family(name), read_variant(text))
    before = surprise.scores(held.state(surprise.start), held.layers).values[0]
    for i in (0, 4, 11, 15):
        ids = held.ids.clone()
        ids[0, i] = (ids[0, i] + 5) % tiny.N_VOCAB
        state = State(ids, held.positions, held.state(surprise.start).states)
        after = surprise.scores(state, held.layers)
        moved = (after.values[0] - before).abs() > 1e-5
        assert moved.nonzero().flatten().tolist() == ([i] if after.known[0, i] else [])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("text", ["full", "fast", "layers=2,gap=2", "sentence", "full,past", "fast,past,gap=1"])
def test_a_cached_row_moves_the_scores_on_one_side_only(name: str, text: str) -> None:
    held, variant = cached(name, N), read_variant(text)
    surprise = Surprise(family(name), variant)
    state = held.state(surprise.start, UNITS if variant.unit else None)
    before = surprise.scores(state, held.layers).values[0]
    row = 12
    layers = [(keys.clone(), values.clone()) for keys, values in held.layers]
    for keys, values in layers:
        keys[:, :, row] += 1
        values[:, :, row] -= 1
    moved = (surprise.scores(state, layers).values[0] - before).abs() > 1e-5
    seen = oracle.visible(N, variant, UNITS[0].tolist() if variant.unit else None)[:, row]
    assert not moved[~seen].any()  # rows after it (to the past: before it), and those too near
    assert moved.any()
    if not any(family(name).sliding):
        assert moved[seen].all()


# Half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt2", "gpt_neox", "olmo2", "phi3", "qwen3"])
def test_half_precision_models_score_in_float32(name: str, dtype: torch.dtype) -> None:
    model = wrap(FAMILIES[name]().to(dtype))
    held = prefilled(model, N, gone=GONE)
    for text in ("full", "fast", "fast,no_self,logprob", "layers=2,past", "full,sentence"):
        variant = read_variant(text)
        surprise = Surprise(model, variant)
        units = UNITS if variant.unit else None
        found = surprise.scores(held.state(surprise.start, units), held.layers).values
        assert found.dtype == torch.float32
        assert found.isfinite().all()
        if not variant.unit:  # rounding of every block lies between them, but not another pass
            truth = oracle.scores(model, held, variant)[0].float()
            assert torch.corrcoef(torch.stack([found[0], truth]))[0, 1] > 0.99
        massive = [(keys * (30_000 / keys.abs().max()), values) for keys, values in held.layers]
        assert massive[0][0].dtype == dtype
        assert (massive[0][0] ** 2).isinf().any() == (dtype == torch.float16)
        scores = surprise.scores(held.state(surprise.start, units), massive).values
        assert scores.isfinite().all()
        assert not torch.equal(scores, found)


# Batches


PADDED_FAMILIES = ["llama", "gemma3", "gpt2", "mistral"]


@pytest.mark.parametrize("name", PADDED_FAMILIES)
@pytest.mark.parametrize(
    "text", ["full", "fast", "full,past,gap=1", "fast,past", "full,sentence", "fast,clause,past", "layers=2,logprob"]
)
@pytest.mark.parametrize("pad_unit", [-1, 0])  # whether padding has a number of its own or that of the first unit
def test_a_padded_batch_equals_one_by_one(name: str, text: str, pad_unit: int) -> None:
    model, variant = family(name), read_variant(text)
    surprise, sizes = Surprise(model, variant), (N, 4, 13, 1)
    alone = [prefilled(model, n, gone=(2,) * (n > 3), seed=n) for n in sizes]
    n_pad = torch.tensor([N - n for n in sizes])
    units = torch.stack([torch.cat([torch.full((N - n,), pad_unit), UNITS[0, :n]]) for n in sizes])

    def padded(states: list[Tensor], value: float, dim: int = 1) -> Tensor:
        rows = []
        for row in states:
            shape = list(row.shape)
            shape[dim] = N - shape[dim]
            rows.append(torch.cat([row.new_full(shape, value), row], dim))
        return torch.cat(rows)

    state = State(
        padded([held.ids for held in alone], 0),
        padded([held.positions for held in alone], 0),
        padded([held.outputs[surprise.start - 1] for held in alone], 5.0) if surprise.start else None,
        units if variant.unit else None,
        n_pad,
    )
    layers = [
        (padded([h.layers[layer][0] for h in alone], 9.0, 2), padded([h.layers[layer][1] for h in alone], -9.0, 2))
        for layer in range(model.n_layers)
    ]
    found = surprise.scores(state, layers)
    kept = refresh(state, found, 8, frozen=1, recent=2)
    for row, (n, held) in enumerate(zip(sizes, alone, strict=True)):
        single = held.state(surprise.start, UNITS[:, :n] if variant.unit else None)
        truth = surprise.scores(single, held.layers)
        assert torch.equal(found.known[row, N - n :], truth.known[0])
        assert not found.known[row, : N - n].any()
        assert torch.equal(found.values[row, : N - n], torch.zeros(N - n))
        torch.testing.assert_close(found.values[row, N - n :], truth.values[0], atol=TOLERANCE, rtol=0)
        stays = (refresh(single, truth, 8, frozen=1, recent=2) + N - n)[0].tolist()
        assert kept[row].tolist()[-len(stays) :] == stays
        assert all(pos < N - n for pos in kept[row].tolist()[: -len(stays)])  # padding fills up
    # what stays is a cache like any other
    held_state = state.select(kept)
    assert held_state.n_pad is not None
    assert held_state.n_pad.tolist() == [0, 5, 0, 8]


# Units


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_edges_and_sums_of_units(sizes: list[int], step: int) -> None:
    units = torch.tensor([[i * (step + 1) for i, size in enumerate(sizes) for _ in range(size)]])
    values = torch.randn(units.shape, generator=torch.Generator().manual_seed(sum(sizes)))
    groups = [[j for j in range(units.shape[1]) if units[0, j] == unit] for unit in units[0]]
    assert unit_edges(units)[0].tolist() == [group[-1] for group in groups]
    assert unit_edges(units, first=True)[0].tolist() == [group[0] for group in groups]
    truth = torch.stack([values[0, group].double().sum() for group in groups])
    torch.testing.assert_close(unit_sums(values, units)[0].double(), truth, atol=1e-6, rtol=0)


def test_a_pass_over_units_needs_them_and_more_blocks_than_there_are_are_refused() -> None:
    held = cached("llama", N)
    with pytest.raises(InputError, match="sentences"):
        Surprise(family("llama"), read_variant("sentence")).scores(held.state(0), held.layers)
    with pytest.raises(InputError, match="last 4 blocks"):
        Surprise(family("llama"), Variant(layers=4))
    with pytest.raises(InputError, match="needs the states"):
        Surprise(family("llama"), FAST).scores(held.state(0), held.layers)
    everything = Surprise(family("llama"), Variant(layers=3)).scores(held.state(0), held.layers)
    assert torch.equal(everything.values, Surprise(family("llama"), FULL).scores(held.state(0), held.layers).values)


# State


def parts(state: State) -> list[State]:
    """The state in three pieces along its rows."""

    def cut(rows: slice) -> State:
        units = None if state.units is None else state.units[:, rows]
        states = None if state.states is None else state.states[:, rows]
        return State(state.ids[:, rows], state.positions[:, rows], states, units)

    return [cut(slice(0, 9)), cut(slice(9, 10)), cut(slice(10, None))]


def same(one: State, two: State) -> bool:
    names = ("ids", "positions", "states", "units", "n_pad")
    pairs = [(getattr(one, name), getattr(two, name)) for name in names]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("units", [None, UNITS])
def test_a_state_grown_and_cut_is_the_one_built_at_once(start: int, units: Tensor | None) -> None:
    whole = cached("llama", N).state(start, units)
    first, second, third = parts(whole)
    assert same(first.append(second).append(third), whole)
    kept = torch.tensor([[0, 2, 3, 9, 20]])
    held = whole.select(kept)
    assert torch.equal(held.positions, whole.positions[:, kept[0]])
    assert torch.equal(held.ids, whole.ids[:, kept[0]])
    assert (held.states is None) == (start == 0)
    if whole.states is not None and held.states is not None:
        assert torch.equal(held.states, whole.states[:, kept[0]])
    if units is not None and held.units is not None:
        assert torch.equal(held.units, units[:, kept[0]])


def test_padding_stays_in_front_when_a_state_grows_and_is_counted_when_it_is_cut() -> None:
    ids = tiny.token_ids(6, batch=2)
    state = State(ids, torch.arange(6).expand(2, 6), n_pad=torch.tensor([0, 3]))
    grown = state.append(State(ids[:, :2], torch.tensor([[6, 7]]).expand(2, 2), n_pad=torch.tensor([0, 0])))
    assert grown.n_pad is not None
    assert grown.n_pad.tolist() == [0, 3]
    cut = grown.select(torch.tensor([[0, 3, 7], [1, 2, 5]]))
    assert cut.n_pad is not None
    assert cut.n_pad.tolist() == [0, 2]
    assert cut.ids.tolist() == [[ids[0, 0], ids[0, 3], ids[0, 1]], [ids[1, 1], ids[1, 2], ids[1, 5]]]


def test_bytes_are_those_of_the_storages_each_once_and_fall_when_rows_go() -> None:
    both = torch.arange(20).reshape(2, 1, 10)  # ids and positions out of one storage
    states = torch.zeros(1, 10, 32)
    state = State(both[0], both[1], states)
    assert state.n_bytes == 20 * 8 + 10 * 32 * 4
    view = State(both[0, :, :4], both[1, :, :4], states[:, :4])
    assert view.n_bytes == state.n_bytes  # a view frees nothing
    assert state.select(torch.tensor([[0, 1, 2, 3]])).n_bytes == 2 * 4 * 8 + 4 * 32 * 4
    half = State(both[0], both[1], states.bfloat16(), both[0], torch.tensor([2]))
    assert half.n_bytes == 20 * 8 + 10 * 32 * 2 + 8


def test_rows_that_do_not_fit_are_refused() -> None:
    held = cached("llama", N)
    bare, late = held.state(0), held.state(2)
    with pytest.raises(InputError, match="cannot follow"):
        bare.append(late)
    with pytest.raises(InputError, match="cannot follow"):
        late.append(bare)
    with pytest.raises(InputError, match="cannot follow"):
        bare.append(held.state(0, UNITS))
    two = State(*(rows.expand(2, N) for rows in (bare.ids, bare.positions)))
    with pytest.raises(InputError, match="ids of 2 sequences"):
        bare.append(two)
    half = State(late.ids, late.positions, held.outputs[1].half())
    narrow = State(late.ids, late.positions, held.outputs[1][..., :16])
    for other in (half, narrow):
        with pytest.raises(InputError, match="states"):
            late.append(other)
    padded = State(bare.ids, bare.positions, n_pad=torch.tensor([1]))
    with pytest.raises(InputError, match="padding"):
        bare.append(padded)
    with pytest.raises(InputError, match="padding"):
        padded.append(padded)


@pytest.mark.parametrize("text", ["full", "fast", "layers=2"])
def test_a_pass_over_what_stayed_equals_the_mask_over_what_stayed(text: str) -> None:
    """Refresh after refresh: the state that was cut is the one that belongs to the cache that was cut."""
    model, held, variant = family("mistral"), cached("mistral", N), read_variant(text)
    surprise = Surprise(model, variant)
    state = held.state(surprise.start)
    for budget in (16, 11, 5):
        kept = refresh(state, surprise.scores(state, held.layers), budget, frozen=2, recent=2)
        assert kept.shape == (1, budget + 2)
        state, rows = state.select(kept), kept[0]
        layers = [(keys[:, :, rows], values[:, :, rows]) for keys, values in held.layers]
        held = Held(held.ids[:, rows], held.positions[:, rows], layers, [out[:, rows] for out in held.outputs])
        assert same(state, held.state(surprise.start))
        check(model, held, variant)


# A model of which it is known what the future says


FILLER, SAID, SAYS = 3, 10, 20  # token SAYS + i says that SAID + i stands before it
WRITTEN, MATCH = 40, 4


def teller() -> LlamaForCausalLM:
    """Two blocks, the first does nothing; in the second every row attends to tokens that say what another one was."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},  # no rotation where queries meet keys
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :32] = torch.eye(32)
        attention = model.model.layers[1].self_attn
        attention.q_proj.weight[MATCH, :32] = 1.0
        for i in range(5):
            attention.k_proj.weight[MATCH, SAYS + i] = 1.0
            attention.v_proj.weight[i, SAYS + i] = 1.0
            attention.o_proj.weight[WRITTEN + i, i] = 1.0
            model.lm_head.weight[SAID + i, WRITTEN + i] = 1.0
    return model


@pytest.mark.parametrize("text", ["full", "fast", "full,logprob", "fast,no_self", "full,no_self", "full,gap=1"])
def test_a_token_that_the_future_says_scores_lower_and_to_the_past_one_that_the_past_says(text: str) -> None:
    model = wrap(teller())
    ids = torch.tensor([[1, SAYS + 1, FILLER, SAID + 1, FILLER, SAID, FILLER, SAYS, FILLER, FILLER]])
    said_before, said_after = 3, 5
    held = cached_rows(model, ids)
    for past in (False, True):
        surprise = Surprise(model, read_variant(text + ",past" * past))
        values = surprise.scores(held.state(surprise.start), held.layers).values[0]
        determined, other = (said_before, said_after) if past else (said_after, said_before)
        assert values[determined] < values[other] - 1
        if "logprob" not in text:
            assert abs(values[other]) < 1e-3  # nothing speaks for it


# Backends of transformers


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_flash_backend_is_called_for_the_triangles(name: str) -> None:
    """Under its name stands another backend of transformers, which is called by the same rules and runs on a CPU."""
    shapes: list[tuple[int, int]] = []

    def counted(module: Any, query: Tensor, *what: Any, **keywords: Any) -> Any:
        shapes.append((query.shape[2], what[0].shape[2]))
        return sdpa_attention_forward(module, query, *what, **keywords)

    model, held = family(name), cached(name, N)
    with backend_called("flash_stand_in", counted):
        for text, n_seeing in (("full", N - 1), ("full,gap=2", N - 3), ("full,past,gap=1", N - 2)):
            shapes.clear()
            # the twin is made first: a flash backend takes no mask, and this one would be run without causality
            surprise = Surprise(model, read_variant(text))
            surprise.model = dataclasses.replace(model, attention="flash_stand_in")
            found = surprise.scores(held.state(0), held.layers).values[0]
            assert shapes == [(n_seeing, n_seeing)] * sum(window is None for window in model.sliding)
            truth, _ = oracle.scores(model, held, read_variant(text))
            torch.testing.assert_close(found.double(), truth, atol=TOLERANCE, rtol=0)


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_neox"])
def test_a_gpu_gives_the_scores_of_the_mask(name: str) -> None:
    model = wrap(FAMILIES[name]().to("cuda"))
    held = prefilled(model, N, gone=GONE)
    for text in ("full", "fast", "layers=2,no_self,logprob", "full,past,gap=2", "sentence"):
        variant = read_variant(text)
        check(model, held, variant, UNITS.cuda() if variant.unit else None)


# What does not belong together


def test_a_state_and_a_cache_of_other_sizes_are_refused() -> None:
    model = wrap(tiny.llama())
    held = prefilled(model, 12)
    fast = Surprise(model, FAST)
    whole = held.state(fast.start, None)
    shorter = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in held.layers]
    few = whole.select(torch.arange(11)[None])
    for state, layers in ((few, held.layers), (whole, shorter), (whole, held.layers[:2])):
        with pytest.raises(InputError, match="do not belong together"):
            fast.scores(state, layers)
    with pytest.raises(InputError, match="needs the states"):
        fast.scores(dataclasses.replace(whole, states=None), held.layers)
    with pytest.raises(InputError, match="outside the vocabulary"):
        fast.scores(dataclasses.replace(whole, ids=whole.ids + tiny.N_VOCAB), held.layers)
    model.hf.train()
    with pytest.raises(InputError, match="training mode"):
        fast.scores(whole, held.layers)


def test_units_out_of_order_are_refused() -> None:
    model = wrap(tiny.llama())
    held = prefilled(model, 6)
    state = held.state(0, torch.tensor([[0, 0, 1, 1, 0, 2]]))
    with pytest.raises(InputError, match="descend"):
        Surprise(model, read_variant("clause")).scores(state, held.layers)


@pytest.mark.parametrize("fields", [{"min_gap": -1}, {"unit": "clause"}, {"unit": "page", "logprob": True}])
def test_variants_that_are_none_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is no variant"):
        Variant(**fields)


def test_a_pass_that_overflows_is_no_score() -> None:
    """What the model left behind is finite but for one value, which only rows that look ahead read."""
    model = wrap(tiny.llama())
    held = prefilled(model, 12)
    layers = [(keys, values.clone()) for keys, values in held.layers]
    layers[-1][1][:, :, -1] = torch.inf
    with pytest.raises(ModelRefused, match="NaN or infinity"):
        Surprise(model, FULL).scores(held.state(0, None), layers)


def test_an_embedding_that_is_changed_before_the_first_block_cannot_be_taken_out_later() -> None:
    model = wrap(tiny.llama())
    Surprise(model, read_variant("fast,no_self"))
    hook = model.decoder.layers[0].register_forward_pre_hook(lambda _, args: (3 * args[0], *args[1:]))
    with pytest.raises(ModelRefused, match="changes embeddings"):
        Surprise(model, read_variant("layers=1,no_self"))
    hook.remove()
