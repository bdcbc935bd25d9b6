"""Is a run folder whole or absent, whatever happens while it is written?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_runs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_runs import rows, start

from kvlens.disk import Damaged, read_sealed, write_sealed, write_whole
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.loading import load
from kvlens.provenance import hash_traces, plain
from kvlens.records import Trace
from kvlens.schemas import LABELS_TABLES, SCHEMAS, pack_kept, to_arrow, unpack_kept
from kvlens.store import RunFolder

TRACES = {"one/../weird \u2603": made_runs.APPLES, "two": made_runs.HOSTILE}
TABLES = ("windows", "tokens")
ROOT = Path(__file__).resolve().parent.parent

# Kills itself before its k-th rename: every instant at which the folder's content could change in between.
WORKER = """
import os, signal, sys
sys.path.insert(0, "tests")
import test_store
left = int(sys.argv[2])
rename = os.replace
def replace(source, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    rename(source, target)
os.replace = replace
test_store.measure(test_store.start(test_store.Path(sys.argv[1])))
"""
N_RENAMES = 1 + len(TRACES) * len(TABLES) + len(TABLES) + 1


def measure(run: RunFolder) -> list[tuple[str, str]]:
    """Finishes the run as a verb does; returns the parts that had to be computed."""
    computed = []
    with run:
        for trace_id, trace in TRACES.items():
            for table in TABLES:
                if not run.has_part(table, trace_id):
                    run.write_part(table, trace_id, rows(trace_id, trace)[table])
                    computed.append((table, trace_id))
        run.finish({table: list(TRACES) for table in TABLES})
    return computed


def tables_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tables of an uninterrupted run."""
    out = tmp_path_factory.mktemp("store") / "whole"
    measure(start(out))
    return tables_of(out)


def test_a_finished_run_holds_its_tables_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    assert len(measure(start(out))) == len(TRACES) * len(TABLES)
    assert sorted(path.name for path in out.iterdir()) == ["run.json", "tokens.parquet", "windows.parquet"]
    state = json.loads((out / "run.json").read_text())
    assert {"schema", "config", "versions", "model", "input_hash", "seed", "dtype", "device", "attention"} <= set(state)
    assert {"wall_seconds", "peak_bytes", "counts", "plan", "events"} <= set(state)
    assert state["status"] == "complete"


def test_a_finished_run_is_not_computed_again(tmp_path: Path) -> None:
    measure(start(tmp_path))
    before = (tmp_path / "run.json").read_bytes()
    run = start(tmp_path)
    run.close()
    assert run.complete
    assert (tmp_path / "run.json").read_bytes() == before


@pytest.mark.parametrize("renames", range(N_RENAMES))
def test_killed_at_any_instant_the_same_command_finishes(tmp_path: Path, whole: dict[str, bytes], renames: int) -> None:
    out = tmp_path / "run"
    assert run_python(WORKER, str(out), str(renames)).returncode == -signal.SIGKILL
    with pytest.raises(InputError):
        load(out)
    computed = measure(start(out))
    assert len(computed) == max(0, min(4, N_RENAMES - 3 - renames))
    assert tables_of(out) == whole
    assert sorted(path.name for path in out.iterdir()) == ["run.json", "tokens.parquet", "windows.parquet"]


def test_the_kill_test_has_every_rename(tmp_path: Path, whole: dict[str, bytes]) -> None:
    done = run_python(WORKER, str(tmp_path), str(N_RENAMES))
    assert done.returncode == 0, done.stderr
    assert tables_of(tmp_path) == whole


def test_a_kill_after_the_end_leaves_a_finished_run(tmp_path: Path) -> None:
    run = start(tmp_path)
    parts = tmp_path / ".parts" / run.state["run_id"]
    measure(run)
    parts.mkdir(parents=True)
    (parts / "leftover.part").write_bytes(b"")
    assert start(tmp_path).complete
    assert not parts.exists()
    assert len(load(tmp_path).tokens)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, empty, flip])
def test_a_damaged_part_is_computed_again(
    tmp_path: Path, whole: dict[str, bytes], damage: Callable[[Path], None]
) -> None:
    with start(tmp_path) as run:
        for trace_id, trace in TRACES.items():
            run.write_part("tokens", trace_id, rows(trace_id, trace)["tokens"])
    damage(sorted((tmp_path / ".parts" / run.state["run_id"]).glob("tokens-*"))[0])
    again = start(tmp_path)
    computed = measure(again)
    assert sorted(table for table, _ in computed) == ["tokens", "windows", "windows"]
    assert [event["kind"] for event in again.state["events"]] == ["damaged part"]
    assert tables_of(tmp_path) == whole


@pytest.mark.parametrize("damage", [truncate, delete])
def test_a_part_lost_before_the_merge_stops_the_run_and_not_for_ever(
    tmp_path: Path, whole: dict[str, bytes], damage: Callable[[Path], None]
) -> None:
    with start(tmp_path) as run:
        for trace_id, trace in TRACES.items():
            for table in TABLES:
                run.write_part(table, trace_id, rows(trace_id, trace)[table])
        damage(next((tmp_path / ".parts" / run.state["run_id"]).glob("tokens-*")))
        with pytest.raises(EnvironmentLacks, match="part"):
            run.finish({table: list(TRACES) for table in TABLES})
    assert len(measure(start(tmp_path))) == 1
    assert tables_of(tmp_path) == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"config": {"intervention": "evict", "window": 4, "stride": 1}}, "window is 1 there and 4 here"),
        ({"config": {"intervention": "evict", "window": 1, "stride": 1, "flips": True}}, "flips"),
        ({"model": {"name": "made-up", "fingerprint": "other", "note": ""}}, "another fingerprint"),
        ({"input_hash": "other"}, "input_hash"),
        ({"seed": 1}, "seed"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_configuration_is_refused_and_nothing_touched(
    tmp_path: Path, change: dict[str, Any], named: str, finished: bool
) -> None:
    if finished:
        measure(start(tmp_path))
    else:
        start(tmp_path).close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=named) as caught:
        start(tmp_path, **change)
    assert "--force" in caught.value.hint
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_device_and_attention_do_not_make_another_run(tmp_path: Path) -> None:
    start(tmp_path, device="cpu").close()
    with start(tmp_path, device="cuda", attention="eager") as run:
        assert run.state["events"][0]["kind"] == "continued elsewhere"
        assert run.state["events"][0]["device"] == {"before": "cpu", "now": "cuda"}


def test_force_replaces_another_run_and_keeps_a_strangers_file(tmp_path: Path, whole: dict[str, bytes]) -> None:
    made_runs.write(tmp_path, {"old": made_runs.APPLES}, seed=3)
    (tmp_path / "notes.html").write_text("mine")
    run = start(tmp_path, force=True)
    assert not run.complete
    assert not list(tmp_path.glob("*.parquet"))
    measure(run)
    assert tables_of(tmp_path) == whole
    assert (tmp_path / "notes.html").read_text() == "mine"


def test_force_computes_a_finished_run_again_but_continues_an_unfinished_one(tmp_path: Path) -> None:
    measure(start(tmp_path))
    with start(tmp_path, force=True) as run:
        assert not run.complete
        run.write_part("tokens", "two", rows("two", TRACES["two"])["tokens"])
    assert len(measure(start(tmp_path, force=True))) == 3


def test_parts_of_a_replaced_run_are_never_taken_over(tmp_path: Path) -> None:
    with start(tmp_path, seed=1) as run:
        run.write_part("tokens", "two", rows("two", TRACES["two"])["tokens"])
    with start(tmp_path, force=True) as run:
        assert not run.has_part("tokens", "two")
        assert len(list((tmp_path / ".parts").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", "mine"),
        ("run.json", '{"schema": "somebody.else/1", "run_id": "x", "status": "complete"}'),
        ("run.json", '{"schema": "kvlens.lab'),
        ("run.json", "[]"),
    ],
)
@pytest.mark.parametrize("force", [True, False])
def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path, name: str, content: str, force: bool) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match="no kvlens run"):
        start(tmp_path, force=force)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]


def test_a_finished_run_that_lost_a_table_says_so(tmp_path: Path) -> None:
    measure(start(tmp_path))
    (tmp_path / "tokens.parquet").unlink()
    with pytest.raises(InputError, match=r"tokens\.parquet") as caught:
        start(tmp_path)
    assert "--force" in caught.value.hint


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with start(tmp_path), pytest.raises(InputError, match=f"pid {os.getpid()}"):
        start(tmp_path)
    start(tmp_path).close()


def test_the_lock_holds_between_processes_and_dies_with_its_holder(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, 'tests'); import test_store\n"
    code += "run = test_store.start(test_store.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match=f"pid {child.pid}"):
            start(tmp_path)
        child.kill()
    assert (tmp_path / ".lock").read_text() == f"{child.pid}\n"
    start(tmp_path).close()


def test_plan_events_and_skipped_items_outlive_the_process(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        run.save_plan({"packs": [(0, 8), (8, 16)]})
        run.add_event("out of memory", windows=np.int64(64), left=float("nan"))
        run.skip("two", "longer than the context")
        run.note_peak(700)
    first_seconds = run.state["wall_seconds"]
    with start(tmp_path) as run:
        assert run.plan == {"packs": [[0, 8], [8, 16]]}
        run.skip("two", "longer than the context")
        run.note_peak(300)
        run.write_part("tokens", "two", rows("two", TRACES["two"])["tokens"])
        run.finish({"tokens": ["two"]}, counts={"traces": 1}, peak_bytes=500, results={"recall": np.float32(0.5)})
    meta = load(tmp_path).meta
    assert meta["events"] == [{"kind": "out of memory", "windows": 64, "left": None}]
    assert meta["counts"] == {"skipped": [{"id": "two", "reason": "longer than the context"}], "traces": 1}
    assert meta["peak_bytes"] == 700
    assert meta["results"] == {"recall": 0.5}
    assert meta["wall_seconds"] >= first_seconds > 0


def test_an_error_inside_keeps_the_parts_and_frees_the_folder(tmp_path: Path) -> None:
    def fails_midway() -> None:
        with start(tmp_path) as run:
            run.write_part("tokens", "two", rows("two", TRACES["two"])["tokens"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_midway()
    with start(tmp_path) as run:
        assert run.has_part("tokens", "two")


# Disks that refuse. As root no permission binds, so real limits and real mounts stand in for them.


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path, whole: dict[str, bytes]) -> None:
    code = """
import resource, sys
sys.path.insert(0, "tests")
import test_store
from kvlens.errors import EnvironmentLacks
run = test_store.start(test_store.Path(sys.argv[1]))
with run:
    run.write_part("windows", "two", test_store.rows("two", test_store.TRACES["two"])["windows"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    try:
        run.write_part("tokens", "two", test_store.rows("two", test_store.TRACES["two"])["tokens"])
    except EnvironmentLacks as error:
        print(error.exit_code, error.message.count(chr(10)), error.message, error.hint)
"""
    done = run_python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 0 writing ")
    assert "File too large" in done.stdout
    assert "same command" in done.stdout
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(measure(start(tmp_path))) == 3
    assert tables_of(tmp_path) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(run: RunFolder) -> None:
    for number in range(20):
        run.write_part("tokens", str(number), rows("two", TRACES["two"])["tokens"])


def test_no_space_left_on_a_real_file_system(small_disk: Path) -> None:
    noise = np.random.default_rng(0).bytes(40_000)
    (small_disk / "other").write_bytes(noise)
    with start(small_disk / "run") as run:
        run.write_part("tokens", "two", rows("two", TRACES["two"])["tokens"])
        (small_disk / "more").write_bytes(b"x" * 4096)
        with pytest.raises(EnvironmentLacks, match="No space left") as caught:
            fill(run)
        assert "free some space" in caught.value.hint
        (small_disk / "other").unlink()
    with start(small_disk / "run") as run:
        assert run.has_part("tokens", "two")


def test_a_read_only_disk_is_refused_but_a_finished_run_on_it_is_found(small_disk: Path) -> None:
    measure(start(small_disk / "run"))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert start(small_disk / "run").complete
    with pytest.raises(EnvironmentLacks, match="Read-only file system"):
        start(small_disk / "another")


def test_a_path_below_a_file_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="creating"):
            start(out)


def test_a_failed_write_keeps_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write_whole(target, b"old")

    def fails(stream: Any) -> None:
        stream.write(b"new, but only ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(EnvironmentLacks, match="No space left"):
        write_whole(target, fails)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page.html", b"old")]


def test_a_write_through_a_link_or_into_a_pipe_keeps_the_link_and_the_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"content"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)


def test_a_seal_breaks_at_any_changed_byte(tmp_path: Path) -> None:
    path = tmp_path / "part"
    write_sealed(path, b"payload")
    assert read_sealed(path) == b"payload"
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(Damaged):
            read_sealed(path)


# Tables and loading.


def test_tables_have_the_columns_that_other_peoples_scripts_read() -> None:
    columns = {table: {field.name: str(field.type) for field in schema} for table, schema in LABELS_TABLES.items()}
    assert columns["windows"] == {
        "trace_id": "string",
        "window_start": "int32",
        "window_end": "int32",
        "intervention": "string",
        "cells": "string",
        "selected_by": "string",
        "effect_nats": "double",
        "kl_nats": "double",
        "flipped": "bool",
        "per_target": str(pa.list_(pa.float32())),
        "lag": "int32",
        "metric_effect": "double",
    }
    assert columns["tokens"] == {
        "trace_id": "string",
        "pos": "int32",
        "token_id": "int32",
        "token": "string",
        "segment": "string",
        "effect_nats": "double",
        "flipped": "bool",
    }
    assert columns["traces"] == {
        "trace_id": "string",
        "n_tokens": "int32",
        "n_target": "int32",
        "log_prob_full": "double",
        "noise_nats": "double",
    }


def test_nulls_infinities_and_lists_survive_the_way_to_disk_and_back(tmp_path: Path) -> None:
    columns = rows("one", made_runs.APPLES)["windows"]
    n_rows = len(columns["window_start"])
    columns["effect_nats"][:2] = [np.nan, -np.inf]
    columns["flipped"] = [True, None] + [False] * (n_rows - 2)
    columns["per_target"] = [np.array([1.5, -0.25])] + [None] * (n_rows - 1)
    with start(tmp_path) as run:
        run.write_part("windows", "one", columns)
        assert run.read_part("windows", "one").flipped.tolist()[:3] == [True, pd.NA, False]
        run.finish({"windows": ["one"]})
    windows = load(tmp_path).windows
    assert np.isnan(windows.effect_nats[0])
    assert windows.effect_nats[1] == -np.inf
    assert windows.per_target[0].tolist() == [1.5, -0.25]
    assert windows.per_target[1] is None
    assert windows.lag.isna().all()
    assert pq.read_table(tmp_path / "windows.parquet").column("effect_nats").null_count == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": [1]}, "not in the schema"),
        ({"token": None}, "'token' is missing or has nulls"),
        ({"pos": [1, 2]}, "one length"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused(change: dict[str, Any], message: str) -> None:
    columns = {"trace_id": "t", "pos": [0], "token_id": [5], "token": ["x"], "segment": "prompt"}
    assert to_arrow(columns, LABELS_TABLES["tokens"]).num_rows == 1
    with pytest.raises(ValueError, match=message):
        to_arrow(columns | change, LABELS_TABLES["tokens"])


@pytest.mark.parametrize("n_positions", [0, 1, 8, 17])
def test_keep_masks_come_back_from_their_bytes(n_positions: int) -> None:
    kept = np.random.default_rng(n_positions).random(n_positions) < 0.9
    packed = pack_kept(kept)
    assert len(packed) == -(-n_positions // 8)
    assert unpack_kept(packed, n_positions).tolist() == kept.tolist()


def test_load_gives_tables_and_provenance(tmp_path: Path) -> None:
    run = load(made_runs.write(tmp_path / "run", TRACES))
    assert set(run.tables) == {"windows", "tokens", "traces"}
    assert run.tokens is run["tokens"]
    assert list(run.traces.trace_id) == list(TRACES)
    assert run.meta["model"]["fingerprint"] == "c0ffee-f00d"
    assert "windows" in repr(run)
    assert len(repr(run)) < 200
    assert "tokens" in dir(run)
    with pytest.raises(AttributeError, match="tokens"):
        run.nothing  # noqa: B018
    with pytest.raises(KeyError, match="nothing"):
        run["nothing"]


def test_load_stacks_runs(tmp_path: Path) -> None:
    paths = [made_runs.write(tmp_path / name, {name: made_runs.APPLES}) for name in ("first", "second")]
    stacked = load(paths)
    alone = [load(path) for path in paths]
    assert stacked.tokens.columns[0] == "run"
    for name, one in zip(("first", "second"), alone, strict=True):
        part = stacked.windows[stacked.windows.run == name].drop(columns="run").reset_index(drop=True)
        pd.testing.assert_frame_equal(part, one.windows)
        assert stacked.meta["runs"][name] == one.meta
    same_name = made_runs.write(tmp_path / "deeper" / "first", {"x": made_runs.APPLES})
    assert set(load([paths[0], same_name]).tokens.run) == {str(paths[0]), str(same_name)}
    with pytest.raises(InputError, match="twice"):
        load([paths[0], paths[0]])
    with pytest.raises(InputError, match="empty"):
        load([])


def change_state(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(state | changes))

    return change


@pytest.mark.parametrize(
    ("harm", "message", "hint"),
    [
        (shutil.rmtree, "no such folder", "-o"),
        (lambda path: (path / "run.json").unlink(), "no run.json", "-o"),
        (lambda path: truncate(path / "run.json"), "damaged", "kvlens"),
        (lambda path: (path / "run.json").write_text("{}"), "damaged", "kvlens"),
        (change_state(schema="kvlens.labels/99"), "kvlens.labels/99", "update kvlens"),
        (change_state(schema="other/1"), "other/1", "kvlens wrote"),
        (change_state(status="running"), "not finished", "again"),
        (change_state(dtype="bfloat16"), "changed since the run wrote it", "restore"),
        (change_state(config={"window": "eight"}), "changed since the run wrote it", "restore"),
        (change_state(seal=None), "changed since the run wrote it", "restore"),
        (change_state(seed=float("nan")), "changed since the run wrote it", "restore"),
        (lambda path: truncate(path / "tokens.parquet"), r"tokens\.parquet", "--force"),
        (lambda path: flip(path / "tokens.parquet"), r"tokens\.parquet", "--force"),
        (lambda path: delete(path / "tokens.parquet"), r"tokens\.parquet", "--force"),
    ],
)
def test_load_says_what_is_wrong(tmp_path: Path, harm: Callable[[Path], None], message: str, hint: str) -> None:
    out = made_runs.write(tmp_path / "run", TRACES)
    harm(out)
    with pytest.raises(InputError, match=message) as caught:
        load(out)
    assert hint in caught.value.hint


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("change", [{"tables": ["tokens"]}, {"events": None}, {"seal": 3}, {"status": "running"}])
def test_a_run_with_an_edited_state_is_not_gone_on_with(tmp_path: Path, change: dict[str, Any], force: bool) -> None:
    out = made_runs.write(tmp_path / "run", TRACES)
    change_state(**change)(out)
    before = (out / "run.json").read_bytes()
    with pytest.raises(InputError, match="changed since"):
        start(out, force=force)
    assert (out / "run.json").read_bytes() == before


def test_what_is_no_path_is_not_loaded() -> None:
    code = """
import kvlens
from kvlens.errors import InputError
for what in (123, None, b"run", [1], {"run": 1}):
    try:
        kvlens.load(what)
    except InputError as error:
        print(error.message)
"""
    refusals = run_python(code).stdout.splitlines()  # on its own, for the tests' type checks would come first
    assert len(refusals) == 5
    assert all(refusal.endswith("is no path") for refusal in refusals)


def test_a_folder_whose_name_is_no_utf8_is_loaded(tmp_path: Path) -> None:
    out = made_runs.write(tmp_path / os.fsdecode(b"\xff"), TRACES)
    assert list(load(out).traces.trace_id) == list(TRACES)


def test_runs_of_two_schemas_do_not_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMAS, "kvlens.labels/0", LABELS_TABLES)
    one = made_runs.write(tmp_path / "one", TRACES)
    other = made_runs.write(tmp_path / "other", TRACES, schema="kvlens.labels/0")
    with pytest.raises(InputError, match="schemas"):
        load([one, other])


def test_the_input_hash_sees_every_text_and_their_order() -> None:
    one, two = Trace("a", prompt="x", meta={"n": 1}), Trace("b", text="y")
    hashes = {
        hash_traces(traces)
        for traces in ([one, two], [two, one], [one], [Trace("a", prompt="xy"), two], [Trace("a", reasoning="x"), two])
    }
    assert len(hashes) == 5
    assert hash_traces([one, two]) == hash_traces([Trace("a", prompt="x", meta={"n": 1}), Trace("b", text="y")])


def test_plain_values_are_json() -> None:
    value = {"a": np.float32("nan"), "b": [np.inf, -np.inf], 3: (np.int8(1), True), "p": Path("x"), "n": pd.NA}
    assert json.dumps(plain(value), allow_nan=False) == (
        '{"a": null, "b": ["inf", "-inf"], "3": [1, true], "p": "x", "n": null}'
    )
    with pytest.raises(TypeError, match="object"):
        plain(object())
