"""Reading: every form of CONTRACTS, and every refusal with the file and line it is about."""

from __future__ import annotations

import json
import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlens.errors import EnvironmentLacks, InputError, KvlensError
from kvlens.formats import _dataset_name
from kvlens.provenance import hash_traces
from kvlens.records import Question, Trace
from kvlens.texts import at_hand, read_prompts, read_traces

GOOD = {"id": "a", "prompt": "2 + 2 = ", "reasoning": "two and two. ", "target": "4"}
FULL = GOOD | {
    "answer": ["4", "four"],
    "spans": [[0, 1], [4, 5]],
    "questions": [{"question": "What?", "target": "4", "answer": "4"}, {"question": "Why?"}],
    "meta": {"seed": 3, "nested": {"list": [1.5, None]}},
}
FULL_TRACE = Trace(
    id="a",
    prompt="2 + 2 = ",
    reasoning="two and two. ",
    target="4",
    answer=("4", "four"),
    spans=((0, 1), (4, 5)),
    questions=(Question("What?", "4", ("4",)), Question("Why?")),
    meta={"seed": 3, "nested": {"list": [1.5, None]}},
)


def write(path: Path, *rows: Any) -> Path:
    """A JSONL file; strings and bytes are written as they are."""
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def refused(source: Any, *, read: Any = read_traces, error: type[KvlensError] = InputError) -> str:
    with pytest.raises(error) as caught:
        read(source)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


# Forms


def test_jsonl_holds_every_field(tmp_path: Path) -> None:
    assert read_traces(write(tmp_path / "t.jsonl", FULL)) == [FULL_TRACE]


def test_jsonl_skips_blank_lines_a_byte_order_mark_and_null_fields(tmp_path: Path) -> None:
    row = json.dumps({"id": "b", "text": "x", "prompt": None, "answer": None})
    path = write(tmp_path / "t.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r", "", "  ", row)
    assert [trace.id for trace in read_traces(str(path))] == ["a", "b"]


def test_an_unended_last_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD))
    assert len(read_traces(path)) == 1


def test_parquet_gives_the_same_traces_as_jsonl(tmp_path: Path) -> None:
    rows = [FULL, {"id": "b", "prompt": "p", "target": "t"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    jsonl = read_traces(write(tmp_path / "t.jsonl", *rows))
    assert read_traces(tmp_path / "t.parquet") == jsonl


def test_a_text_file_is_one_trace_named_after_it(tmp_path: Path) -> None:
    (tmp_path / "my essay.txt").write_bytes("Zwölf Boxkämpfer.\r\nEnde.\n".encode())
    assert read_traces(tmp_path / "my essay.txt") == [Trace("my essay", text="Zwölf Boxkämpfer.\r\nEnde.\n")]


@pytest.mark.filterwarnings("default")  # what the datasets package does inside is its own
def test_a_local_folder_reads_as_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", GOOD, GOOD | {"id": "b"})
    assert [trace.id for trace in read_traces(f"hf:{folder}")] == ["a", "b"]
    assert len(read_traces(f"hf:{folder}::train", limit=1)) == 1
    assert "nosuch" in refused(f"hf:{folder}::nosuch")
    other = tmp_path / "other"
    other.mkdir()
    write(other / "test.jsonl", {"text": "no id here"})
    assert read_traces(f"hf:{other}:test") == [Trace("test-0", text="no id here")]
    dated = tmp_path / "dated"
    dated.mkdir()
    write(dated / "train.jsonl", {"id": None, "text": "x", "meta": {"day": "2024-05-01"}})
    (trace,) = read_traces(f"hf:{dated}")
    assert trace.id == "train-0"
    assert trace.meta["day"].startswith("2024-05-01")
    assert hash_traces([trace])


def test_a_dataset_out_of_reach_is_the_environments_fault() -> None:
    pytest.importorskip("datasets")
    assert "hf:nobody/nothing" in refused("hf:nobody/nothing", error=EnvironmentLacks)


def test_without_the_datasets_package_the_hint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentLacks, match="datasets package is missing") as caught:
        read_traces("hf:some/set")
    assert caught.value.hint.startswith("pip install")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:u/n", ("u/n", None, "train")),
        ("hf:u/n:main", ("u/n", "main", "train")),
        ("hf:u/n:test", ("u/n", None, "test")),
        ("hf:u/n:main:test", ("u/n", "main", "test")),
        ("hf:u/n::odd", ("u/n", None, "odd")),
        ("hf:u/n:test:", ("u/n", "test", "train")),
    ],
)
def test_dataset_names(source: str, parts: tuple[str, str | None, str]) -> None:
    assert _dataset_name(source) == parts


@pytest.mark.parametrize("source", ["hf:", "hf::train", "hf:a:b:c:d"])
def test_malformed_dataset_names(source: str) -> None:
    assert "hf:NAME" in refused(source)


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "broken")
    assert len(read_traces(path, limit=1)) == 1
    with pytest.raises(InputError, match="limit must be 1"):
        read_traces(path, limit=0)


def test_prompts_need_no_target(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "1 + 1?", "answer": "2", "meta": {"k": 1}})
    assert read_prompts(path) == [Trace("a", prompt="1 + 1?", answer=("2",), meta={"k": 1})]
    (tmp_path / "q.txt").write_text("Why?")
    assert read_prompts(tmp_path / "q.txt") == [Trace("q", prompt="Why?")]


@pytest.mark.parametrize("row", [{"id": "a"}, {"id": "a", "prompt": " "}, {"prompt": "x"}, {"id": "a", "prompt": 3}])
def test_bad_prompts(tmp_path: Path, row: dict[str, Any]) -> None:
    assert "line 1" in refused(write(tmp_path / "p.jsonl", row), read=read_prompts)


# Refusals


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "target": "t"}, "'id' is missing"),
        (GOOD | {"id": ""}, "id is empty"),
        (GOOD | {"id": 7}, "'id' must be a string, found the number 7"),
        ({"id": "b", "target": "t"}, "'prompt' is missing"),
        ({"id": "b", "prompt": "p"}, "'target' is missing"),
        (GOOD | {"id": "b", "target": ""}, "target is empty"),
        (GOOD | {"id": "b", "target": ["t"]}, "'target' must be a string, found a list"),
        (GOOD | {"id": "b", "reasoning": False}, "'reasoning' must be a string, found true or false"),
        (GOOD | {"id": "b", "text": "x"}, "both text and prompt and reasoning and target"),
        ({"id": "b", "text": "x", "reasoning": "y"}, "both text and reasoning"),
        ({"id": "b", "text": " \n"}, "text is empty"),
        (GOOD | {"id": "b", "answer": 4}, "'answer' must be a string or a list of strings"),
        (GOOD | {"id": "b", "answer": ["4", None]}, "'answer' must be a string or a list of strings, found null"),
        (GOOD | {"id": "b", "answer": ""}, "an answer is empty"),
        (GOOD | {"id": "b", "spans": "0-1"}, "'spans' must be a list"),
        (GOOD | {"id": "b", "spans": [[0, 1.0]]}, "is not [start, end]"),
        (GOOD | {"id": "b", "spans": [[False, True]]}, "is not [start, end]"),
        (GOOD | {"id": "b", "spans": [[0, 1, 2]]}, "is not [start, end]"),
        (GOOD | {"id": "b", "spans": [[3, 3]]}, "empty or outside"),
        (GOOD | {"id": "b", "spans": [[-1, 3]]}, "empty or outside"),
        (GOOD | {"id": "b", "spans": [[0, 23]]}, "outside the text of 22 characters"),
        (GOOD | {"id": "b", "questions": ["Why?"]}, "'questions' must be a list of objects"),
        (GOOD | {"id": "b", "questions": [{"question": "Q"}, {"target": "t"}]}, "question 2: the field 'question'"),
        (GOOD | {"id": "b", "questions": [{"question": "Q", "target": ""}]}, "target is empty"),
        (GOOD | {"id": "b", "meta": [1]}, "'meta' must be an object"),
        ('{"id": "b", "prompt": "p", "target": "t", "meta": {"x": [1e999]}}', "NaN or infinity"),
        ('{"id": "b", "prompt": "p", "target": NaN}', "NaN is not standard JSON"),
        ('{"id": "b", "prompt": "p", "target": "t", "meta": {"x": -Infinity}}', "-Infinity is not standard JSON"),
        ('{"id": "b", "prompt": "\\ud800", "target": "t"}', "lone surrogate"),
        ('{"id": "b", "prompt": "p", "target": "t", "answer": ["4", "\\ud800"]}', "'answer' holds a lone surrogate"),
        ('{"id": "b", "prompt": "p", "target": "t", "meta": {"x": ["\\ud800"]}}', "'meta' holds a lone surrogate"),
        ('{"id": "b", "prompt": "p", "target": "t", "meta": {"x": {"\\ud800": 1}}}', "'meta' holds a lone surrogate"),
        ('{"id": "b", "text": "t", "meta": {"x": ' + "[" * 50 + "]" * 50 + "}}", "deeper than 50 levels"),
        ('{"id": "b", "text": "t", "meta": {"x": ' + "[" * 900 + "]" * 900 + "}}", "deeper than 50 levels"),
        ('["id", "b"]', "expected a JSON object, found a list"),
        ("{'id': 'b'}", "invalid JSON"),
        ('{"id": "b"} {"id": "c"}', "invalid JSON"),
        ("[" * 200_000, "invalid JSON"),
        ('{"id": ' + "9" * 5000 + "}", "invalid JSON"),
        (b'{"id": "\xff"}', "invalid UTF-8 at byte 9"),
        (GOOD, "id 'a' was already used at"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: Any, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", row)
    message = refused(path)
    assert f"{path}, line 3" in message
    assert reason in message


def test_meta_of_the_greatest_depth_is_read(tmp_path: Path) -> None:
    row = '{"id": "b", "text": "t", "meta": {"x": ' + "[" * 49 + "]" * 49 + "}}"
    (trace,) = read_traces(write(tmp_path / "t.jsonl", row))
    assert hash_traces([trace])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2024, 5, 1, 12, 30), "2024-05-01T12:30:00"),
        (datetime(2024, 5, 1, tzinfo=UTC), "2024-05-01T00:00:00+00:00"),
        (date(2024, 5, 1), "2024-05-01"),
        (time(12, 30), "12:30:00"),
        (Decimal("1.50"), 1.5),
        ([{"inside": date(2024, 5, 1)}], [{"inside": "2024-05-01"}]),
    ],
)
def test_meta_of_parquet_becomes_json(tmp_path: Path, value: Any, expected: Any) -> None:
    pq.write_table(pa.Table.from_pylist([GOOD | {"meta": {"x": value}}]), tmp_path / "t.parquet")
    (trace,) = read_traces(tmp_path / "t.parquet")
    assert trace.meta == {"x": expected}
    assert hash_traces([trace])


@pytest.mark.parametrize(("value", "kind"), [(b"raw", "bytes"), (timedelta(days=1), "timedelta")])
def test_meta_without_a_json_form_is_refused_by_name(tmp_path: Path, value: Any, kind: str) -> None:
    pq.write_table(pa.Table.from_pylist([GOOD | {"meta": {"x": value}}]), tmp_path / "t.parquet")
    assert f"row 1: 'meta' holds a value of the type {kind}" in refused(tmp_path / "t.parquet")


def test_parquet_with_invalid_utf8_or_two_columns_of_one_name(tmp_path: Path) -> None:
    broken = pa.array([b"fine", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"id": ["a", "b"], "text": broken}), tmp_path / "t.parquet")
    assert "rows 1 to 2: a string holds invalid UTF-8" in refused(tmp_path / "t.parquet")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["x"]), pa.array(["y"])], ["id", "text", "text"])
    pq.write_table(twice, tmp_path / "t.parquet")
    assert "more than one column named 'text'" in refused(tmp_path / "t.parquet")


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".jsonl"])
def test_a_name_too_long_for_the_system(name: str) -> None:
    assert "File name too long" in refused(name)


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "t.jsonl", GOOD, GOOD | {"id": "b"}, GOOD))
    assert "line 3" in message
    assert "line 1" in message


def test_a_last_line_that_was_cut_off_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"id": "b"})[:-9])
    message = refused(path)
    assert "line 2" in message
    assert "cut off" in message


@pytest.mark.parametrize("name", ["t.jsonl", "t.txt", "t.parquet"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert name in refused(tmp_path / name)


def test_blank_files(tmp_path: Path) -> None:
    assert "is empty" in refused(write(tmp_path / "t.jsonl", "", ""))
    assert "is empty" in refused(write(tmp_path / "t.txt", "", " "))


def test_invalid_utf8_in_a_text_file_names_the_line(tmp_path: Path) -> None:
    assert "line 2: invalid UTF-8 at byte 3" in refused(write(tmp_path / "t.txt", "one", b"ab\xe4c", "three"))


def test_no_such_file_a_folder_and_an_unknown_form(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "nothing.jsonl")
    assert "is a folder" in refused(tmp_path)
    assert "'.csv' is not known" in refused(write(tmp_path / "t.csv", "id,prompt"))


@pytest.mark.parametrize("where", ["end", "middle"])
def test_a_damaged_parquet_file(tmp_path: Path, where: str) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": [str(i) for i in range(999)], "text": [f"text {i}" for i in range(999)]}), path)
    data = bytearray(path.read_bytes())
    if where == "end":
        del data[len(data) // 2 :]
    else:
        data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    assert "no whole Parquet file" in refused(path)


def test_parquet_rows_are_numbered(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["x", None]}), tmp_path / "t.parquet")
    assert "row 2: the field 'prompt' is missing" in refused(tmp_path / "t.parquet")
    pq.write_table(pa.table({"id": ["a"], "text": [float("nan")]}), tmp_path / "t.parquet")
    assert "row 1: 'text' must be a string, found the number nan" in refused(tmp_path / "t.parquet")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that exists and cannot be read")
def test_a_file_the_system_will_not_read(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").symlink_to("/proc/self/mem")
    assert "t.jsonl" in refused(tmp_path / "t.jsonl", error=EnvironmentLacks)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(prompt=TEXT, reasoning=st.none() | TEXT, target=TEXT, ascii_only=st.booleans())
def test_any_text_comes_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, reasoning: str | None, target: str, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    row = {"id": "a", "prompt": prompt, "reasoning": reasoning, "target": target}
    path.write_bytes((json.dumps(row, ensure_ascii=ascii_only) + "\n").encode())
    assert read_traces(path) == [Trace("a", prompt=prompt, reasoning=reasoning or "", target=target)]


@given(data=st.binary(max_size=60), suffix=st.sampled_from([".jsonl", ".txt", ".parquet"]))
def test_any_bytes_give_traces_or_a_refusal(tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.mktemp("any") / f"t{suffix}"
    path.write_bytes(data)
    try:
        traces = read_traces(path)
    except InputError:
        return
    assert traces[0].text == data.decode().removeprefix("\ufeff")


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (Trace("\ud800", prompt="a", target="b"), "lone surrogate"),
        (Trace("a", prompt="the \ud800 red", target="b"), "lone surrogate"),
        (Trace("a", prompt="a b", target="c", spans=((-3, 4),)), "outside the text"),
        (Trace("a", prompt="a b", target="c", spans=((3, 99),)), "outside the text"),
        (Trace("a", prompt="a", target="b", meta={"x": object()}), "type object"),
        (Trace("a", prompt="a", target="b", text="c"), "both text and prompt and target"),
        (Trace("", prompt="a", target="b"), "the id is empty"),
        (Trace("a", prompt="a"), "target is empty"),
    ],
)
def test_traces_at_hand_are_held_to_what_a_file_could_hold(trace: Trace, message: str) -> None:
    with pytest.raises(InputError, match=message):
        at_hand([trace])


def test_traces_at_hand_stay_what_they_are() -> None:
    found = [
        Trace("a", prompt="p", reasoning="r", target="t", answer=("1", "2"), spans=((0, 2),), meta={"x": [1]}),
        Trace("b", text="whole", questions=(Question("q", "t", ("1",)),)),
        Trace("c", prompt="", target="t"),
    ]
    assert at_hand(found) == found
    assert at_hand([Trace("d", prompt="only")], prompts=True) == [Trace("d", prompt="only")]
