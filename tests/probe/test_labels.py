"""`kvlens.label`: are the tables what the contract says, the numbers the oracle's, and a second start no second run?"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pandas as pd
import pyarrow.parquet as pq
import pytest
import tiny_runs
import tiny_tokenizers
import torch

import kvlens
from kvlens.errors import InputError
from kvlens.model import Model, wrap
from kvlens.probe import budget, occlusion
from kvlens.probe.cells import parse_cells
from kvlens.probe.settings import make_settings
from kvlens.probe.tables import token_rows
from kvlens.records import Tokens, Trace
from kvlens.schemas import LABELS, LABELS_TABLES, unpack_kept
from kvlens.texts import tokenize

MODEL = tiny_runs.model()
SHORT = tiny_runs.model(max_position_embeddings=64)  # leaves greedy answers few tokens to run for
TRACES = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
BOX = TRACES[:1]
# Long before a short target: rows then share the prefix in parts that depend on the batch, which short rows do not.
LONG = [tiny_runs.as_trace(tiny_runs.SUM | {"id": "long", "prompt": tiny_runs.SUM["prompt"] * 5})]
TOKENS = {trace.id: tokenize(trace, MODEL.tokenizer) for trace in TRACES}
ATOL = 3e-5  # nats; the tiny models, drawn wide, amplify the rounding of every layer


def label(out: Path, traces: list[Trace] = BOX, model: Model = MODEL, **asked: Any) -> kvlens.Run:
    return kvlens.label(traces, model, out, **asked)


def truth(tokens: Tokens, row: Any, cut: int, cells: str | None = None) -> tuple[float, float]:
    """Effect and KL of one row of `windows`, each from two full forward passes."""
    parsed = parse_cells(cells, MODEL.n_layers, MODEL.n_heads)
    full = oracles.target_rows(MODEL, tokens)
    hidden = oracles.target_rows(MODEL, tokens, range(row.window_start, row.window_end), cut, parsed)
    lost = oracles.of_target(full, tokens) - oracles.of_target(hidden, tokens)
    return float(lost.sum()), oracles.kl_nats(full, hidden)


def untouched(run: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in run.iterdir()}


# Tables


def test_tables_are_as_the_contract_says(tmp_path: Path) -> None:
    run = label(tmp_path, TRACES, random_subsets=12)
    for table, schema in LABELS_TABLES.items():
        assert pq.read_schema(tmp_path / f"{table}.parquet").equals(schema)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("run.json", "subsets.parquet", "tokens.parquet", "traces.parquet", "windows.parquet")
    ]
    meta = tiny_runs.state(tmp_path)
    assert (meta["schema"], meta["status"], meta["dtype"], meta["seed"]) == (LABELS, "complete", "float32", 0)
    assert meta["model"] == {"name": "tiny", "fingerprint": MODEL.fingerprint, "note": ""}
    assert meta["counts"] == {"skipped": [], "traces": 2, "windows": len(run.windows)}
    assert meta["peak_bytes"] > 2**20
    assert meta["wall_seconds"] > 0
    assert meta["results"]["nothing_hidden_nats"] == 0
    again = kvlens.load(tmp_path)
    assert all(pd.DataFrame.equals(again[table], run[table]) for table in LABELS_TABLES)
    stacked = kvlens.load([tmp_path, label(tmp_path / "other", TRACES, window=9).path])
    assert stacked.windows.run.nunique() == 2


def test_rows_stand_for_every_token_and_trace(tmp_path: Path) -> None:
    run = label(tmp_path, TRACES)
    assert list(run.traces.trace_id) == list(TOKENS)
    for trace_id, tokens in TOKENS.items():
        rows = run.tokens[run.tokens.trace_id == trace_id]
        assert list(rows.pos) == list(range(tokens.n_tokens))
        assert list(rows.token_id) == tokens.ids.tolist()
        assert list(rows.segment) == [tokens.segment(pos) for pos in range(tokens.n_tokens)]
        assert "".join(rows.token[1:]) == tokens.text  # after BOS, which has no text of its own
        labelled = rows.effect_nats.notna().to_numpy()
        assert labelled.tolist() == [pos < tokens.n_context - 1 for pos in range(tokens.n_tokens)]
        windows = run.windows[run.windows.trace_id == trace_id]
        assert list(zip(windows.window_start, windows.window_end, strict=True)) == [
            (pos, pos + 1) for pos in range(tokens.n_context - 1)
        ]
        assert np.array_equal(windows.effect_nats, rows.effect_nats[labelled])
        trace = run.traces.set_index("trace_id").loc[trace_id]
        assert (trace.n_tokens, trace.n_target) == (tokens.n_tokens, tokens.n_target)
        full = oracles.of_target(oracles.target_rows(MODEL, tokens), tokens).sum()
        assert trace.log_prob_full == pytest.approx(float(full), abs=ATOL)
    for name in ("flipped", "per_target", "lag", "metric_effect"):
        assert run.windows[name].isna().all()
    assert set(run.windows.selected_by) == set(run.windows.cells) == {"all"}
    assert run.tokens.flipped.isna().all()


# Effects


@pytest.mark.parametrize(
    ("asked", "cut"),
    [
        ({"intervention": "evict"}, lambda end, last: last),
        ({"intervention": "knockout"}, lambda end, last: end),
        ({"lag": 4}, lambda end, last: min(end + 4, last)),
        ({"lag": 0}, lambda end, last: end),
        ({"lag": 10_000}, lambda end, last: last),
        ({"cells": "1"}, lambda end, last: last),
        ({"cells": "0-1:0,2;2:1", "intervention": "knockout"}, lambda end, last: end),
    ],
    ids=["evict", "knockout", "lag 4", "lag 0", "lag beyond", "one layer", "some heads"],
)
def test_effects_are_the_oracles(tmp_path: Path, asked: dict[str, Any], cut: Callable[[int, int], int]) -> None:
    tokens = TOKENS["box"]
    run = label(tmp_path, window=6, stride=5, **asked)
    for row in run.windows.itertuples():
        effect, kl = truth(tokens, row, cut(row.window_end, tokens.n_context - 1), asked.get("cells"))
        assert row.effect_nats == pytest.approx(effect, abs=ATOL)
        assert row.kl_nats == pytest.approx(kl, abs=ATOL)
    assert run.windows.effect_nats.abs().max() > 0.1
    assert set(run.windows.intervention) == {asked.get("intervention", "evict")}
    assert set(run.windows.cells) == {asked.get("cells", "all")}
    assert set(run.windows.lag.dropna()) == ({asked["lag"]} if "lag" in asked else set())


def test_cells_say_something_else_than_all(tmp_path: Path) -> None:
    everywhere, somewhere = label(tmp_path / "all", window=5), label(tmp_path / "some", window=5, cells="1:0")
    assert np.abs(everywhere.windows.effect_nats - somewhere.windows.effect_nats).median() > 0.01
    assert tiny_runs.state(tmp_path / "some")["config"]["cells"] == "1:0"


def test_substitute_is_the_oracles_and_its_filler_seeded(tmp_path: Path) -> None:
    tokens = TOKENS["box"]
    run = label(tmp_path / "a", intervention="substitute", window=7, seed=5)
    settings = make_settings(None, None, intervention="substitute", window=7, seed=5)
    full = oracles.of_target(oracles.target_rows(MODEL, tokens), tokens)
    for row in run.windows.itertuples():
        window = (row.window_start, row.window_end)
        filler = occlusion.filler_ids(settings.how(MODEL), window[1] - window[0], window[0], MODEL)
        lost = full - oracles.substituted_log_probs(MODEL, tokens, window, filler)
        assert row.effect_nats == pytest.approx(float(lost.sum()), abs=ATOL)
    other = label(tmp_path / "b", intervention="substitute", window=7, seed=6)
    assert (run.windows.effect_nats != other.windows.effect_nats).all()


def test_overlapping_windows_average_and_targets_stay_unlabelled(tmp_path: Path) -> None:
    run = label(tmp_path, window=5, stride=3)
    windows = run.windows
    assert list(windows.window_start) == list(range(0, TOKENS["box"].n_context - 1 - 5 + 3, 3))
    for token in run.tokens.itertuples():
        over = windows[(windows.window_start <= token.pos) & (token.pos < windows.window_end)]
        if len(over):
            assert token.effect_nats == pytest.approx(over.effect_nats.mean(), rel=1e-12)
        else:
            assert np.isnan(token.effect_nats)
    assert run.tokens[run.tokens.segment == "target"].effect_nats.isna().all()


def test_gaps_between_windows_stay_unlabelled(tmp_path: Path) -> None:
    run = label(tmp_path, window=2, stride=4)
    context = run.tokens[run.tokens.pos < TOKENS["box"].n_context - 1]
    assert context.effect_nats.notna().tolist() == [pos % 4 < 2 for pos in context.pos]


def test_targets_add_up_and_agree_with_the_oracle(tmp_path: Path) -> None:
    tokens = TOKENS["box"]
    run = label(tmp_path, window=4, per_target=True)
    matrix = np.stack(run.windows.per_target)
    assert matrix.shape == (len(run.windows), tokens.n_target)
    assert np.allclose(matrix.sum(1), run.windows.effect_nats, atol=1e-5)
    full = oracles.of_target(oracles.target_rows(MODEL, tokens), tokens)
    first = run.windows.iloc[2]
    last = tokens.n_context - 1
    window = (int(first.window_start), int(first.window_end))
    hidden = oracles.masked_log_probs(MODEL, tokens, window, last)
    assert np.allclose(first.per_target, (full - hidden).numpy(), atol=ATOL)


def first_against_next(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How far the first target token's logit lies above that of the id after it."""
    return logits[:, 0, targets[0]] - logits[:, 0, targets[0] + 1]


def test_a_metric_of_ones_own_fills_its_column(tmp_path: Path) -> None:
    tokens = TOKENS["box"]
    run = label(tmp_path, window=5, metric=first_against_next)
    target = int(tokens.ids[tokens.n_context])
    full = oracles.target_rows(MODEL, tokens)[0]
    for row in run.windows.itertuples():
        rows = oracles.target_rows(MODEL, tokens, range(row.window_start, row.window_end), tokens.n_context - 1)[0]
        expected = (full[target] - full[target + 1]) - (rows[target] - rows[target + 1])
        assert row.metric_effect == pytest.approx(float(expected), abs=ATOL)
    assert tiny_runs.state(tmp_path)["config"]["metric"] == f"{__name__}.first_against_next"
    with pytest.raises(InputError, match="metric is"):
        label(tmp_path, window=5)


@pytest.mark.parametrize("unit", ["sentence", "step", "line", "spans"])
def test_units_of_the_text_become_windows(tmp_path: Path, unit: str) -> None:
    run = label(tmp_path, units=unit)
    tokens = TOKENS["box"]
    texts = [
        "".join(run.tokens.token[row.window_start : row.window_end]) for row in run.windows.itertuples()
    ]  # positions are rows here
    first = {
        "sentence": ["The red box is under the table.\n", "Where is the box?\n", "Step 1: check the first line.", None],
        "step": ["The red box is under the table.\n", "Where is the box?\n", None, None],
        "line": ["The red box is under the table.\n", "Where is the box?\n", None],
        "spans": ["red box", "the table"],
    }[unit]
    for text, expected in zip(texts, first, strict=False):
        assert expected is None or text.strip() == expected.strip()
    assert len(texts) >= 2
    assert run.windows.window_end.max() <= tokens.n_context - 1
    if unit == "spans":
        assert len(texts) == 2


def test_a_trace_without_the_unit_is_skipped_and_refused_where_no_other_is_left(tmp_path: Path) -> None:
    told: list[str] = []
    run = label(tmp_path / "run", TRACES, units="spans", note=told.append)
    assert list(run.traces.trace_id) == ["box"]
    (skipped,) = run.meta["counts"]["skipped"]
    assert skipped["id"] == "sum"
    assert skipped["reason"].startswith("no spans to hide")
    assert f"1 trace skipped, such as sum: {skipped['reason']}" in told
    with pytest.raises(InputError, match="sum: no spans to hide"):
        label(tmp_path / "out", [trace for trace in TRACES if trace.id == "sum"], units="spans")
    assert not (tmp_path / "out").exists()


# Flips, presets, subsets


def test_tokens_flip_when_any_window_over_them_does(tmp_path: Path) -> None:
    run = label(tmp_path, TRACES, SHORT, window=8, stride=5, flips=True)
    known = run.windows.flipped.notna()
    assert known.groupby(run.windows.trace_id).nunique().max() == 1
    assert run.windows.flipped.sum() > 0
    # The target of "sum" states an answer that this random model never gives: there is nothing to flip.
    assert set(run.windows.trace_id[~known]) == {"sum"}
    answers = run.meta["results"]["flips"]
    assert {name: found["compared"] for name, found in answers.items()} == {
        trace_id: "nothing" if trace_id == "sum" else "texts" for trace_id in run.traces.trace_id
    }
    assert all(isinstance(found["full_answer"], str) for found in answers.values())
    for token in run.tokens.itertuples():
        over = run.windows[
            (run.windows.trace_id == token.trace_id)
            & (run.windows.window_start <= token.pos)
            & (token.pos < run.windows.window_end)
        ]
        assert pd.isna(token.flipped) if over.flipped.isna().all() else token.flipped == over.flipped.any()
    assert run.tokens[run.tokens.segment == "target"].flipped.isna().all()


def test_one_window_that_flips_is_enough() -> None:
    tokens = TOKENS["sum"]
    windows = pd.DataFrame(
        {
            "window_start": [0, 2, 4, 8],
            "window_end": [4, 6, 8, 10],
            "effect_nats": [1.0, 3.0, 0.0, 0.0],
            "flipped": pd.array([True, False, False, None], dtype="boolean"),
        }
    )
    rows = token_rows(tokens, MODEL.tokenizer, windows)
    assert rows["flipped"][:11] == [True] * 4 + [False] * 4 + [None] * 3
    assert rows["effect_nats"][:8].tolist() == [1, 1, 2, 2, 1.5, 1.5, 0, 0]


def test_the_preset_labels_reasoning_of_right_answers_only(tmp_path: Path) -> None:
    rows = [
        tiny_runs.BOX,
        tiny_runs.WRONG,
        tiny_runs.SUM | {"meta": {"correct": False}},
        tiny_runs.WRONG | {"id": "trusted", "meta": {"correct": True}},
        {name: value for name, value in tiny_runs.BOX.items() if name != "answer"} | {"id": "silent"},
        {"id": "whole", "text": "41 is prime. The answer is 42.", "answer": ["41"]},
    ]
    traces = [tiny_runs.as_trace(row) for row in rows]
    run = label(tmp_path, traces, SHORT, preset="epikv", target_tokens=6)
    assert list(run.traces.trace_id) == ["box", "trusted"]
    assert run.meta["counts"]["skipped"] == [
        {"id": "wrong", "reason": "its target does not state the answer"},
        {"id": "sum", "reason": "its answer is not right (meta.correct is not true)"},
        {"id": "silent", "reason": "no answer to compare with"},
        {"id": "whole", "reason": "its target does not state the answer"},
    ]
    config = run.meta["config"]
    assert (config["window"], config["stride"], config["filler"]) == (32, 16, "randmulti")
    assert set(run.windows.intervention) == {"substitute"}
    assert run.windows[run.windows.trace_id == "box"].flipped.notna().all()
    for trace_id in ("box", "trusted"):
        tokens = tokenize(next(trace for trace in traces if trace.id == trace_id), SHORT.tokenizer)
        windows = run.windows[run.windows.trace_id == trace_id]
        last = tokens.n_context - 1
        # a window that only repeats the end of the one before is left out
        starts = [start for start in range(tokens.n_prompt, last, 16) if start == tokens.n_prompt or start + 16 < last]
        assert list(windows.window_start) == starts
        assert list(windows.window_end) == [min(start + 32, last) for start in starts]


def test_no_right_answer_at_all_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 trace read, and none is known"):
        label(tmp_path / "out", [tiny_runs.as_trace(tiny_runs.WRONG)], only_correct=True)
    assert not (tmp_path / "out").exists()


def test_random_subsets_are_kept_and_summed_up(tmp_path: Path) -> None:
    run = label(tmp_path / "a", TRACES, random_subsets=12, window=4)
    assert list(run.subsets.subset) == [*range(12), *range(12)]
    tokens = TOKENS["sum"]
    rows = run.subsets[run.subsets.trace_id == "sum"]
    full = oracles.of_target(oracles.target_rows(MODEL, tokens), tokens)
    for row in list(rows.itertuples())[:3]:
        dropped = np.flatnonzero(~unpack_kept(row.kept, tokens.n_context))
        assert 0 not in dropped
        hidden = oracles.target_rows(MODEL, tokens, dropped, tokens.n_context - 1)
        lost = full - oracles.of_target(hidden, tokens)
        assert row.effect_nats == pytest.approx(float(lost.sum()), abs=ATOL)
    report = run.meta["results"]["subsets"]
    assert set(report) == {"box", "sum"}
    assert all(found["n_subsets"] == 12 and found["r2"] is not None for found in report.values())
    few = label(tmp_path / "b", TRACES, random_subsets=4, window=4)
    assert [found["r2"] for found in few.meta["results"]["subsets"].values()] == [None, None]
    same = label(tmp_path / "c", TRACES, random_subsets=12, window=9)
    assert list(same.subsets.kept) == list(run.subsets.kept)


# The screen


def test_a_screened_run_holds_what_it_measured_and_nothing_else(tmp_path: Path) -> None:
    everything = label(tmp_path / "all", TRACES)
    run = label(tmp_path / "screened", TRACES, screen=0.2)
    for trace_id, report in run.meta["results"]["screen"].items():
        windows = run.windows[run.windows.trace_id == trace_id]
        every = everything.windows[everything.windows.trace_id == trace_id]
        assert set(windows.selected_by) == {"screen", "audit"}
        assert (windows.selected_by == "audit").sum() == report["n_audit"]
        assert (windows.selected_by == "screen").sum() == report["n_top"] + 1  # position 0 is always measured
        assert len(windows) < len(every) == report["n_windows"] + 1
        assert list(windows.window_start) == sorted(windows.window_start)
        both = windows.merge(every, on="window_start", suffixes=("", "_all"))
        assert np.allclose(both.effect_nats, both.effect_nats_all, atol=ATOL)
        assert report["fraction"] == 0.2
        assert 0 <= report["recall"] <= 1
        tokens = run.tokens[run.tokens.trace_id == trace_id]
        assert set(tokens.pos[tokens.effect_nats.notna()]) == set(windows.window_start)
    assert tiny_runs.state(tmp_path / "screened")["config"]["screen"] == 0.2


def test_auto_widens_until_its_report_is_settled(tmp_path: Path) -> None:
    run = label(tmp_path, TRACES, screen="auto")
    for trace_id, report in run.meta["results"]["screen"].items():
        assert report["fraction"] > 0.1  # never stops at the first
        settled = report["recall"] >= 0.95 and report["gained"] <= 0.05
        assert settled or report["fraction"] == 1.0
        windows = run.windows[run.windows.trace_id == trace_id]
        assert not windows.duplicated("window_start").any()
        assert (windows.selected_by == "screen").sum() >= report["n_top"] + 1


# Again, otherwise, at other batch sizes


@pytest.mark.parametrize("asked", [{}, {"screen": "auto", "random_subsets": 5}])
def test_the_same_command_computes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    run = label(tmp_path, TRACES, **asked)
    before = untouched(tmp_path)
    monkeypatch.setattr(occlusion, "forward_rows", lambda *_, **__: pytest.fail("computed again"))
    again = label(tmp_path, TRACES, **asked)
    assert untouched(tmp_path) == before
    assert again.windows.equals(run.windows)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"window": 2}, "window is 3 there and 2 here"),
        ({"window": 3, "seed": 1}, "seed is 0 there and 1 here"),
        ({"window": 3, "traces": TRACES}, "input_hash"),
        ({"window": 3, "model": SHORT}, "fingerprint"),
    ],
)
def test_another_run_is_never_overwritten_unasked(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    label(tmp_path, window=3)
    before = untouched(tmp_path)
    with pytest.raises(InputError, match="different configuration") as caught:
        label(tmp_path, **asked)
    assert message in caught.value.message
    assert untouched(tmp_path) == before
    run = label(tmp_path, **asked, force=True)
    assert run.meta["config"]["window"] == asked["window"]


@pytest.mark.parametrize("intervention", ["evict", "knockout", "substitute"])
def test_batch_size_moves_no_effect_beyond_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, intervention: str
) -> None:
    traces = [*TRACES, *LONG]
    wide = label(tmp_path / "wide", traces, intervention=intervention)
    size = budget.row_bytes(MODEL, int(wide.traces.n_tokens.max()))
    monkeypatch.setattr(
        budget, "free_bytes", lambda device: 2 * (3 * budget.BLOCK_ROWS * MODEL.d_vocab * 4 + 60 * size)
    )
    narrow = label(tmp_path / "narrow", traces, intervention=intervention)
    assert (wide.meta["plan"]["rows"], narrow.meta["plan"]["rows"]) == (budget.CPU_ROWS, 60)
    # Each run states how far its own numbers may be off, from a sample of its windows.
    floor = 2 * (wide.traces.noise_nats + narrow.traces.noise_nats).max()
    assert 0 < floor < 1e-4
    assert wide.windows[["trace_id", "window_start"]].equals(narrow.windows[["trace_id", "window_start"]])
    moved = np.abs(wide.windows.effect_nats - narrow.windows.effect_nats)
    assert 0 < moved.max() <= floor


def test_the_order_of_traces_moves_no_effect(tmp_path: Path) -> None:
    there, back = label(tmp_path / "a", TRACES, window=3), label(tmp_path / "b", TRACES[::-1], window=3)
    assert list(back.traces.trace_id) == list(there.traces.trace_id)[::-1]
    for trace_id in TOKENS:
        one, two = (run.windows[run.windows.trace_id == trace_id].reset_index(drop=True) for run in (there, back))
        assert one.equals(two)


# Half precision, many inputs


def test_half_precision_is_held_against_float32(tmp_path: Path) -> None:
    half = wrap(copy.deepcopy(MODEL.hf).to(torch.bfloat16), MODEL.tokenizer, name="half")
    run = label(tmp_path, model=half, window=3)
    noise, against = (run.meta["results"][name] for name in ("noise_nats", "noise_against_fp32_nats"))
    assert run.meta["dtype"] == "bfloat16"
    assert against["max"] > 1e-3
    assert run.traces.noise_nats[0] == max(noise["max"], against["max"])


def test_noise_is_that_of_at_least_sixteen_windows(tmp_path: Path) -> None:
    run = label(tmp_path, LONG)
    noise = run.meta["results"]["noise_nats"]
    assert noise["n_windows"] == 16
    assert 0 < noise["median"] <= noise["max"] == run.traces.noise_nats[0]


def test_a_single_window_and_a_single_target_token(tmp_path: Path) -> None:
    run = label(tmp_path, [Trace("two", prompt="a", target="b")])  # BOS and one token of context
    assert list(zip(run.windows.window_start, run.windows.window_end, strict=True)) == [(0, 1)]
    assert run.traces.noise_nats.notna().all()


@pytest.mark.parametrize(
    ("traces", "asked", "message"),
    [
        ([], {}, "no traces"),
        ([*BOX, *BOX], {}, "the id 'box' stands for 2 traces"),
        (BOX, {"limit": 0}, "cannot take 0 traces"),
        ([Trace("long", prompt="a " * 300, target="b")], {}, "more than the model's context of 256"),
        ([Trace("empty", prompt="a", target="")], {}, "target"),
    ],
)
def test_traces_at_hand_are_looked_over(
    tmp_path: Path, traces: list[Trace], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        label(tmp_path / "out", traces, **asked)
    assert not (tmp_path / "out").exists()


def test_progress_reaches_its_end_and_an_estimate_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    ticks: list[tuple[int, int]] = []
    run = label(tmp_path, TRACES, progress=lambda done, total: ticks.append((done, total)), note=told.append)
    assert ticks == sorted(ticks)
    assert ticks[-1] == (len(run.windows), len(run.windows))
    assert len(told) == 1
    assert told[0].startswith(f"{len(run.windows):,} windows of 2 traces")
    assert "MB" in told[0]


def test_the_limit_reads_so_many_traces(tmp_path: Path) -> None:
    source = tiny_runs.write_rows(tmp_path / "traces.jsonl")
    by_name = kvlens.label(source, MODEL, tmp_path / "a", limit=1, window=5)
    at_hand = label(tmp_path / "b", TRACES, limit=1, window=5)
    assert list(by_name.traces.trace_id) == list(at_hand.traces.trace_id) == ["box"]
    assert tiny_runs.hashes(tmp_path / "a") == tiny_runs.hashes(tmp_path / "b")
    assert by_name.meta["input_hash"] == at_hand.meta["input_hash"]


@pytest.mark.real
def test_the_default_model_labels_a_trace(tmp_path: Path, smollm2: Model) -> None:
    run = label(tmp_path, model=smollm2, window=8)
    assert run.meta["model"]["note"] == "Q4_1, dequantised"
    assert np.isfinite(run.windows.effect_nats).all()
    assert 0 <= run.traces.noise_nats[0] < 1e-3
    tokens = tokenize(TRACES[0], smollm2.tokenizer)
    full = oracles.of_target(oracles.target_rows(smollm2, tokens), tokens)
    hidden = oracles.masked_log_probs(smollm2, tokens, (8, 16), tokens.n_context - 1)
    assert run.windows.effect_nats[1] == pytest.approx(float((full - hidden).sum()), abs=1e-4)


def test_a_metric_may_change_its_logits_and_must_give_a_number_a_row(tmp_path: Path) -> None:
    def greedy(logits: Any, targets: Any) -> Any:
        logits.zero_()
        targets.zero_()
        return logits[:, 0, 0]

    plain, changed = label(tmp_path / "a", TRACES[:1]), label(tmp_path / "b", TRACES[:1], metric=greedy)
    assert plain.windows.effect_nats.equals(changed.windows.effect_nats)
    assert plain.windows.kl_nats.equals(changed.windows.kl_nats)
    for number, wrong in enumerate([lambda x, _: 1.0, lambda x, _: x[..., 0], lambda x, _: x[:, 0, 0] * np.nan]):
        with pytest.raises(InputError, match="the metric gave"):
            label(tmp_path / f"wrong{number}", TRACES[:1], metric=wrong)


def test_another_tokenizer_makes_another_run(tmp_path: Path) -> None:
    label(tmp_path / "run")
    other = replace(MODEL, tokenizer=tiny_tokenizers.byte_level(bos=False))
    with pytest.raises(InputError, match="input_hash"):
        label(tmp_path / "run", model=other)


def test_characters_of_several_tokens_appear_once(tmp_path: Path) -> None:
    trace = Trace("emoji", prompt="\u65e5\u672c \U0001f600", reasoning=" \u4e2d\u6587 so", target=" yes \U0001f600")
    run = label(tmp_path / "run", [trace])
    tokens = run.tokens[run.tokens.token != "<s>"]
    assert "".join(tokens.token) == trace.prompt + trace.reasoning + trace.target


# What is said, and when


def test_a_start_that_finds_work_done_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    first_trace = len(label(tmp_path / "one").windows)

    def stop(done: int, _total: int) -> None:
        if done > first_trace:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label(tmp_path / "run", TRACES, progress=stop)
    label(tmp_path / "run", TRACES, note=told.append)
    assert told[0] == "goes on after an interruption: 1 of 2 traces are done"
    assert "of 1 trace:" in told[1]
    told.clear()
    label(tmp_path / "run", TRACES, note=told.append)
    assert told == [
        f"'{tmp_path / 'run'}' holds this run already, finished: nothing to measure (--force measures anew)"
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"traces": []}, "no traces"),
        ({"window": 0}, "window 0"),
        ({"preset": "none"}, "preset 'none'"),
        ({"filler": "pad"}, "puts no filler in"),
        ({"limit": 0}, "cannot take 0 traces"),
    ],
)
def test_a_slip_is_told_before_a_model_is_loaded(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kvlens.label(**{"traces": TRACES, "model": "nothing/there", "out": tmp_path / "run"} | asked)
    assert not (tmp_path / "run").exists()


WRONG_KINDS = """
import sys
import kvlens
from kvlens.records import Trace
trace = Trace("a", prompt="b c d e", target=" f")
asked = [
    {"traces": [{"id": "a"}]}, {"traces": trace}, {"traces": 3}, {"metric": 3}, {"model": None}, {"model": object()},
    {"limit": "2"}, {"window": 2.5}, {"seed": "x"},
]
for given in asked:
    try:
        kvlens.label(**{"traces": [trace], "model": "nothing/there", "out": sys.argv[1]} | given)
    except kvlens.KvlensError as error:
        print(error.message)
"""


def test_values_of_the_wrong_kind_are_refused_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: here types are checked at every call, there they are not."""
    words = [sys.executable, "-c", WRONG_KINDS, str(tmp_path / "nowhere")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert ran.stderr == ""
    expected = ["is no trace", "cannot read traces", "cannot read traces", "metric 3", "a NoneType is no model"]
    expected += ["a object is no model", "cannot take '2' traces", "window 2.5", "seed 'x'"]
    said = ran.stdout.splitlines()
    assert len(said) == len(expected)
    assert [words for words, line in zip(expected, said, strict=True) if words not in line] == []


def test_a_folder_of_something_else_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is no kvlens run"):
        kvlens.label(TRACES, "nothing/there", tmp_path)


def test_only_right_answers_names_the_option_that_was_given(tmp_path: Path) -> None:
    wrong = [tiny_runs.as_trace(tiny_runs.WRONG)]
    for asked, dropped in (({"only_correct": True}, True), ({"preset": "epikv"}, False)):
        with pytest.raises(InputError, match="1 trace read, and none is known to be answered right") as caught:
            label(tmp_path / "run", wrong, **asked)
        assert ("--only-correct" in caught.value.hint) == dropped
