"""`kvlens.observe`: are the tables as the contract says, the numbers the oracle's, and a second start no second run?"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import signal_oracles
import tiny
import tiny_runs
import tiny_tokenizers
import torch
from lenses import require_transformer_lens, tiny_lens
from torch import Tensor

import kvlens
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, blocks, cache_layers, logits, new_cache, wrap
from kvlens.observables import lag
from kvlens.observables.table import TABLE, choose
from kvlens.observables.table import read as read_chunks
from kvlens.probe import observe as observing
from kvlens.probe import signal_pass
from kvlens.probe.signal_pass import read_signals
from kvlens.records import Trace
from kvlens.schemas import SIGNALS, table_schema
from kvlens.texts import tokenize

MODEL = tiny_runs.model()
TRACES = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
TOKENS = {trace.id: tokenize(trace, MODEL.tokenizer) for trace in TRACES}
NAMES = [signal.name for signal in TABLE]
PER_LAYER = [signal.name for signal in TABLE if signal.per_layer]
NOT_CAUSAL = {"attention_mass", "lag", "age", "log_frequency"}
# The tiny models are drawn wide: what rounding does in one layer the next ones amplify.
RTOL, ATOL = 2e-4, 2e-4


def observe(out: Path, traces: list[Trace] = TRACES, model: Model = MODEL, **asked: Any) -> kvlens.Run:
    return kvlens.observe(traces, model, out, **asked)


def read(model: Model, ids: Tensor, names: str = "all") -> dict[str, np.ndarray]:
    counts = torch.bincount(ids, minlength=model.d_vocab)[ids]
    return read_signals(model, ids, choose(names), counts)


# Tables


def test_tables_are_as_the_contract_says(tmp_path: Path) -> None:
    run = observe(tmp_path)
    meta = tiny_runs.state(tmp_path)
    schema = pq.read_schema(tmp_path / "signals.parquet")
    assert schema.names == ["trace_id", "pos", "token_id", *NAMES]
    for name in NAMES:
        field = schema.field(name)
        assert field.type == (pa.list_(pa.float32(), MODEL.n_layers) if name in PER_LAYER else pa.float32())
        assert field.metadata[b"causal"] == (b"false" if name in NOT_CAUSAL else b"true")
    assert schema.equals(table_schema(SIGNALS, "signals", meta["config"]))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.json", "signals.parquet", "traces.parquet"]
    assert (meta["schema"], meta["status"], meta["dtype"], meta["seed"]) == (SIGNALS, "complete", "float32", 0)
    assert meta["model"] == {"name": "tiny", "fingerprint": MODEL.fingerprint, "note": ""}
    assert meta["counts"] == {"skipped": [], "traces": 2, "tokens": len(run.signals)}
    assert meta["config"] == {
        "signals": NAMES, "per_layer": PER_LAYER, "causal": [name for name in NAMES if name not in NOT_CAUSAL],
        "n_layers": 3, "rolling_window": 64, "lag_chunk": 128, "target_tokens": 48, "chat": False,
        "beyond_context": False,
    }  # fmt: skip
    again = kvlens.load(tmp_path)
    for name in NAMES:
        one, two = (np.stack(r.signals[name]) for r in (run, again))
        assert one.shape == (len(run.signals), *[3] * (name in PER_LAYER))
        assert np.array_equal(one, two, equal_nan=True)
        assert (run.signals[name][0] if name in PER_LAYER else run.signals[name]).dtype == np.float32
    stacked = kvlens.load([tmp_path, observe(tmp_path / "other", signals="age,key_norm").path])
    assert stacked.signals.run.nunique() == 2


def test_rows_stand_for_every_token_of_prompt_and_reasoning(tmp_path: Path) -> None:
    run = observe(tmp_path, signals="age")
    assert list(run.signals.columns) == ["trace_id", "pos", "token_id", "age"]
    assert list(run.traces.trace_id) == list(TOKENS)
    for trace_id, tokens in TOKENS.items():
        rows = run.signals[run.signals.trace_id == trace_id]
        assert list(rows.pos) == list(range(tokens.n_context))
        assert list(rows.token_id) == tokens.ids[: tokens.n_context].tolist()
        assert list(rows.age) == list(range(tokens.n_context))[::-1]
        trace = run.traces.set_index("trace_id").loc[trace_id]
        assert trace.to_dict() == {
            "n_tokens": tokens.n_tokens,
            "n_prompt": tokens.n_prompt,
            "n_context": tokens.n_context,
        }


def test_a_run_tells_which_tokens_and_model_it_is_of_as_labels_do(tmp_path: Path) -> None:
    labels = kvlens.label(TRACES, MODEL, tmp_path / "labels", window=9)
    run = observe(tmp_path / "signals", signals="age")
    for fact in ("input_hash", "model", "dtype"):
        assert run.meta[fact] == labels.meta[fact]
    joined = run.signals.merge(labels.tokens, on=["trace_id", "pos"], suffixes=("", "_labels"), validate="1:1")
    assert len(joined) == len(run.signals)
    assert (joined.token_id == joined.token_id_labels).all()
    assert set(joined.segment) == {"prompt", "reasoning"}
    other = dataclasses.replace(MODEL, tokenizer=tiny_tokenizers.byte_level(bos=False))
    assert observe(tmp_path / "other", model=other, signals="age").meta["input_hash"] != run.meta["input_hash"]


def test_frequency_is_counted_over_prompt_and_reasoning_of_all_traces(tmp_path: Path) -> None:
    run = observe(tmp_path, signals="log_frequency")
    context = np.concatenate([tokens.ids[: tokens.n_context] for tokens in TOKENS.values()])
    counts = [int((context == token).sum()) for token in context]
    np.testing.assert_allclose(run.signals.log_frequency, np.log(counts), rtol=1e-6)
    assert max(counts) > 3
    alone = observe(tmp_path / "alone", TRACES[:1], signals="log_frequency")
    assert (alone.signals.log_frequency.to_numpy() <= run.signals.log_frequency[: len(alone.signals)].to_numpy()).all()
    assert alone.signals.log_frequency.sum() < run.signals.log_frequency[: len(alone.signals)].sum()


def test_the_target_is_never_in_the_pass(tmp_path: Path) -> None:
    runs = [
        observe(tmp_path / target[1:3], [dataclasses.replace(TRACES[0], target=target)])
        for target in (" So it is.", " Quite another one, and longer at that!")
    ]
    pd.testing.assert_frame_equal(runs[0].signals, runs[1].signals)
    assert runs[0].meta["input_hash"] != runs[1].meta["input_hash"]


# Numbers


@torch.no_grad()
def oracle(build: Callable[[], Any], ids: Tensor) -> dict[str, np.ndarray]:
    """Every signal from another pass: the model's eager attention and its own reports, the slow functions over them."""
    model = wrap(build())
    model.hf.set_attn_implementation("eager")
    residuals: list[np.ndarray] = []
    handles = [
        block.register_forward_hook(lambda _, __, output: residuals.append(output[0].double().numpy()))
        for block in blocks(model)
    ]
    attentions = model.hf(ids[None], output_attentions=True, use_cache=False).attentions
    for handle in handles:
        handle.remove()
    cache = new_cache(model)
    rows = logits(model, ids[None], cache=cache)[0].double().numpy()
    keys, values = (np.stack([pair[i][0].double().numpy() for pair in cache_layers(cache)]) for i in (0, 1))
    changes = [signal_oracles.hidden_change(hidden) for hidden in residuals]
    weights = [attention[0].double().numpy() for attention in attentions]
    by_layer = {
        "hidden_change": changes,
        "hidden_change_rolling": [signal_oracles.rolling_mean(change) for change in changes],
        "hidden_change_z": [signal_oracles.zscore(change) for change in changes],
        "key_var": [signal_oracles.variance(layer) for layer in keys],
        "value_var": [signal_oracles.variance(layer) for layer in values],
        "key_norm": [signal_oracles.norm(layer) for layer in keys],
        "value_norm": [signal_oracles.norm(layer) for layer in values],
        "attention_mass": [signal_oracles.attention_mass(layer) for layer in weights],
        "attention_entropy": [signal_oracles.attention_entropy(layer) for layer in weights],
        "lag": [signal_oracles.lag(*pair) for pair in zip(keys, values, strict=True)],
    }
    found = {name: np.stack(layers, -1) for name, layers in by_layer.items()}
    counts = np.array([int((ids == token).sum()) for token in ids])
    return found | {
        "lag_causal": signal_oracles.lag_causal(keys, values),
        "surprisal": signal_oracles.surprisal(rows, ids.numpy()),
        "age": signal_oracles.age(ids.numpy()),
        "log_frequency": signal_oracles.log_frequency(counts),
    }


@pytest.mark.parametrize(
    ("family", "n_tokens"), [*((family, 40) for family in tiny.FAMILIES), ("gemma3", 2 * lag.CHUNK)]
)
def test_every_signal_is_the_oracles_on_every_family(family: str, n_tokens: int) -> None:
    ids = tiny.token_ids(n_tokens)[0]
    found, truth = read(wrap(tiny.FAMILIES[family]()), ids), oracle(tiny.FAMILIES[family], ids)
    assert list(found) == NAMES == list(truth)
    for name in NAMES:
        np.testing.assert_allclose(found[name], truth[name], rtol=RTOL, atol=ATOL, err_msg=name)
    assert np.isfinite(found["lag"]).any() == (n_tokens >= 2 * lag.CHUNK)


def test_the_last_layer_is_before_the_final_norm() -> None:
    ids = tiny.token_ids(20)[0]
    with torch.no_grad():
        states = MODEL.hf(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    changes = np.stack([signal_oracles.hidden_change(layer[0].numpy()) for layer in states[1:]], -1)
    found = read(MODEL, ids, "hidden_change")["hidden_change"]
    np.testing.assert_allclose(found[:, :-1], changes[:, :-1], rtol=RTOL)
    assert (np.abs(found[1:, -1] / changes[1:, -1] - 1) > 0.1).all()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_backend_and_choice_of_signals_change_no_value(family: str) -> None:
    ids = tiny.token_ids(150)[0]
    model = wrap(tiny.FAMILIES[family]())
    everything = read(model, ids)
    cheap = [signal.name for signal in TABLE if "attention" not in signal.needs]
    found = read(model, ids, ",".join(cheap)) | read(model, ids, "attention_mass") | read(model, ids, "hidden_change_z")
    model.hf.set_attn_implementation("eager")
    for other in (found, read(model, ids)):
        for name, values in other.items():
            np.testing.assert_allclose(values, everything[name], rtol=RTOL, atol=ATOL, err_msg=name)


def test_a_backend_that_takes_no_mask_is_given_none() -> None:
    """With FlashAttention's name on it, any mask would be refused."""
    ids = tiny.token_ids(20)[0]
    flash = dataclasses.replace(MODEL, attention="flash_attention_2")
    for name, values in read(flash, ids).items():
        assert np.array_equal(values, read(MODEL, ids)[name], equal_nan=True)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_causal_signals_do_not_read_the_future_and_the_others_do(family: str) -> None:
    """Two texts that part inside the chunk after the first one with a lag, of different lengths."""
    model = wrap(tiny.FAMILIES[family](max_position_embeddings=512))
    cut = 2 * lag.CHUNK - 20
    one, other = tiny.token_ids(cut + 30)[0], tiny.token_ids(cut + 50, seed=1)[0]
    other[:cut] = one[:cut]
    found = [{name: values[:cut] for name, values in read(model, ids).items()} for ids in (one, other)]
    for signal in TABLE:
        before, after = (values[signal.name] for values in found)
        assert np.allclose(before, after, rtol=RTOL, atol=ATOL, equal_nan=True) == signal.causal, signal.name
    assert {signal.name for signal in TABLE if not signal.causal} == NOT_CAUSAL


# The same through TransformerBridge


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_transformer_lens_names_give_the_same_numbers(family: str) -> None:
    require_transformer_lens()
    lens = tiny_lens(family)
    tokens = tiny.as_tokens(tiny.token_ids(2 * lag.CHUNK + 1), 1)
    context = slice(0, tokens.n_context)
    attn = "blocks.{}.attn.hook_"
    rotated = "k" if family in ("gpt2", "phi3", "gpt_neox") else "rot_k"  # the others' hook behind rotation fires
    wanted = [attn.format(layer) + kind for layer in range(lens.model.n_layers) for kind in (rotated, "v", "pattern")]
    wanted += [f"blocks.{layer}.hook_resid_post" for layer in range(lens.model.n_layers)]
    rows, cache = lens.run_with_cache(tokens, wanted)
    inputs = []
    for layer in range(lens.model.n_layers):
        keys, values = (cache[attn.format(layer) + kind][0, context].transpose(0, 1) for kind in (rotated, "v"))
        pattern = cache[attn.format(layer) + "pattern"][0, :, context, context]
        residual = cache[f"blocks.{layer}.hook_resid_post"][0, context]
        inputs.append({"hidden": residual, "keys": keys, "values": values, "weights": pattern})
    ids = torch.from_numpy(tokens.ids[context])
    found = read(lens.model, ids)
    # Before the rotation keys have the same norm, and nothing else; GPT-2 rotates nothing.
    compared = set(PER_LAYER) - ({"key_var", "lag"} if family in ("phi3", "gpt_neox") else set())
    layers = [read_chunks([signal for signal in TABLE if signal.per_layer], [given]) for given in inputs]
    for name in compared:
        twin = torch.stack([layer[name] for layer in layers], -1).numpy()
        np.testing.assert_allclose(found[name], twin, rtol=RTOL, atol=ATOL, err_msg=name)
    scalars = read_chunks(choose("surprisal"), [{"logits": rows[0, context], "ids": ids}])
    np.testing.assert_allclose(found["surprisal"], scalars["surprisal"].numpy(), rtol=RTOL, atol=ATOL)


# Surprise, a pass of its own


def test_surprise_is_read_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(signal_pass, "Surprise", lambda *_: pytest.fail("a second pass"))
        for number, names in enumerate(("all", "key_norm,lag", ["all", "age"])):
            columns = list(observe(tmp_path / str(number), TRACES[:1], signals=names).signals.columns)
            assert not [name for name in columns if "surprise" in name]
    run = observe(tmp_path / "both", signals="surprise_fast,surprise_full")
    assert list(run.signals.columns) == ["trace_id", "pos", "token_id", "surprise_full", "surprise_fast"]
    config = run.meta["config"]
    assert config["signals"] == ["surprise_full", "surprise_fast"]
    assert (config["per_layer"], config["causal"]) == ([], [])  # what comes after a token is what it is read off
    for name in config["signals"]:
        field = pq.read_schema(tmp_path / "both" / "signals.parquet").field(name)
        assert (field.type, field.nullable, field.metadata[b"causal"]) == (pa.float32(), True, b"false")
    everything = observe(tmp_path / "all", TRACES[:1], signals="all,surprise_fast").signals
    assert list(everything.columns) == ["trace_id", "pos", "token_id", *NAMES, "surprise_fast"]
    box = run.signals.surprise_fast[run.signals.trace_id == "box"]
    np.testing.assert_allclose(everything.surprise_fast, box, rtol=RTOL, atol=ATOL)


def test_surprise_is_null_at_the_last_position_alone(tmp_path: Path) -> None:
    run = observe(tmp_path, signals="surprise_full,surprise_fast,surprisal")
    last = run.signals.groupby("trace_id").pos.transform("max") == run.signals.pos
    assert last.sum() == 2
    for name in ("surprise_full", "surprise_fast"):
        assert run.signals[name].dtype == np.float32
        assert (run.signals[name].isna() == last).all()
        assert pq.read_table(tmp_path / "signals.parquet").column(name).null_count == 2
    assert run.signals.surprisal.isna().sum() == 2  # another signal's own: the first token


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_surprise_beside_other_signals_is_what_it_is_alone(family: str) -> None:
    """Passes, attention in another's place, and caches do not meet."""
    model, ids = wrap(tiny.FAMILIES[family]()), tiny.token_ids(24)[0]
    names = ("surprise_full", "surprise_fast")
    together = read(model, ids, "surprise_full,surprise_fast,attention_mass,key_norm,hidden_change,surprisal")
    for name in names:
        np.testing.assert_allclose(together[name], read(model, ids, name)[name], rtol=RTOL, atol=ATOL)
        assert np.isnan(together[name]).tolist() == [False] * 23 + [True]
    assert not np.allclose(together[names[0]][:-1], together[names[1]][:-1], atol=0.1)
    others = read(model, ids, "attention_mass,key_norm,hidden_change,surprisal")
    for name, values in others.items():
        assert np.array_equal(values, together[name], equal_nan=True)
    assert hooks_in_place(model) == 0


# What stays behind


def hooks_in_place(model: Model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.hf.modules())


def test_nothing_stays_behind_after_a_pass_and_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = wrap(tiny.llama()), tiny.token_ids(12)
    with torch.no_grad():
        before = logits(model, ids)
    read(model, ids[0])
    broken = dataclasses.replace(TABLE[0], step=lambda *_: 1 / 0)
    for row in (broken, dataclasses.replace(choose("attention_mass")[0], step=lambda *_: 1 / 0)):
        with pytest.raises(ZeroDivisionError):
            read_signals(model, ids[0], [row, *choose("attention_entropy,hidden_change_z")], ids[0])
    assert hooks_in_place(model) == 0
    assert model.hf.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(logits(model, ids), before)


# Again, otherwise


def untouched(run: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in run.iterdir()}


def test_the_same_command_computes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = observe(tmp_path)
    before = untouched(tmp_path)
    monkeypatch.setattr(observing, "read_signals", lambda *_: pytest.fail("computed again"))
    again = observe(tmp_path, signals=list(reversed(NAMES)))  # in the table's order whatever was said
    assert untouched(tmp_path) == before
    pd.testing.assert_frame_equal(again.signals, run.signals)


def test_a_run_goes_on_behind_the_traces_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def once(model: Model, ids: Tensor, *rest: Any) -> Any:
        seen.append(len(ids))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return read_signals(model, ids, *rest)

    monkeypatch.setattr(observing, "read_signals", once)
    with pytest.raises(KeyboardInterrupt):
        observe(tmp_path / "stopped")
    ticks: list[tuple[int, int]] = []
    notes: list[str] = []
    observe(tmp_path / "stopped", progress=lambda *tick: ticks.append(tick), note=notes.append)
    lengths = [tokens.n_context for tokens in TOKENS.values()]
    assert seen == [*lengths, lengths[1]]
    assert ticks == [(lengths[0], sum(lengths)), (sum(lengths), sum(lengths))]
    assert notes == [f"{lengths[1]} tokens of 1 trace to observe, a forward pass each, 1 done before"]
    observe(tmp_path / "whole")
    assert tiny_runs.hashes(tmp_path / "stopped") == tiny_runs.hashes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"signals": "age,key_norm"}, "signals is ['age'] there and ['key_norm', 'age'] here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"traces": TRACES[:1]}, "input_hash"),
        ({"model": tiny_runs.model(num_hidden_layers=2)}, "fingerprint"),
    ],
)
def test_another_run_is_never_overwritten_unasked(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    asked = {"signals": "age"} | asked
    observe(tmp_path, signals="age")
    before = untouched(tmp_path)
    with pytest.raises(InputError, match="different configuration") as caught:
        observe(tmp_path, **asked)
    assert message in caught.value.message
    assert untouched(tmp_path) == before
    observe(tmp_path, **asked, force=True)


# Half precision, many inputs


def test_half_precision_models_give_finite_signals_near_float32s() -> None:
    ids = tiny.token_ids(60)[0]
    half = wrap(copy.deepcopy(MODEL.hf).to(torch.bfloat16))
    found, truth = read(half, ids), read(MODEL, ids)
    for name in ("key_norm", "value_norm", "hidden_change", "attention_entropy"):
        assert np.array_equal(np.isfinite(found[name]), np.isfinite(truth[name]))
        compared = truth[name] > 0.1  # where both are numbers
        assert np.median(np.abs(found[name][compared] / truth[name][compared] - 1)) < 0.05
    changes = found["hidden_change"][1:, -1]
    assert len(np.unique(changes)) > 0.9 * len(changes)  # computed in bfloat16 most of them would tie


def test_states_that_are_no_numbers_are_refused() -> None:
    broken = wrap(copy.deepcopy(MODEL.hf))
    with torch.no_grad():
        broken.hf.model.layers[1].mlp.down_proj.weight.fill_(3e38)
    with pytest.raises(ModelRefused, match="NaN or infinity"):
        read(broken, tiny.token_ids(9)[0], "hidden_change")


def test_traces_too_short_for_a_lag_are_named(tmp_path: Path) -> None:
    long = Trace("long", prompt=tiny_runs.SUM["prompt"] * 20, target=" so")
    model = tiny_runs.model(max_position_embeddings=512)
    run = observe(tmp_path, [*TRACES, long], model, signals="lag")
    assert run.meta["results"]["too_short"] == {"lag": ["box", "sum"]}
    has_value = np.isfinite(np.stack(run.signals.lag)).all(-1)
    n_context = int(run.traces.n_context[2])
    assert n_context >= 256
    assert has_value.sum() == (n_context // 128 - 1) * 128
    assert set(run.signals.trace_id[has_value]) == {"long"}
    assert observe(tmp_path / "other", signals="age").meta["results"]["too_short"] == {}


def test_two_tokens_are_enough(tmp_path: Path) -> None:
    run = observe(tmp_path, [Trace("two", prompt="a", target="b")])  # BOS and one token of context
    assert len(run.signals) == 2
    assert np.isnan(run.signals.surprisal[0])
    assert run.signals.surprisal[1] > 0
    assert np.isfinite(np.stack(run.signals.hidden_change)).tolist() == [[False] * 3, [True] * 3]
    assert np.stack(run.signals.hidden_change_z).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("traces", "asked", "message"),
    [
        ([], {}, "no traces"),
        ([TRACES[0], TRACES[0]], {}, "the id 'box' stands for 2 traces"),
        (TRACES, {"limit": 0}, "cannot take 0 traces"),
        (TRACES, {"signals": "key_nrom"}, "no signal 'key_nrom'"),
        (TRACES, {"signals": []}, "no signal was asked for"),
        (TRACES, {"target_tokens": 0}, "target_tokens 0 is outside 1"),
        (TRACES, {"seed": -1}, "seed -1 is outside 0"),
        ([Trace("whole", text="a " * 90)], {"chat": True}, "no prompt to render"),
        ([Trace("long", prompt="a " * 300, target="b")], {}, "more than the model's context of 256"),
        ([Trace("empty", prompt="a", target="")], {}, "target"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    tmp_path: Path, traces: list[Trace], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        observe(tmp_path / "out", traces, **asked)
    assert not (tmp_path / "out").exists()


def test_traces_beyond_the_context_can_be_asked_for(tmp_path: Path) -> None:
    long = [Trace("long", prompt="a " * 300, target="b")]
    run = observe(tmp_path, long, beyond_context=True, signals="surprisal")
    assert len(run.signals) > 256
    assert run.meta["config"]["beyond_context"] is True


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers() -> None:
    ids = tiny.token_ids(150)[0]
    there = wrap(copy.deepcopy(MODEL.hf).cuda())
    for name, values in read(there, ids.cuda()).items():
        np.testing.assert_allclose(values, read(MODEL, ids)[name], rtol=2e-3, atol=2e-3, err_msg=name)


@pytest.mark.real
def test_the_default_model_is_observed(tmp_path: Path, smollm2: Model) -> None:
    text = (Path(kvlens.__file__).parents[1] / "data" / "traces" / "documents.jsonl").read_text(encoding="utf-8")
    trace = Trace("documents", text=text[:1600])
    run = observe(tmp_path, [trace], smollm2)
    assert run.meta["model"]["note"] == "Q4_1, dequantised"
    ids = torch.from_numpy(tokenize(trace, smollm2.tokenizer).ids[: len(run.signals)])
    assert len(ids) > 2 * lag.CHUNK
    residuals: list[np.ndarray] = []
    handles = [
        block.register_forward_hook(lambda _, __, output: residuals.append(output[0].double().numpy()))
        for block in blocks(smollm2)
    ]
    with torch.no_grad():
        rows = smollm2.hf(ids[None], use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    changes = np.stack([signal_oracles.hidden_change(hidden) for hidden in residuals], -1)
    np.testing.assert_allclose(np.stack(run.signals.hidden_change), changes, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(run.signals.surprisal, signal_oracles.surprisal(rows.numpy(), ids.numpy()), atol=1e-3)
    assert 1 < run.signals.surprisal.mean() < 6
    np.testing.assert_allclose(np.stack(run.signals.attention_mass).sum(0), len(ids), rtol=1e-5)
    assert np.abs(np.stack(run.signals.hidden_change_z)).max() <= 63**0.5 + 1e-5
    without = {"hidden_change": 1, "hidden_change_rolling": 1, "surprisal": 1, "lag": len(ids) % 128 + 128}
    for name in NAMES:
        undefined = np.isnan(np.stack(run.signals[name])).reshape(len(ids), -1).all(-1)
        assert undefined.sum() == without.get(name, 0), name
        assert np.isfinite(np.stack(run.signals[name])[~undefined]).all()
