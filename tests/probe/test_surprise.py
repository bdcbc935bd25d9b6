"""`kvlens.surprise`: are the tables as the contract says, the numbers the pass's own, and is bad input said at once?"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import tiny_runs
import tiny_tokenizers
import torch
from torch import Tensor

import kvlens
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, cache_layers, hidden, logits, new_cache, wrap
from kvlens.observables.surprise import State, Surprise
from kvlens.observables.surprise_variant import read_variant
from kvlens.probe import surprise as probing
from kvlens.probe.surprise_cycles import Cycle, cycles, make_cycle
from kvlens.records import Trace
from kvlens.schemas import SURPRISE, SURPRISE_TABLES
from kvlens.segmenting import unit_numbers
from kvlens.texts import tokenize

MODEL = tiny_runs.model()
TRACES = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
TOKENS = {trace.id: tokenize(trace, MODEL.tokenizer) for trace in TRACES}
N_TOKENS = sum(tokens.n_context for tokens in TOKENS.values())
MANY = ["full", "fast", "layers=2,logprob", "no_self", "sentence", "clause", "gap=3", "fast,past", "past,gap=2"]


def surprise(out: Path, traces: list[Trace] = TRACES, model: Model = MODEL, **asked: Any) -> kvlens.Run:
    return kvlens.surprise(traces, model, out, **asked)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> kvlens.Run:
    """Every kind of variant, without refreshes."""
    return surprise(tmp_path_factory.mktemp("runs") / "run", variants=MANY)


def scores(run: kvlens.Run, trace_id: str, variant: str) -> np.ndarray:
    rows = run.scores[(run.scores.trace_id == trace_id) & (run.scores.variant == variant)]
    assert list(rows.pos) == list(range(len(rows)))
    return rows.score.to_numpy()


# Tables


def test_tables_are_as_the_contract_says(tmp_path: Path) -> None:
    run = surprise(tmp_path, budget=8, every=4, frozen=1, recent=2)
    meta = tiny_runs.state(tmp_path)
    tables = {file.stem: pq.read_schema(file) for file in tmp_path.glob("*.parquet")}
    assert {name: schema.names for name, schema in tables.items()} == {
        "scores": ["trace_id", "variant", "pos", "score"],
        "tokens": ["trace_id", "pos", "token_id", "token", "segment"],
        "traces": ["trace_id", "n_tokens", "n_prompt", "n_context"],
        "refreshes": ["trace_id", "variant", "refresh", "n_seen", "pos", "kept", "score"],
    }
    assert all(schema.equals(SURPRISE_TABLES[name]) for name, schema in tables.items())
    kinds = {name: tables["refreshes"].field(name).type for name in tables["refreshes"].names}
    assert (kinds["kept"], kinds["score"], kinds["pos"]) == (pa.bool_(), pa.float32(), pa.int32())
    nullable = {field.name for schema in tables.values() for field in schema if field.nullable}
    assert nullable == {"score"}
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "refreshes.parquet", "run.json", "scores.parquet", "tokens.parquet", "traces.parquet",
    ]  # fmt: skip
    assert (meta["schema"], meta["status"], meta["dtype"], meta["seed"]) == (SURPRISE, "complete", "float32", 0)
    assert meta["counts"] == {"skipped": [], "traces": 2, "tokens": N_TOKENS}
    assert meta["config"] == {
        "variants": ["full", "fast"], "cycle": {"budget": 8, "every": 4, "frozen": 1, "recent": 2},
        "target_tokens": 48, "chat": False, "beyond_context": False,
    }  # fmt: skip
    again = kvlens.load(tmp_path)
    for name in tables:
        pd.testing.assert_frame_equal(again[name], run[name])


def test_rows_stand_for_every_token_of_prompt_and_reasoning_under_every_variant(run: kvlens.Run) -> None:
    assert run.meta["config"]["variants"] == MANY_NAMES
    assert run.meta["config"]["cycle"] is None
    assert "refreshes" not in run.tables
    assert len(run.scores) == N_TOKENS * len(MANY)
    assert list(run.traces.trace_id) == list(TOKENS)
    for trace_id, tokens in TOKENS.items():
        n = tokens.n_context
        rows = run.tokens[run.tokens.trace_id == trace_id]
        assert list(rows.pos) == list(range(n))
        assert list(rows.token_id) == tokens.ids[:n].tolist()
        assert "".join(rows.token).endswith(tokens.text[: int(tokens.char_spans[n - 1, 1])])
        assert list(rows.segment) == ["prompt"] * tokens.n_prompt + ["reasoning"] * (n - tokens.n_prompt)
        lengths = run.traces.set_index("trace_id").loc[trace_id].to_dict()
        assert lengths == {"n_tokens": tokens.n_tokens, "n_prompt": tokens.n_prompt, "n_context": n}
        for variant in MANY_NAMES:
            assert len(scores(run, trace_id, variant)) == n


MANY_NAMES = ["full", "fast", "layers=2,logprob", "full,no_self", "full,sentence", "full,clause", "full,gap=3"]
MANY_NAMES += ["fast,past", "full,gap=2,past"]


def test_positions_are_those_of_labels_and_signals(tmp_path: Path) -> None:
    labels = kvlens.label(TRACES, MODEL, tmp_path / "labels", window=9)
    run = surprise(tmp_path / "run", variants="fast")
    for fact in ("input_hash", "model", "dtype"):
        assert run.meta[fact] == labels.meta[fact]
    joined = run.tokens.merge(labels.tokens, on=["trace_id", "pos"], suffixes=("", "_labels"), validate="1:1")
    assert len(joined) == len(run.tokens)
    for name in ("token_id", "token", "segment"):
        assert (joined[name] == joined[f"{name}_labels"]).all()


# Numbers


def by_hand(words: str, ids: Tensor, model: Model = MODEL, units: Tensor | None = None) -> np.ndarray:
    """The scores of the variant over a text read in one piece, its states from the model's own report."""
    one, variant = Surprise(model, read_variant(words)), read_variant(words)
    cache = new_cache(model)
    with torch.inference_mode():
        hidden(model, ids[None], cache=cache)
        reported = model.hf(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        states = None if one.start == 0 else reported[one.start]
        units = units[None] if units is not None and variant.unit else None
        state = State(ids[None], torch.arange(len(ids))[None], states, units)
        found = one.scores(state, cache_layers(cache))
    return np.where(found.known[0].numpy(), found.values[0].numpy(), np.nan)


@pytest.mark.parametrize("number", range(len(MANY)))
def test_scores_are_those_of_the_pass_over_the_whole_text(run: kvlens.Run, number: int) -> None:
    variant = read_variant(MANY[number])
    for trace_id, tokens in TOKENS.items():
        n = tokens.n_context
        units = torch.from_numpy(unit_numbers(tokens, variant.unit)) if variant.unit else None
        found = scores(run, trace_id, MANY_NAMES[number])
        assert found.dtype == np.float32
        truth = by_hand(MANY[number], torch.from_numpy(tokens.ids[:n]), units=units)
        np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-5)


def test_the_fast_score_is_a_dot_product_with_one_row_of_the_unembedding(run: kvlens.Run) -> None:
    """Written out for the second last token: it sees the last one alone, so attention is that one's value."""
    tokens = TOKENS["sum"]
    ids = torch.from_numpy(tokens.ids[: tokens.n_context])
    last = MODEL.hf.model.layers[-1]
    with torch.inference_mode():
        entering = MODEL.hf(ids[None], output_hidden_states=True, use_cache=False).hidden_states[-2][0]
        value = last.self_attn.v_proj(last.input_layernorm(entering[-1:])).reshape(2, 1, 8).repeat_interleave(2, 0)
        state = entering[-2] + last.self_attn.o_proj(value.reshape(-1))
        logit = MODEL.hf.model.norm(state) @ MODEL.hf.lm_head.weight[ids[-2]]
    assert scores(run, "sum", "fast")[-2] == pytest.approx(-float(logit), abs=1e-4)


def test_the_signals_of_observe_are_the_same_scores(run: kvlens.Run, tmp_path: Path) -> None:
    signals = kvlens.observe(TRACES, MODEL, tmp_path, signals="surprise_full,surprise_fast").signals
    for name in ("full", "fast"):
        mine = run.scores[run.scores.variant == name]
        assert list(zip(mine.trace_id, mine.pos, strict=True)) == list(zip(signals.trace_id, signals.pos, strict=True))
        assert np.array_equal(mine.score.to_numpy(), signals[f"surprise_{name}"].to_numpy(), equal_nan=True)


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt2", "gpt_neox"])
def test_every_kind_of_model_gives_the_scores_of_its_pass(family: str) -> None:
    model, ids = wrap(tiny.FAMILIES[family]()), tiny.token_ids(30)[0]
    words = ["full", "fast", "layers=2,logprob"]
    passes = [Surprise(model, read_variant(text)) for text in words]
    for text, found in zip(words, probing.score_tokens(model, passes, ids, {}), strict=True):
        np.testing.assert_allclose(found, by_hand(text, ids, model), rtol=1e-5, atol=1e-5)


def test_a_score_is_null_exactly_where_nothing_is_seen(run: kvlens.Run) -> None:
    for trace_id, tokens in TOKENS.items():
        n = tokens.n_context
        ends = {"full": 1, "fast": 1, "layers=2,logprob": 1, "full,no_self": 1, "full,gap=3": 4}
        starts = {"fast,past": 1, "full,gap=2,past": 3}
        for variant in MANY_NAMES:
            known = ~np.isnan(scores(run, trace_id, variant))
            if variant in ends:
                assert known.tolist() == [True] * (n - ends[variant]) + [False] * ends[variant]
            elif variant in starts:
                assert known.tolist() == [False] * starts[variant] + [True] * (n - starts[variant])
            else:
                units = unit_numbers(tokens, variant.partition(",")[2])
                assert known.tolist() == (units < units[-1]).tolist()
                assert 0 < known.sum() < n - 1
    stored = pq.read_table(Path(run.path) / "scores.parquet").column("score")
    assert stored.null_count == int(run.scores.score.isna().sum()) > 0
    assert not np.isnan(stored.drop_null().to_numpy()).any()


def test_tokens_of_a_unit_share_its_score(run: kvlens.Run) -> None:
    for unit in ("sentence", "clause"):
        for trace_id, tokens in TOKENS.items():
            table = pd.DataFrame({"unit": unit_numbers(tokens, unit), "score": scores(run, trace_id, f"full,{unit}")})
            groups = table.dropna().groupby("unit").score
            assert (groups.nunique() == 1).all()
            assert table.dropna().score.nunique() == groups.ngroups > 1


def test_what_a_variant_carries_is_counted(run: kvlens.Run) -> None:
    state = MODEL.d_model * 4
    wanted = dict.fromkeys(MANY_NAMES, 16)  # an id and a position of 8 bytes each
    wanted |= {"fast": 16 + state, "fast,past": 16 + state, "layers=2,logprob": 16 + state}
    wanted |= {"full,sentence": 24, "full,clause": 24}
    assert run.meta["results"]["n_bytes_a_token"] == wanted


# Refreshes


def test_refreshes_are_those_of_the_simulated_cycle(tmp_path: Path) -> None:
    words = ["full", "fast", "clause"]
    run = surprise(tmp_path, variants=words, budget=20, every=5, frozen=2, recent=1)
    for trace_id, tokens in TOKENS.items():
        ids = torch.from_numpy(tokens.ids[: tokens.n_context])
        for text in words:
            variant = read_variant(text)
            units = torch.from_numpy(unit_numbers(tokens, variant.unit)) if variant.unit else None
            steps = list(cycles(Surprise(MODEL, variant), ids, Cycle(20, 5, 2, 1), units))
            rows = run.refreshes[(run.refreshes.trace_id == trace_id) & (run.refreshes.variant == variant.name)]
            assert rows.refresh.nunique() == len(steps) > 2
            for number, step in enumerate(steps):
                table = rows[rows.refresh == number]
                assert set(table.n_seen) == {step.n_seen}
                assert list(table.pos) == step.positions.tolist()
                assert list(table.kept) == step.kept.tolist()
                assert np.array_equal(table.score.to_numpy(), step.scores, equal_nan=True)
    whole = surprise(tmp_path / "whole", variants=words)
    pd.testing.assert_frame_equal(whole.scores, run.scores)  # of the text that nothing was evicted from


def test_a_trace_that_never_fills_the_cache_has_no_refresh(tmp_path: Path) -> None:
    short = Trace("short", prompt="a b", target="c")
    n_box = TOKENS["box"].n_context
    run = surprise(tmp_path / "a", [short, TRACES[0]], budget=8, every=3, variants="fast")
    assert set(run.refreshes.trace_id) == {"box"}
    assert list(run.traces.trace_id) == ["short", "box"]
    for number, asked in enumerate(
        ({"budget": 10_000}, {"budget": n_box - 4, "every": 1}, {"budget": 2, "every": 999})
    ):
        none = surprise(tmp_path / str(number), TRACES[:1], variants="fast", **asked)
        assert len(none.refreshes) == 0
        assert list(none.refreshes.columns) == SURPRISE_TABLES["refreshes"].names
    one = surprise(tmp_path / "one", TRACES[:1], variants="fast", budget=n_box - 5, every=n_box)
    assert one.refreshes.refresh.nunique() == 1
    assert (~one.refreshes.kept).sum() == 1


@pytest.mark.parametrize(
    ("asked", "cycle"),
    [
        ({"budget": 20}, Cycle(20, 5, 4, 0)),
        ({"budget": 3, "frozen": 0, "every": 16}, Cycle(3, 16, 0, 0)),
        ({"budget": 9, "every": 30, "recent": 8}, Cycle(9, 30, 4, 8)),
    ],
)
def test_defaults_of_a_cycle(tmp_path: Path, asked: dict[str, int], cycle: Cycle) -> None:
    assert make_cycle(1, None, None, None) == Cycle(1, 1, 4, 0)
    run = surprise(tmp_path, TRACES[:1], variants="fast", **asked)
    assert run.meta["config"]["cycle"] == dataclasses.asdict(cycle)


# Again, otherwise


def untouched(run: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in run.iterdir()}


def test_the_same_command_computes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = surprise(tmp_path, variants=["full", " full , with_self", "fast"])  # one variant in two spellings
    assert run.meta["config"]["variants"] == ["full", "fast"]
    before = untouched(tmp_path)
    monkeypatch.setattr(probing, "score_tokens", lambda *_: pytest.fail("computed again"))
    again = surprise(tmp_path)
    assert untouched(tmp_path) == before
    pd.testing.assert_frame_equal(again.scores, run.scores)


def test_a_run_goes_on_behind_the_traces_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = probing.score_tokens

    def once(model: Model, passes: Any, ids: Tensor, units: Any) -> Any:
        seen.append(len(ids))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(model, passes, ids, units)

    monkeypatch.setattr(probing, "score_tokens", once)
    with pytest.raises(KeyboardInterrupt):
        surprise(tmp_path / "stopped", budget=8, every=4)
    ticks: list[tuple[int, int]] = []
    notes: list[str] = []
    surprise(
        tmp_path / "stopped", budget=8, every=4, progress=lambda *tick: ticks.append(tick), note=notes.append
    )  # fmt: skip
    lengths = [tokens.n_context for tokens in TOKENS.values()]
    assert seen == [*lengths, lengths[1]]
    assert ticks == [(1, 2), (2, 2)]
    assert notes == ["1 trace under 2 variants, 1 done before"]
    surprise(tmp_path / "whole", budget=8, every=4)
    assert tiny_runs.hashes(tmp_path / "stopped") == tiny_runs.hashes(tmp_path / "whole")
    assert len(tiny_runs.hashes(tmp_path / "whole")) == 4


def test_a_trace_half_written_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a trace are there, its refreshes are not."""
    monkeypatch.setattr(probing, "cycles", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        surprise(tmp_path / "stopped", variants="fast", budget=8, every=4)
    assert list((tmp_path / "stopped").glob(".parts/*/*.part"))
    monkeypatch.undo()
    surprise(tmp_path / "stopped", variants="fast", budget=8, every=4)
    surprise(tmp_path / "whole", variants="fast", budget=8, every=4)
    assert tiny_runs.hashes(tmp_path / "stopped") == tiny_runs.hashes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"variants": "full"}, "variants is ['fast'] there and ['full'] here"),
        ({"budget": 8, "every": 32}, "cycle is None there"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"traces": TRACES[:1]}, "input_hash"),
        ({"model": tiny_runs.model(num_hidden_layers=2)}, "fingerprint"),
    ],
)
def test_another_run_is_never_overwritten_unasked(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    asked = {"variants": "fast"} | asked
    surprise(tmp_path, variants="fast")
    before = untouched(tmp_path)
    with pytest.raises(InputError, match="different configuration") as caught:
        surprise(tmp_path, **asked)
    assert message in caught.value.message
    assert untouched(tmp_path) == before
    surprise(tmp_path, **asked, force=True)


# What is left out, what is too little


def test_the_target_is_never_in_the_pass(tmp_path: Path) -> None:
    runs = [
        surprise(tmp_path / target[1:3], [dataclasses.replace(TRACES[0], target=target)], budget=24)
        for target in (" So it is.", " Quite another one, and longer at that!")
    ]
    pd.testing.assert_frame_equal(runs[0].scores, runs[1].scores)
    pd.testing.assert_frame_equal(runs[0].refreshes, runs[1].refreshes)
    assert runs[0].meta["input_hash"] != runs[1].meta["input_hash"]


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("full", [True, False]),
        ("fast", [True, False]),
        ("sentence", [False, False]),  # no unit is between BOS and the last token
        ("clause,no_self", [False, False]),
        ("gap=7", [False, False]),
        ("past", [False, True]),
    ],
)
def test_two_tokens_are_enough(tmp_path: Path, words: str, known: list[bool]) -> None:
    run = surprise(tmp_path, [Trace("t", prompt="a", target="b")], variants=words, budget=9)
    assert run.scores.score.notna().tolist() == known
    assert len(run.refreshes) == 0


def test_half_precision_scores_are_float32_and_near() -> None:
    ids = tiny.token_ids(40)[0]
    half = wrap(copy.deepcopy(MODEL.hf).to(torch.bfloat16))
    passes = [[Surprise(model, read_variant(text)) for text in ("full", "fast")] for model in (half, MODEL)]
    rough = probing.score_tokens(half, passes[0], ids, {})
    for found, truth in zip(rough, probing.score_tokens(MODEL, passes[1], ids, {}), strict=True):
        assert found.dtype == np.float32
        assert len(np.unique(found[:-1])) > 30  # in bfloat16 many would tie
        assert np.corrcoef(found[:-1], truth[:-1])[0, 1] > 0.9


def test_nothing_stays_behind(tmp_path: Path) -> None:
    model, ids = tiny_runs.model(), tiny.token_ids(12)
    with torch.no_grad():
        before = logits(model, ids)
    run = surprise(tmp_path, model=model, budget=12, every=16, variants=["full", "fast", "layers=2,no_self"])
    assert run.refreshes.variant.nunique() == 3
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.hf.modules()) == 0
    assert model.hf.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(logits(model, ids), before)


# Bad input


@pytest.mark.parametrize(
    ("traces", "asked", "message"),
    [
        ([], {}, "no traces"),
        ([TRACES[0], TRACES[0]], {}, "the id 'box' stands for 2 traces"),
        (TRACES, {"limit": 0}, "cannot take 0 traces"),
        (TRACES, {"variants": []}, r"variants \[\] name none"),
        (TRACES, {"variants": ()}, r"variants \(\) name none"),
        (TRACES, {"variants": ""}, "no variant word ''"),
        (TRACES, {"variants": ["full", ""]}, "no variant word ''"),
        (TRACES, {"variants": "fast,"}, "no variant word ''"),
        (TRACES, {"variants": "quick"}, "no variant word 'quick'"),
        (TRACES, {"variants": ["full,fast"]}, "'fast' contradicts a word before it"),
        (TRACES, {"variants": "fast,layers=2"}, "'layers=2' contradicts a word before it"),
        (TRACES, {"variants": "sentence,clause"}, "'clause' contradicts a word before it"),
        (TRACES, {"variants": "sentence,logit"}, "'logit' contradicts a word before it"),
        (TRACES, {"variants": "logit,logprob"}, "'logprob' contradicts a word before it"),
        (TRACES, {"variants": "with_self,no_self"}, "'no_self' contradicts a word before it"),
        (TRACES, {"variants": "layers=0"}, "'layers=0' is outside 1 to"),
        (TRACES, {"variants": "layers=-1"}, "no variant word 'layers=-1'"),
        (TRACES, {"variants": "gap=99999999999"}, "'gap=99999999999' is outside 0 to"),
        (TRACES, {"variants": "gap=²"}, "no variant word 'gap=²'"),
        (TRACES, {"variants": "layers"}, "no variant word 'layers'"),
        (TRACES, {"variants": ["fast", "layers=4"]}, "a pass over the last 4 blocks: tiny has 3"),
        (TRACES, {"budget": 0}, "budget 0 is no count from 1"),
        (TRACES, {"budget": -5}, "budget -5 is no count from 1"),
        (TRACES, {"budget": True}, "budget True is no count from 1"),
        (TRACES, {"budget": 2**31}, "budget 2147483648 is no count from 1"),
        (TRACES, {"budget": 10**400}, "is no count from 1"),
        (TRACES, {"budget": 8, "every": 0}, "every 0 is no count from 1"),
        (TRACES, {"budget": 8, "every": False}, "every False is no count from 1"),
        (TRACES, {"budget": 8, "frozen": -1}, "frozen -1 is no count from 0"),
        (TRACES, {"budget": 8, "recent": -1}, "recent -1 is no count from 0"),
        (TRACES, {"budget": 8, "recent": 8}, "a budget of 8 leaves nothing to choose beside 8 recent tokens"),
        (TRACES, {"budget": 8, "recent": 9}, "beside 9 recent tokens"),
        (TRACES, {"every": 4}, "every says how a cache is refreshed, but no budget is given"),
        (TRACES, {"frozen": 0}, "frozen says how"),
        (TRACES, {"recent": 0}, "recent says how"),
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
    with pytest.raises(InputError, match=message) as caught:
        surprise(tmp_path / "out", traces, **asked)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    assert not (tmp_path / "out").exists()


def test_a_budget_that_the_protected_rows_fill_is_refused_before_any_work(tmp_path: Path) -> None:
    """The last min_gap + 1 rows have no future, and are kept always."""
    cases: list[tuple[Any, dict[str, int], int]] = [
        ("gap=8", {"budget": 8}, 13),
        (["fast", "fast,gap=12"], {"budget": 12, "frozen": 0}, 13),
        ("past,gap=9", {"budget": 8, "frozen": 3, "recent": 2}, 12),
    ]
    for variants, asked, n in cases:
        with pytest.raises(InputError, match=f"cannot hold {n} protected ones"):
            surprise(tmp_path / "out", variants=variants, **asked)
        assert not (tmp_path / "out").exists()
    for number, (variants, asked, _) in enumerate(cases):  # one more, and they can
        one_more = asked | {"budget": asked["budget"] + 1}
        run = surprise(tmp_path / str(number), TRACES[:1], variants=variants, every=9, **one_more)
        assert (
            run.refreshes.groupby(["variant", "refresh"]).kept.sum()
            == sum(one_more[name] for name in one_more if name != "recent") + (4 if "frozen" not in asked else 0)
        ).all()


def test_of_a_unit_that_no_refresh_can_hold_the_last_tokens_stay(tmp_path: Path) -> None:
    """All of it is without a future while it is the last one."""
    run = surprise(tmp_path, variants=["sentence"], budget=9, every=12, frozen=0)
    steps = run.refreshes[run.refreshes.trace_id == "box"]
    whole = [step for _, step in steps.groupby("refresh") if step.score.isna().sum() > 9]
    assert whole
    for step in whole:
        assert step.pos[step.kept].tolist() == step.pos.tolist()[-9:]


def test_a_model_of_which_no_part_can_be_run_is_refused_by_name(tmp_path: Path) -> None:
    hf = tiny.gpt_oss(vocab_size=len(tiny_tokenizers.byte_level()), bos_token_id=0, max_position_embeddings=64)
    model = wrap(hf, tiny_tokenizers.byte_level(), name="oss")
    with pytest.raises(ModelRefused, match="oss"):
        surprise(tmp_path / "out", model=model, variants="fast")
    with pytest.raises(ModelRefused, match="oss"):
        kvlens.observe(TRACES, model, tmp_path / "signals", signals="surprise_fast")
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    broken = tiny_runs.model()
    with torch.no_grad():
        broken.hf.model.layers[1].mlp.down_proj.weight.fill_(3e38)
    with pytest.raises(ModelRefused, match="NaN or infinity"):
        surprise(tmp_path, model=broken)


def test_numbers_that_are_none_in_this_text_alone_are_refused() -> None:
    """What a pass is tried on when it is made has three tokens, and they are fine."""
    model = tiny_runs.model()
    passes = [Surprise(model, read_variant("fast"))]

    def overflow(_: Any, __: Any, output: Tensor) -> Tensor | None:
        return output * torch.inf if output.shape[1] > 3 else None

    model.hf.model.layers[1].mlp.register_forward_hook(overflow)
    assert np.isfinite(probing.score_tokens(model, passes, tiny.token_ids(3)[0], {})[0][:-1]).all()
    with pytest.raises(ModelRefused, match="NaN or infinity"):
        probing.score_tokens(model, passes, tiny.token_ids(9)[0], {})


def test_traces_beyond_the_context_can_be_asked_for(tmp_path: Path) -> None:
    long = [Trace("long", prompt="a " * 300, target="b")]
    run = surprise(tmp_path, long, beyond_context=True, variants="fast", budget=40, every=100)
    assert len(run.scores) > 256
    assert run.refreshes.n_seen.max() == len(run.scores) // 100 * 100
    assert run.meta["config"]["beyond_context"] is True
    learned = wrap(
        tiny.gpt2(vocab_size=len(tiny_tokenizers.byte_level()), n_positions=64), tiny_tokenizers.byte_level()
    )
    with pytest.raises(InputError, match="64"):
        surprise(tmp_path / "gpt2", long, learned, beyond_context=True, variants="fast")


@pytest.mark.gpu
def test_a_gpu_gives_the_same_scores() -> None:
    ids = tiny.token_ids(150)[0]
    there = wrap(copy.deepcopy(MODEL.hf).cuda())
    words = ("full", "fast", "logprob", "past")
    found = probing.score_tokens(there, [Surprise(there, read_variant(text)) for text in words], ids.cuda(), {})
    truth = probing.score_tokens(MODEL, [Surprise(MODEL, read_variant(text)) for text in words], ids, {})
    for one, other in zip(found, truth, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
