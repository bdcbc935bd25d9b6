"""Every row of the table: the oracle's numbers, whole and in chunks, causal as it says, safe in half precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import signal_inputs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlens.errors import InputError
from kvlens.observables import lag, lag_causal
from kvlens.observables.table import ALL, BY_NAME, NEEDS, TABLE, Signal, choose, read, with_sources

LONG = 2 * lag.CHUNK + 37
each_signal = pytest.mark.parametrize("signal", TABLE, ids=lambda signal: signal.name)


def whole(signal: Signal, given: dict[str, Tensor]) -> Tensor:
    return signal.whole(*signal_inputs.only(signal, given).values())


def close(found: Tensor, truth: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    truth = torch.as_tensor(truth, dtype=torch.float64)
    torch.testing.assert_close(found.double(), truth, rtol=rtol, atol=atol, equal_nan=True)


# Numbers


@each_signal
@pytest.mark.parametrize("n_pos", [1, 2, 70, LONG])
def test_a_whole_trace_is_the_oracles(signal: Signal, n_pos: int) -> None:
    given = signal_inputs.inputs(n_pos, seed=n_pos)
    found = whole(signal, given)
    assert found.shape == (n_pos,)
    assert found.dtype in (torch.float32, torch.float64)
    close(found, signal_inputs.oracle(signal.name, signal_inputs.only(signal, given)))


@each_signal
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cutting_a_trace_into_chunks_changes_nothing(signal: Signal, data: st.DataObject) -> None:
    n_pos = data.draw(st.sampled_from([1, 2, 5, 63, 64, 65, 128, 129, 256, 257, 400, 513]))
    borders = sorted(data.draw(st.sets(st.integers(1, max(1, n_pos - 1)), max_size=min(n_pos - 1, 12))))
    given = signal_inputs.inputs(n_pos, seed=data.draw(st.integers(0, 99)))
    pieces = [signal_inputs.only(signal, chunk) for chunk in signal_inputs.chunks(given, borders)]
    close(read([signal], pieces)[signal.name], whole(signal, given))


@each_signal
def test_one_token_at_a_time_is_the_whole(signal: Signal) -> None:
    given = signal_inputs.inputs(300)
    pieces = [signal_inputs.only(signal, chunk) for chunk in signal_inputs.chunks(given, range(1, 300))]
    close(read([signal], pieces)[signal.name], whole(signal, given))


def test_rows_that_take_another_row_are_read_beside_it() -> None:
    """From hidden states in chunks, the z-score is that of the change."""
    given = signal_inputs.inputs(200)
    rows = [signal for signal in TABLE if signal.needs == {"hidden"}]
    found = read(rows, [{"hidden": chunk["hidden"]} for chunk in signal_inputs.chunks(given, [1, 50, 51, 130])])
    change = signal_inputs.oracle("hidden_change", {"hidden": given["hidden"]})
    assert list(found) == ["hidden_change", "hidden_change_rolling", "hidden_change_z"]
    close(found["hidden_change"], change)
    for name in ("hidden_change_rolling", "hidden_change_z"):
        close(found[name], signal_inputs.oracle(name, {"x": torch.from_numpy(change)}))


@pytest.mark.parametrize("signal", [s for s in TABLE if s.per_layer], ids=lambda signal: signal.name)
def test_layers_in_front_are_layers_one_by_one(signal: Signal) -> None:
    layers = [signal_inputs.only(signal, signal_inputs.inputs(LONG, seed=seed)) for seed in (1, 2, 3)]
    together = signal.whole(*(torch.stack([layer[name] for layer in layers]) for name in signal.takes))
    for row, layer in zip(together, layers, strict=True):
        close(row, signal.whole(*layer.values()))


@each_signal
def test_inputs_and_states_are_left_as_they_were(signal: Signal) -> None:
    """A state can be carried on twice: nothing writes into it, nor into what was given."""
    given = signal_inputs.inputs(LONG)
    first, rest = (
        [*signal_inputs.only(signal, signal_inputs.piece(given, *edges)).values()] for edges in ((0, 150), (150, LONG))
    )
    kept = [tensor.clone() for tensor in (*first, *rest)]
    state, _ = signal.step(signal.init(), *first)
    once, again = (signal.step(state, *rest) for _ in range(2))
    close(once[1], again[1].double())
    if signal.finish is not None:
        close(signal.finish(once[0]), signal.finish(again[0]).double())
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip((*first, *rest), kept, strict=True))
    if state is not None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(state, dataclasses.fields(state)[0].name, None)


GROWING = {"attention_mass", "age"}  # a number a token is what they are


@pytest.mark.parametrize("signal", [s for s in TABLE if s.name not in GROWING], ids=lambda signal: signal.name)
@pytest.mark.parametrize("every", [100, 2000])
def test_a_state_does_not_grow_with_the_trace(signal: Signal, every: int) -> None:
    """Nor with the chunk that came last: a view into it would keep all of it alive."""

    def held(n_pos: int) -> int:
        given = signal_inputs.inputs(n_pos)
        state = signal.init()
        for chunk in signal_inputs.chunks(given, range(every, n_pos, every)):
            state, _ = signal.step(state, *signal_inputs.only(signal, chunk).values())
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(state))

    assert held(1300) == held(1300 - 5 * lag.CHUNK)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for one in value for tensor in tensors_in(one)] if isinstance(value, (list, tuple)) else []


# Causality


def other_future(n_pos: int, cut: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two traces that are the same up to `cut` and differ from there on, in length too."""
    one, other = signal_inputs.inputs(n_pos, seed=1), signal_inputs.inputs(n_pos + 50, seed=2)
    mixed = {}
    for name, tensor in other.items():
        mixed[name] = tensor.clone()
        if name == "weights":
            mixed[name][..., :cut, :cut] = one[name][..., :cut, :cut]
        elif name in ("ids", "hidden_change"):
            mixed[name][..., :cut] = one[name][..., :cut]
        elif name != "counts":
            mixed[name][..., :cut, :] = one[name][..., :cut, :]
    mixed["counts"] = torch.bincount(mixed["ids"], minlength=signal_inputs.N_VOCAB)[mixed["ids"]]
    return one, mixed


@each_signal
def test_the_mark_says_whether_the_future_is_read(signal: Signal) -> None:
    cut = LONG - 60  # inside the chunk that comes after the first one with a value
    before, after = (whole(signal, given)[:cut].double() for given in other_future(LONG, cut))
    same = torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)
    assert same == signal.causal


# Half precision and extremes


@each_signal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_wide(signal: Signal, dtype: torch.dtype) -> None:
    given = signal_inputs.inputs(LONG, dtype=dtype)
    close(whole(signal, given), signal_inputs.oracle(signal.name, signal_inputs.only(signal, given)), rtol=2e-5)


@pytest.mark.parametrize(
    "signal", [s for s in TABLE if {"hidden", "keys", "values"} & {*s.takes}], ids=lambda s: s.name
)
def test_massive_activations_stay_finite(signal: Signal) -> None:
    """4,096 channels of +-20 in float16: their squares add up to more than float16 holds."""
    shape = (LONG, 4096) if "hidden" in signal.takes else (1, LONG, 4096)
    states = torch.full(shape, 20.0, dtype=torch.float16)
    states[..., ::2, :] *= -1
    states[..., ::3, 5] = 60_000
    given = dict.fromkeys(signal.takes, states)
    found = signal.whole(*(given.values() if signal.per_layer else (states[None] for states in given.values())))
    if "hidden" in signal.takes:
        assert found[1] > 2500
    undefined = {"lag": slice(lag.CHUNK, None), "hidden_change": slice(0, 1)}
    defined = torch.ones(LONG, dtype=torch.bool)
    if signal.name in undefined:
        defined[undefined[signal.name]] = False
    assert torch.equal(found.isfinite(), defined)


@pytest.mark.parametrize("value", [0.1, -3e4, 1e-20])
@pytest.mark.parametrize(
    "signal", [s for s in TABLE if {"hidden", "keys", "values", "hidden_change"} & {*s.takes}], ids=lambda s: s.name
)
def test_constant_inputs_vary_by_exactly_nothing(signal: Signal, value: float) -> None:
    shape = {"hidden": (LONG, 12), "hidden_change": (LONG,)}.get(signal.takes[0], (2, LONG, 7))
    states = [torch.full(shape, value) for _ in signal.takes]
    found = signal.whole(*(states if signal.per_layer else (tensor[None] for tensor in states))).double()
    if signal.name in ("key_norm", "value_norm", "hidden_change_rolling"):
        expected = torch.tensor(value).double() if signal.name == "hidden_change_rolling" else abs(value) * 7**0.5
        torch.testing.assert_close(found, torch.as_tensor(expected).double().expand(LONG), rtol=1e-6, atol=1e-12)
    elif signal.name == "lag":
        close(found[: lag.CHUNK], torch.full((lag.CHUNK,), 2 / lag.CHUNK), rtol=1e-6, atol=0)
    else:
        assert torch.equal(found[1:], torch.zeros(LONG - 1, dtype=torch.float64))


# The table


def test_names_are_unique_and_what_a_row_takes_comes_before_it() -> None:
    known = set(NEEDS)
    for signal in TABLE:
        assert set(signal.takes) <= known
        assert signal.name not in known
        known.add(signal.name)
    assert {kind for signal in TABLE for kind in signal.needs} == {
        "hidden",
        "keys_values",
        "attention",
        "logits",
        "ids",
    }


def test_choosing() -> None:
    assert choose() == choose(ALL) == choose([ALL, "age"]) == TABLE
    assert [signal.name for signal in choose(" lag,key_var , lag")] == ["key_var", "lag"]
    assert choose(["age"]) == (BY_NAME["age"],)
    assert [signal.name for signal in with_sources(choose("age,hidden_change_z"))] == [
        *("hidden_change", "hidden_change_z", "age")
    ]


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        ("hiden_change", "'hiden_change'", "did you mean hidden_change or"),
        ("age,entropy", "'entropy'", "attention_entropy"),
        ("xyzzy", "'xyzzy'", "the signals are hidden_change, "),
        ("", "''", "the signals are"),
        ("surprise_ful", "'surprise_ful'", "surprise_full"),
        ([], "no signal was asked for", "or all"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(asked: Any, message: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        choose(asked)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_row_whose_inputs_are_not_given_is_left_out() -> None:
    assert read(TABLE, [{"ids": torch.arange(4)}]).keys() == {"age"}
    assert read(TABLE, []) == {}


@pytest.mark.parametrize("module", [lag, lag_causal])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunks_of_any_size(module: Any, chunk: int) -> None:
    given = signal_inputs.inputs(50)
    keys, values = given["keys"], given["values"]
    state, pieces = module.init(chunk), []
    for start in range(0, 50, 7):
        state, found = module.step(state, keys[:, start : start + 7], values[:, start : start + 7])
        pieces.append(found)
    if module is lag:
        pieces.append(lag.finish(state))
        truth = signal_inputs.signal_oracles.lag(keys.numpy(), values.numpy(), chunk)
    else:
        truth = signal_inputs.signal_oracles.lag_causal(keys[None].numpy(), values[None].numpy(), chunk)
    close(torch.cat(pieces), truth)
    with pytest.raises(ValueError, match="1 is the least"):
        module.init(0)
