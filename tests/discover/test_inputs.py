"""Which tokens of which traces count, and are runs that do not fit refused at their first difference?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_runs
import made_signals
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from made_signals import N_PROMPT, trace_id

from kvlens.discover.inputs import Pair, counted_tokens, halves, read_pair
from kvlens.discover.simulate import simulate
from kvlens.errors import InputError
from kvlens.loading import load
from kvlens.probe.tables import mean_over_windows
from kvlens.runstate import sealed

N = 100


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return made_signals.planted(tmp_path, n_traces=4, n_tokens=(N, N))


def damaged(run: Path, **changes: Any) -> Path:
    """The run with other facts in its run.json."""
    file = run / "run.json"
    file.write_text(json.dumps(sealed(json.loads(file.read_text()) | changes)))
    return run


def read(labels: Path, signals: Path) -> Pair:
    return read_pair(labels, signals)


def test_the_reasoning_counts_with_its_labels_and_signals(tmp_path: Path) -> None:
    worlds = simulate(0, n_traces=3, n_layers=4, band=(0, 2), n_tokens=(80, 120))
    found = read(*made_signals.pair(tmp_path, worlds))
    values = found.read("hidden_change_rolling")
    assert found.trace_ids == [trace_id(i) for i in range(3)]
    for trace, world in zip(found.traces, worlds, strict=True):
        n = len(world.label) - 1  # the last context token has no label
        assert trace.pos.tolist() == list(range(N_PROMPT, N_PROMPT + n))
        assert trace.effect == pytest.approx(world.label[:n])
        assert values[trace.rows] == pytest.approx(world.signal[:n], rel=1e-6)


def test_rows_may_come_in_any_order(pair: tuple[Path, Path]) -> None:
    labels, signals = pair
    before = read(labels, signals)
    values = before.read("hidden_change_rolling")
    order = np.random.default_rng(0).permutation(4 * (N + N_PROMPT))
    after = read(labels, made_signals.edit(signals, lambda table: table.take(order)))
    for one, other in zip(before.traces, after.traces, strict=True):
        assert one.trace_id == other.trace_id
        assert (values[one.rows] == after.read("hidden_change_rolling")[other.rows]).all()
    assert (after.traces[0].rows != before.traces[0].rows).any()


def test_nulls_are_nan(pair: tuple[Path, Path]) -> None:
    def change(table: pa.Table) -> pa.Table:
        lists = table.column("hidden_change_rolling").to_pylist()
        lists[3] = None
        lists[5] = [None, *lists[5][1:]]
        column = pa.array(lists, type=table.schema.field("hidden_change_rolling").type)
        table = table.set_column(3, "hidden_change_rolling", column)
        return table.append_column("surprisal", pa.array([None, *range(table.num_rows - 1)], type=pa.float32()))

    labels, signals = pair
    before = read(labels, signals).read("hidden_change_rolling")
    found = read(labels, made_signals.edit(signals, change))
    values = found.read("hidden_change_rolling")
    assert np.isnan(values[3]).all()
    assert np.isnan(values[5]).tolist() == [True] + [False] * 9
    rest = np.setdiff1d(np.arange(len(values)), [3, 5])
    assert (values[rest] == before[rest]).all()
    assert np.isnan(found.read("surprisal")[:, 0]).tolist() == [True] + [False] * (len(values) - 1)
    assert found.per_layer("hidden_change_rolling")
    assert not found.per_layer("surprisal")
    assert found.n_layers() == 10


def test_what_is_causal_is_read_from_the_column_or_the_configuration(tmp_path: Path) -> None:
    worlds = simulate(0, n_traces=1, n_layers=3, band=(0, 1), n_tokens=(80, 80))
    more = [{"age": np.zeros(80), "surprisal": np.zeros(80)}]
    marked = read(*made_signals.pair(tmp_path / "a", worlds, more))
    listed = read(
        *made_signals.pair(tmp_path / "b", worlds, more, marks=False, config={"causal": ["surprisal"]})
    )  # fmt: skip
    silent = read(*made_signals.pair(tmp_path / "c", worlds, more, marks=False))
    names = ("hidden_change_rolling", "surprisal", "age")
    assert [marked.causal(name) for name in names] == [True, True, False]
    assert [listed.causal(name) for name in names] == [False, True, False]
    assert [silent.causal(name) for name in names] == [None, None, None]


def test_position_0_and_its_window_do_not_count(tmp_path: Path) -> None:
    rows = made_runs.rows("t", made_runs.APPLES)
    starts = np.arange(0, 20, 4)
    rows["windows"] |= {
        "window_start": starts,
        "window_end": starts + 4,
        "effect_nats": np.ones(5),
        "kl_nats": np.ones(5),
    }
    rows["tokens"]["effect_nats"] = np.full(len(rows["tokens"]["pos"]), np.nan)
    rows["tokens"]["effect_nats"][:20] = 1.0
    with made_runs.start(tmp_path / "run") as run:
        for table, columns in rows.items():
            run.write_part(table, "t", columns)
        run.finish({table: ["t"] for table in rows})
    (tokens,) = counted_tokens(load(tmp_path / "run"), False, ("prompt", "reasoning")).values()
    assert tokens.pos.tolist() == list(range(4, 20))


# Traces that say nothing


def short(worlds: list[Any], number: int, change: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
    worlds[number] = worlds[number]._replace(label=change(worlds[number].label))
    return worlds


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda label: np.where(np.arange(N) < 40, label, np.nan), "its 40 labelled reasoning tokens are fewer"),
        (lambda label: np.where(np.arange(N) % 10 == 0, label, np.nan), "it has 10 labelled reasoning tokens"),
        (lambda label: np.full(N, 0.5), "all its labels are equal"),
        (lambda label: np.full(N, np.nan), "it has no labelled reasoning tokens"),
    ],
)
def test_traces_that_say_nothing_are_counted_with_their_reason(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], reason: str
) -> None:
    worlds = simulate(0, n_traces=3, n_layers=3, band=(0, 1), n_tokens=(N, N))
    found = read(*made_signals.pair(tmp_path / "one", short(worlds, 1, change)))
    assert found.trace_ids == [trace_id(0), trace_id(2)]
    assert list(found.skipped) == [trace_id(1)]
    assert reason in found.skipped[trace_id(1)]
    every = short(short(worlds, 0, change), 2, change)
    with pytest.raises(InputError, match="no trace of") as caught:
        read(*made_signals.pair(tmp_path / "all", every))
    assert reason in caught.value.message


def test_the_longer_of_both_windows_decides(tmp_path: Path) -> None:
    worlds = simulate(0, n_traces=1, n_layers=3, band=(0, 1), n_tokens=(N, N))
    _, signals = made_signals.pair(tmp_path / "a", worlds)
    wide = made_signals.labels(tmp_path / "wide", [worlds[0].label], width=128)
    with pytest.raises(InputError, match="fewer than the window of 128"):
        read(wide, signals)
    labels, signals = made_signals.pair(tmp_path / "b", worlds, config={"rolling_window": 256})
    with pytest.raises(InputError, match="fewer than the window of 256"):
        read(labels, signals)


def test_what_the_label_run_left_out_is_counted_too(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    labels, signals = pair
    counts = json.loads((labels / "run.json").read_text())["counts"]
    damaged(labels, counts=counts | {"skipped": [{"id": "gone", "reason": "no answer"}]})
    assert read(labels, signals).skipped == {"gone": "no answer"}


# Runs that do not fit


def drop_trace(table: pa.Table) -> pa.Table:
    return table.filter(pa.compute.not_equal(table.column("trace_id"), trace_id(2)))


def drop_row(table: pa.Table) -> pa.Table:
    return table.take([row for row in range(table.num_rows) if row != 7])


def other_token(table: pa.Table) -> pa.Table:
    ids = table.column("token_id").to_numpy().copy()
    ids[[9, 12]] = 5
    return table.set_column(2, "token_id", pa.array(ids, type=pa.int32()))


def other_position(table: pa.Table) -> pa.Table:
    pos = table.column("pos").to_numpy() + (table.column("trace_id").to_numpy(zero_copy_only=False) == trace_id(1))
    return table.set_column(1, "pos", pa.array(pos, type=pa.int32()))


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (drop_trace, ["trace 'trace-002' of", "has no signals in"]),
        (drop_row, ["trace 'trace-000' has 106 positions in", "and 105 in"]),
        (other_token, ["trace 'trace-000', position 9: token_id 63 in", "and 5 in"]),
        (other_position, ["trace 'trace-001', position 0: pos 0 in", "and 1 in"]),
    ],
)
def test_the_first_token_that_differs_is_named(
    pair: tuple[Path, Path], change: Callable[[pa.Table], pa.Table], messages: list[str]
) -> None:
    labels, signals = pair
    with pytest.raises(InputError) as caught:
        read(labels, made_signals.edit(signals, change))
    assert all(message in caught.value.message for message in messages)
    assert "observe the traces that were labelled" in caught.value.hint


def test_more_traces_than_labels_are_fine_and_token_ids_need_not_be_recorded(pair: tuple[Path, Path]) -> None:
    labels, signals = pair

    def more(table: pa.Table) -> pa.Table:
        extra = table.slice(0, 80).set_column(0, table.schema.field("trace_id"), pa.array(["extra"] * 80))
        return pa.concat_tables([extra, table]).drop_columns(["token_id"])

    assert read(labels, made_signals.edit(signals, more)).trace_ids == [trace_id(i) for i in range(4)]


def test_another_model_is_refused(pair: tuple[Path, Path]) -> None:
    labels, signals = pair
    damaged(signals, model={"name": "other", "fingerprint": "0ther", "note": ""})
    with pytest.raises(
        InputError, match=r"of different models: fingerprint c0ffee-f00d \(made-up\) and 0ther \(other\)"
    ):
        read(labels, signals)


@pytest.mark.parametrize("roles", ["swapped", "signals twice", "labels twice"])
def test_runs_in_the_wrong_role_are_refused(pair: tuple[Path, Path], roles: str) -> None:
    labels, signals = pair
    given = {"swapped": (signals, labels), "signals twice": (signals, signals), "labels twice": (labels, labels)}
    with pytest.raises(InputError, match=r"is given as (LABELS|SIGNALS)") as caught:
        read(*given[roles])
    assert "LABELS first, then SIGNALS" in caught.value.hint


def test_a_damaged_table_is_refused(pair: tuple[Path, Path]) -> None:
    labels, signals = pair
    with open(signals / "signals.parquet", "r+b") as stream:
        stream.seek(100)
        stream.write(b"xx")
    with pytest.raises(InputError, match="damaged or changed"):
        read(labels, signals)
    with pytest.raises(InputError, match="no such folder"):
        read(labels, signals / "nowhere")


# Screens


@pytest.fixture
def screened(tmp_path: Path) -> tuple[Path, Path, list[Any]]:
    """Labels of a screen: every third window of four tokens was chosen, every other third is its audit set."""
    worlds = simulate(0, n_traces=2, n_layers=3, band=(0, 1), n_tokens=(N, N))
    _, signals = made_signals.pair(tmp_path / "made", worlds)
    keys = [trace_id(number) for number in range(2)]
    everything = []
    with made_runs.start(tmp_path / "screened", config={"window": 4, "stride": 1, "screen": 0.3}) as run:
        for key in keys:
            starts = np.array([s for s in range(N_PROMPT, N_PROMPT + N - 5) if s % 3])
            effects = np.random.default_rng(len(everything)).normal(size=len(starts))
            rows = {
                "trace_id": key, "window_start": starts, "window_end": starts + 4, "intervention": "evict",
                "cells": "all", "selected_by": np.where(starts % 3 == 1, "screen", "audit"), "effect_nats": effects,
            }  # fmt: skip
            values = mean_over_windows(N_PROMPT + N, pd.DataFrame(rows))
            run.write_part("windows", key, rows)
            run.write_part("tokens", key, made_signals.tokens(key, np.r_[values, np.full(3, np.nan)]))
            run.write_part("traces", key, {"trace_id": [key], "n_tokens": len(values) + 3, "n_target": 3})
            everything.append(pd.DataFrame(rows))
        run.finish(dict.fromkeys(("windows", "tokens", "traces"), keys))
    return tmp_path / "screened", signals, everything


def test_a_screened_run_counts_by_its_audit_windows_alone(screened: tuple[Path, Path, list[Any]]) -> None:
    labels, signals, windows = screened
    with pytest.raises(InputError, match="made with a screen") as caught:
        read(labels, signals)
    assert "--audit-only" in caught.value.hint
    found = read_pair(labels, signals, audit_only=True)
    for trace, rows in zip(found.traces, windows, strict=True):
        audit = rows[rows.selected_by == "audit"]
        for pos, effect in zip(trace.pos, trace.effect, strict=True):
            covering = audit[(audit.window_start <= pos) & (pos < audit.window_end)]
            assert effect == pytest.approx(covering.effect_nats.mean())
        assert len(trace.pos) > 80


def test_a_whole_run_has_no_audit_set(pair: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="without a screen"):
        read_pair(*pair, audit_only=True)


# Halves


def test_halves_are_seeded_and_do_not_depend_on_the_order() -> None:
    ids = [f"t{number}" for number in range(13)]
    found = halves(ids, 0)
    assert found.sum() == 7
    chosen = {name for name, half in zip(ids, found, strict=True) if half}
    turned = ids[::-1]
    assert {name for name, half in zip(turned, halves(turned, 0), strict=True) if half} == chosen
    assert any((halves(ids, seed) != found).any() for seed in range(1, 4))
