"""`lagkv`, `band_adaptive`, `fitted`, `oracle`: streamed and evicted scores against whole texts, written out slowly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import signal_oracles
import torch
from eviction import PARAMETERS, padded, policy, streamed_logits, uneven
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, llama, token_ids

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.refresh import of_layer
from kvlens.scorers import table
from kvlens.scorers.fitted import SIGNALS, parameters_of
from kvlens.scorers.interface import EMPTY, Facts, Kept, Seen, Views, select, tensors

CHUNKS = [[70], [30, *[1] * 40], [7] * 10, [1, 69]]


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def scores_of(run: Run) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By layer positions and scores, [batch, heads, slots]."""
    ledger, found = ledger_of(run.cache), {}
    for layer in run.layers:
        held = ledger.set_of(layer)
        scores = of_layer(run.cache, ledger, layer, held, run.means)
        found[layer] = held.expand_as(scores), scores
    return found


def text(model: Model, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Keys, values [layer, kv_head, pos, d_head], the stream after every block [layer, pos, d_model], in one pass."""
    cache, hidden = models.new_cache(model), {}
    with torch.no_grad(), models.watch_blocks(model, lambda layer, out: hidden.__setitem__(layer, out[0])):
        models.logits(model, ids, cache=cache)
    layers = models.cache_layers(cache)
    return {
        "keys": torch.stack([keys[0] for keys, _ in layers]).double().numpy(),
        "values": torch.stack([values[0] for _, values in layers]).double().numpy(),
        "hidden": torch.stack([hidden[layer] for layer in range(model.n_layers)]).double().numpy(),
    }


# LagKV


def lag_of_held(keys: np.ndarray, values: np.ndarray, held: list[int], n: int, size: int) -> list[float]:
    """One head's score of each held position, from the whole text's [pos, d_head] up to its n tokens; NaN: not yet."""
    total = dict.fromkeys(held, 0.0)
    for states in (keys, values):
        for chunk in range(n // size):
            mates = [p for p in held if p // size == chunk]
            after = states[(chunk + 1) * size : (chunk + 2) * size]
            if len(after) < size or (chunk + 2) * size > n:
                for p in mates:
                    total[p] = math.nan
                continue
            spread = [signal_oracles.scaled_deviation(states[p], after) for p in mates]
            raised = [math.exp(one - max(spread)) for one in spread]  # keys that hardly differ scale to hundreds
            for p, share in zip(mates, raised, strict=True):
                total[p] += share / sum(raised)
    return [math.nan if p // size >= n // size else total[p] for p in held]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_lagkv_of_a_whole_cache_is_the_papers(name: str, chunks: list[int]) -> None:
    model, ids = models.wrap(FAMILIES[name]()), token_ids(70)
    with apply(policy("lagkv", tokens=100, parameters={"chunk": 8}), model) as run:
        streamed_logits(model, ids, chunks)
    seen = text(model, ids)
    for layer, (_, scores) in scores_of(run).items():
        keys, values = (torch.from_numpy(seen[what][layer]).float() for what in ("keys", "values"))
        expected = signal_oracles.lag(keys.numpy(), values.numpy(), 8)  # the mean over heads
        torch.testing.assert_close(
            scores[0].mean(0).double(), torch.from_numpy(expected), atol=1e-4, rtol=1e-3, equal_nan=True
        )
        for head in range(model.n_kv_heads):
            by_hand = lag_of_held(keys[head].numpy(), values[head].numpy(), list(range(70)), 70, 8)
            torch.testing.assert_close(
                scores[0, head].double(), torch.tensor(by_hand).double(), atol=1e-4, rtol=1e-3, equal_nan=True
            )


class Fed:
    """A scorer fed made-up keys and values without any model, evicting random slots on the way."""

    def __init__(self, name: str, parameters: dict[str, Any], n_layers: int = 2, seed: int = 0) -> None:
        self.facts = Facts(n_layers, 4, 2, 4, tuple(range(n_layers)))
        self.scorer = table.make(name, parameters)
        self.state = self.scorer.init(self.facts)
        self.rng = torch.Generator().manual_seed(seed)
        self.all: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.held = [torch.zeros(0, dtype=torch.int32)] * n_layers

    def feed(self, n_new: int, dtype: torch.dtype = torch.float32) -> None:
        first = sum(part[0].shape[3] for part in self.all)
        pair = tuple(torch.randn(len(self.held), 1, 2, n_new, 4, generator=self.rng).to(dtype) for _ in range(2))
        self.all.append(pair)
        positions = torch.arange(first, first + n_new)[None]
        by_layer = [{layer: part[layer] for layer in range(len(self.held))} for part in pair]
        self.state = self.scorer.observe(self.state, Seen(positions, True, *by_layer))
        self.held = [torch.cat([held, positions[0].int()]) for held in self.held]

    def evict(self, share: float) -> None:
        index = [(torch.rand(len(held), generator=self.rng) >= share).nonzero()[:, 0] for held in self.held]
        self.held = [held[kept] for held, kept in zip(self.held, index, strict=True)]
        kept = Kept([held[None, None] for held in self.held], [kept[None, None] for kept in index])
        self.state = select(self.state, kept)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.cat([part[which] for part in self.all], 3) for which in range(2))

    def score(self, layer: int) -> torch.Tensor:
        held = self.held[layer]
        keys, values = (part[layer][:, :, held.long()] for part in self.whole())
        return self.scorer.score(self.state, Views(layer, held[None, None], keys, values))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=8),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_lagkv_after_evictions_is_that_of_the_slots_held(
    sizes: list[int], size: int, seed: int, dtype: torch.dtype
) -> None:
    fed, n = Fed("lagkv", {"chunk": size}, seed=seed), 0
    for new in sizes:
        fed.feed(new, dtype)
        n += new
        keys, values = (part.double().numpy() for part in fed.whole())
        for layer in range(2):
            found, held = fed.score(layer), fed.held[layer].tolist()
            assert found.dtype == torch.float32
            for head in range(2):
                expected = lag_of_held(keys[layer, 0, head], values[layer, 0, head], held, n, size)
                torch.testing.assert_close(
                    found[0, head].double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-3, equal_nan=True
                )
        fed.evict(0.4)


def test_lagkv_lets_go_of_ranges_that_nobody_asks_for() -> None:
    fed = Fed("lagkv", {"chunk": 4})
    fed.feed(80)
    assert fed.state.ranges.low.shape[4] == 20
    index = torch.tensor([0, 1, 41, 78, 79])
    fed.state = select(fed.state, Kept([index[None, None].int()], [index[None, None]]))
    assert fed.state.ranges.chunks.tolist() == [[1, 11]]  # of the chunks after those held; the next are yet to come
    for _, tensor in tensors(fed.state):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_causal_lagkv_is_that_of_observe(name: str, chunks: list[int]) -> None:
    model, ids = models.wrap(FAMILIES[name]()), token_ids(70)
    with apply(policy("lagkv", tokens=100, parameters={"chunk": 8, "causal": True}), model) as run:
        streamed_logits(model, ids, chunks)
    seen = text(model, ids)
    expected = torch.from_numpy(signal_oracles.lag_causal(seen["keys"], seen["values"], 8))
    for _, scores in scores_of(run).values():
        torch.testing.assert_close(scores[0, 0].double(), expected, atol=1e-3, rtol=1e-3)
    assert ledger_of(run.cache).state.ranges.low.shape[4] <= 2


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_in_no_range(causal: bool) -> None:
    scorer = table.make("lagkv", {"chunk": 4, "causal": causal})
    facts, n_pad = Facts(1, 4, 2, 4, (0,)), 3
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 22, 4, generator=rng)
    wild = torch.full((1, 2, n_pad, 4), 50.0)

    def scored(padded_at: int | None) -> torch.Tensor:
        """Two turns of 11 tokens, with padding in front of one of them, and the first slots gone after the first."""
        state, held = scorer.init(facts), torch.zeros(0, dtype=torch.long)
        for turn, start in enumerate((0, 11)):
            positions, pair = (
                torch.arange(start, start + 11),
                [part[:, :, start : start + 11] for part in (keys, values)],
            )
            held = torch.cat([held, positions])
            if turn == padded_at:
                positions = torch.cat([torch.full((n_pad,), EMPTY), positions])
                pair = [torch.cat([wild, part], 2) for part in pair]
            state = scorer.observe(state, Seen(positions[None], True, {0: pair[0]}, {0: pair[1]}))
            if not turn:
                held = held[6:]
                state = select(state, Kept([held[None, None].int()], [torch.arange(6, 11)[None, None]]))
        return scorer.score(state, Views(0, held[None, None].int(), keys[:, :, held], values[:, :, held]))

    for padded_at in (0, 1):
        torch.testing.assert_close(scored(padded_at), scored(None), equal_nan=True, rtol=0, atol=0)


# EpiKV over bands


def changes(hidden: np.ndarray) -> list[np.ndarray]:
    return [signal_oracles.hidden_change(layer) for layer in hidden]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("given_bands", "a", "b"), [({}, [0, 1], [1, 2]), ({"band_b": [0.9, 1.0]}, [0, 1], [2])])
def test_band_adaptive_is_the_weighted_difference_of_two_bands(
    model: Model, chunks: list[int], given_bands: dict[str, Any], a: list[int], b: list[int]
) -> None:
    ids = token_ids(70)
    with apply(policy("band_adaptive", tokens=100, parameters=given_bands), model) as run:
        streamed_logits(model, ids, chunks)
    moved = changes(text(model, ids)["hidden"])
    z = [signal_oracles.zscore(sum(moved[layer] for layer in band) / len(band)) for band in (a, b)]
    expected = torch.from_numpy(1.29 * z[0] - z[1])
    for _, scores in scores_of(run).values():
        torch.testing.assert_close(scores[0, 0, 1:].double(), expected[1:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("exclude_current", [False, True])
def test_band_adaptive_keeps_to_its_window_and_leaves_the_prompt_out(model: Model, exclude_current: bool) -> None:
    ids, n_prompt = token_ids(60), 25
    parameters = {"window": 9, "exclude_current": exclude_current, "score_prompt": False, "weight_a": 2.0}
    protect = {"sinks": 0, "prompt": True}
    with apply(policy("band_adaptive", tokens=100, parameters=parameters, protect=protect), model) as run:
        streamed_logits(model, ids, [n_prompt, *[1] * (60 - n_prompt)])
    moved = [layer[n_prompt:] for layer in changes(text(model, ids)["hidden"])]  # the first against the prompt's last
    means = ((moved[0] + moved[1]) / 2, (moved[1] + moved[2]) / 2)
    z = [signal_oracles.zscore(mean, 9, exclude_current=exclude_current) for mean in means]
    for _, scores in scores_of(run).values():
        assert scores[0, 0, :n_prompt].isnan().all()
        expected = torch.from_numpy(2 * z[0] - z[1])
        torch.testing.assert_close(scores[0, 0, n_prompt:].double(), expected, atol=2e-3, rtol=2e-3)


def test_the_papers_bands_and_wrong_ones() -> None:
    facts = Facts(32, 32, 8, 128, tuple(range(32)))
    assert table.make("band_adaptive", {}).hidden_layers(facts) == (*range(7, 14), *range(18, 26))
    for wrong in ([0.5, 0.5], [0.6, 0.5], [0.1], [0.1, 1.2], [0.1, math.nan], 0.5):
        with pytest.raises(InputError, match="band_a"):
            table.make("band_adaptive", {"band_a": wrong})


# What was fitted


def signal_by_hand(name: str, seen: dict[str, np.ndarray], layer: int | None) -> np.ndarray:
    if name == "lag_causal":
        return signal_oracles.lag_causal(seen["keys"], seen["values"])
    if name.startswith("hidden_change"):
        change = signal_oracles.hidden_change(seen["hidden"][layer])
        after = {"hidden_change_rolling": signal_oracles.rolling_mean, "hidden_change_z": signal_oracles.zscore}
        return after.get(name, lambda values: values)(change)
    states = seen["keys" if name.startswith("key") else "values"][layer]
    return signal_oracles.variance(states) if name.endswith("var") else signal_oracles.norm(states)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", [*SIGNALS, "all of them"])
def test_fitted_is_the_sum_of_what_observe_computes(model: Model, name: str, chunks: list[int]) -> None:
    ids, names = token_ids(70), [name] if name in SIGNALS else list(SIGNALS)
    rng = np.random.default_rng(3)
    features = [
        {
            "signal": signal,
            "layer": None if signal == "lag_causal" else int(rng.integers(3)),
            **dict(zip(("mean", "std", "ridge", "logistic"), rng.uniform(0.2, 2, 4), strict=True)),
        }
        for signal in names
    ]
    chosen = policy("fitted", tokens=100, parameters=parameters_of({"features": features}, "logistic"))
    with apply(chosen, model) as run:
        streamed_logits(model, ids, chunks)
    seen = text(model, ids)
    expected = np.zeros(70)
    for row in features:
        values = signal_by_hand(row["signal"], seen, row["layer"])
        expected += row["logistic"] * (values - row["mean"]) / row["std"]
    for _, scores in scores_of(run).values():
        found = scores[0, 0].double()
        torch.testing.assert_close(found[1:], torch.from_numpy(expected)[1:], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"signals": ["attention_mass"], "layers": [0]}, "cannot compute signal 'attention_mass'"),
        ({"signals": ["key_var"], "layers": [None]}, "needs a layer"),
        ({"signals": ["lag_causal"], "layers": [0]}, "has no layer"),
        ({"weights": [1.0, 2.0]}, "lists of"),
        ({"scales": [0.0]}, "greater than 0"),
        ({"weights": [math.inf]}, "finite"),
        ({"layers": [True]}, "valid integer"),
        ({"layers": [-1]}, "greater than or equal"),
    ],
)
def test_fitted_refuses_what_no_decoder_can_compute(changed: dict[str, Any], says: str) -> None:
    one = {"signals": ["key_var"], "layers": [0], "means": [0.0], "scales": [1.0], "weights": [1.0]}
    with pytest.raises(InputError, match=says):
        table.make("fitted", one | changed)
    with pytest.raises(InputError, match="no signal"):
        table.make("fitted", {})


@pytest.mark.parametrize("name", [name for name in SIGNALS if name != "lag_causal"])
def test_fitted_takes_a_signal_from_several_layers(model: Model, name: str) -> None:
    ids = token_ids(40)
    parameters = {"signals": [name] * 2, "layers": [2, 0], "means": [0.5, 0.0], "scales": [2.0, 0.5]}
    chosen = policy("fitted", tokens=100, parameters=parameters | {"weights": [1.0, -3.0]})
    with apply(chosen, model) as run:
        streamed_logits(model, ids, [25, *[1] * 15])
    seen = text(model, ids)
    deep, first = (signal_by_hand(name, seen, layer) for layer in (2, 0))
    expected = torch.from_numpy((deep - 0.5) / 2 - 3 * first / 0.5)[1:]
    for _, scores in scores_of(run).values():
        torch.testing.assert_close(scores[0, 0, 1:].double(), expected, atol=2e-3, rtol=2e-3)


def test_fitted_lets_go_of_ranges_that_nobody_asks_for() -> None:
    one = {"signals": ["lag_causal"], "layers": [None], "means": [0.0], "scales": [1.0], "weights": [1.0]}
    fed = Fed("fitted", one)
    for _ in range(4):
        fed.feed(150)
    assert fed.state.ranges.chunks.tolist() == [[3, 4]]  # of the chunk under way and of the one before
    expected = signal_oracles.lag_causal(*(part[:, 0].double().numpy() for part in fed.whole()))
    torch.testing.assert_close(fed.score(0)[0, 0].double(), torch.from_numpy(expected), atol=1e-3, rtol=1e-3)


def test_fitted_to_another_model_is_refused_before_anything_runs(model: Model) -> None:
    one = {"means": [0.0], "scales": [1.0], "weights": [1.0]}
    for signal, layer in (("key_var", 3), ("hidden_change", 7)):
        chosen = policy("fitted", parameters={"signals": [signal], "layers": [layer], **one})
        with pytest.raises(InputError, match=f"this model has no .* {layer}"), apply(chosen, model):
            pass
    slides = policy("fitted", parameters={"signals": ["key_norm"], "layers": [0], **one})
    with pytest.raises(InputError, match="full-attention layer 0"), apply(slides, models.wrap(FAMILIES["gemma3"]())):
        pass


# All of them


@pytest.mark.parametrize("shape", ["uniform", "padded", "ragged"])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("lagkv", {"chunk": 8, "causal": True}), ("band_adaptive", {}), ("fitted", PARAMETERS["fitted"])],
)
def test_numbers_are_frozen_and_go_with_their_tokens(
    model: Model, name: str, parameters: dict[str, Any], shape: str
) -> None:
    ids, own, _ = padded([22, 9, 17], 20)
    more = {"uniform": {}, "padded": uneven(model), "ragged": {"storage": "ragged", **uneven(model)}}[shape]
    known: dict[tuple[int, int], float] = {}
    with apply(policy(name, parameters=parameters, **more), model) as run:
        cache = None
        for start, stop in ((0, 12), (12, 22), *((n, n + 1) for n in range(22, 42))):
            mask = own[:, :stop]
            more_words = {"attention_mask": mask, "position_ids": (own.cumsum(-1) - 1).clamp(min=0)[:, start:stop]}
            cache = step(model, ids[:, start:stop], cache, more_words)
            ledger = ledger_of(cache)
            for row in range(3):
                held = {p for s in ledger.sets for p in s[row].flatten().tolist() if p != EMPTY}
                assert {p for p in ledger.state.frozen.positions[row].tolist() if p != EMPTY} == held
            for held, scores in scores_of(run).values():
                for row, head, slot in (held != EMPTY).nonzero().tolist():
                    key, score = (row, int(held[row, head, slot])), float(scores[row, head, slot])
                    before = known.setdefault(key, score)
                    assert score == before or (math.isnan(score) and math.isnan(before))


def step(model: Model, ids: torch.Tensor, cache: Any, more: dict[str, Any]) -> Any:
    from eviction import cache_keyword

    cache = models.new_cache(model) if cache is None else cache
    with torch.no_grad():
        model.decoder(input_ids=ids, use_cache=True, **more, **{cache_keyword(model): cache})
    return cache


def test_oracle_replays_what_it_was_given(model: Model) -> None:
    chosen = policy("oracle", tokens=7, parameters={"positions": [3, 5, 9, 30], "scores": [0.5, -1.0, 2.0, 9.0]})
    with apply(chosen, model) as run:
        streamed_logits(model, token_ids(12), [12])
        # sinks 0 1, recent 9 10 11, then the lowest of those never judged: 2 4
        assert run.report().kept[0][0][0] == [0, 1, 2, 4, 9, 10, 11]
    keys = torch.zeros(2, 2, 3, 8)
    views = Views(0, torch.tensor([[[3, 4, 5]], [[-1, 9, 30]]], dtype=torch.int32), keys, keys)
    found = table.make("oracle", chosen.scorer.parameters).score(None, views)
    assert found.nan_to_num(7.0).tolist() == [[[0.5, 7.0, -1.0]], [[7.0, 2.0, 9.0]]]
    close = table.make("oracle", {"positions": [3, 4], "scores": [1.0, 1.0 + 1e-12]})
    assert float(close.score(None, views)[0, 0, :2].diff()) > 0  # float32 would tie them
    assert table.make("oracle", chosen.scorer.parameters).offline
    assert not table.make("random", {}).offline


@pytest.mark.parametrize(
    ("positions", "scores", "says"),
    [
        ([1, 2], [0.5], "2 positions and 1 scores"),
        ([2, 1], [0.5, 0.5], "do not rise"),
        ([1, 1], [0.5, 0.5], "do not rise"),
        ([-1], [0.5], "greater than or equal"),
        ([1], [math.nan], "finite"),
        ([], [], "no scores"),
    ],
)
def test_oracle_refuses_a_wrong_list(positions: list[int], scores: list[float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        table.make("oracle", {"positions": positions, "scores": scores})
