"""Policy files: golden ones load for ever, hostile ones are refused at once, and a file is what was written."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import llama, token_ids

import kvlens
from kvlens import model as models
from kvlens import policy_file
from kvlens.errors import InputError
from kvlens.policy import Policy
from kvlens.policy_file import PolicyFile, check_model, json_schema, read_policy, write_policy
from kvlens.runtime.budget import fraction_tokens

GOLDEN = sorted((Path(__file__).parent / "golden").glob("policy_1_*.json"))
PLAIN: dict[str, Any] = {
    "schema": "kvlens.policy/1",
    "scorer": {"name": "random"},
    "budget": {"tokens": 64},
    "created": "2026-01-02T03:04:05+00:00",
    "kvlens_version": "0.1.0",
}
MODEL = {"fingerprint": "f00d", "n_layers": 3, "n_kv_heads": 2, "d_head": 8}


def a_file(folder: Path, content: bytes | dict[str, Any]) -> Path:
    path = folder / "policy.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


# Golden files: none of them may ever be changed or taken away


def test_no_golden_file_is_missing() -> None:
    names = [path.stem.removeprefix("policy_1_") for path in GOLDEN]
    assert names == ["epikv", "heads", "pages", "share", "smallest"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_files_load_and_say_what_they_hold(path: Path, tmp_path: Path) -> None:
    found, written = read_policy(path), json.loads(path.read_text())
    document = found.document()
    for name, value in written.items():
        if isinstance(value, dict):
            assert {key: document[name][key] for key in value} == value
        else:
            assert document[name] == value
    write_policy(found, tmp_path / "again.json")
    again = read_policy(tmp_path / "again.json")
    assert again == found
    assert again.document() == document
    assert next(iter(json.loads((tmp_path / "again.json").read_text()))) == "schema"


def test_what_a_golden_file_leaves_out_has_the_meaning_it_had() -> None:
    found = read_policy(next(path for path in GOLDEN if path.stem.endswith("smallest")))
    assert found.document() == PLAIN | {
        "scorer": {"name": "random", "parameters": {}},
        "budget": {"tokens": 64, "bytes": None, "keep_fraction": None},
        "protect": {"sinks": 4, "prompt": False, "recent": 0},
        "trigger": "every:128",
        "granularity": {"unit": "token", "page_size": 16},
        "reduce": "all",
        "positions": "absolute",
        "storage": "padded",
        "allocate": {"name": "uniform", "parameters": {}, "table": None},
        "model": None,
        "evidence": [],
    }


def test_the_published_schema_is_the_one_that_is_read() -> None:
    published = json.loads((Path(policy_file.__file__).parent / "policy_schema.json").read_text())
    assert published == json_schema()
    assert published["additionalProperties"] is False
    assert sorted(published["required"]) == ["budget", "created", "kvlens_version", "schema", "scorer"]


def test_the_published_schema_tells_good_from_bad() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(json_schema()).is_valid
    for path in GOLDEN:
        assert check(json.loads(path.read_text())), path.name
    for change in ({"schema": "kvlens.policy/2"}, {"budget": {"tokens": -1}}, {"colour": 1}, {"trigger": "every:0"}):
        assert not check(PLAIN | change)


# Hostile files

HOSTILE: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "empty": (b"", "invalid JSON"),
    "cut off": (json.dumps(PLAIN).encode()[:-9], "invalid JSON"),
    "no object": (b"[1, 2]", "no JSON object"),
    "null": (b"null", "no JSON object"),
    "no schema": ({name: value for name, value in PLAIN.items() if name != "schema"}, "its schema is None"),
    "later schema": (PLAIN | {"schema": "kvlens.policy/2"}, "'kvlens.policy/2', not 'kvlens.policy/1'"),
    "another schema": (PLAIN | {"schema": ["kvlens.policy/1"] * 9}, "its schema is"),
    "no UTF-8": (b"\xff\xfe{}", "invalid UTF-8 at byte 1"),
    "lone surrogate": (PLAIN | {"created": "\ud800"}, "lone surrogate"),
    "surrogate name": (PLAIN | {"\udfff": 1}, "lone surrogate"),
    "NaN": (PLAIN | {"budget": {"keep_fraction": float("nan")}}, "NaN is not standard JSON"),
    "infinity": (PLAIN | {"budget": {"keep_fraction": float("inf")}}, "Infinity is not standard JSON"),
    "1e999": (json.dumps(PLAIN).replace("64", "1e999").encode(), "too large"),
    "long number": (json.dumps(PLAIN).replace("64", "9" * 200_000).encode(), "invalid JSON: Exceeds the limit"),
    "huge number": (PLAIN | {"budget": {"tokens": 10**30}}, "less than or equal"),
    "negative": (PLAIN | {"budget": {"tokens": -64}}, "greater than or equal to 1"),
    "float": (PLAIN | {"budget": {"tokens": 64.0}}, "valid integer"),
    "text": (PLAIN | {"budget": {"tokens": "64"}}, "valid integer"),
    "true": (PLAIN | {"budget": {"tokens": True}}, "valid integer"),
    "list": (PLAIN | {"scorer": ["random"]}, "scorer"),
    "nested": (b"[" * 250_000, "nested too deep"),
    "nested names": (b'{"a":' * 50_000, "nested too deep"),
    "nested a little": (
        PLAIN | {"scorer": {"name": "random", "parameters": {"seed": [[[[[[[[[[[[1]]]]]]]]]]]]}}},
        "deep",
    ),
    "name twice": (b'{"schema": "kvlens.policy/1", "schema": "kvlens.policy/1"}', "'schema' stands twice"),
    "many names": ({f"n{i}": 1 for i in range(20_000)} | PLAIN, "has no field"),
    "many names, one twice": (b"{" + b",".join(b'"n%d":1' % i for i in range(20_000)) + b',"n9":1}', "stands twice"),
    "long name": (PLAIN | {"n" * 200_000: 1}, "has no field"),
    "control characters": (PLAIN | {"a\x1b[31m\nb": 1}, "has no field"),
    "self": (PLAIN | {"self": 1}, "has no field"),
    "unknown field": (PLAIN | {"protect": {"skins": 4}}, "skins"),
    "unknown scorer": (PLAIN | {"scorer": {"name": "x" * 200_000}}, "there is no scorer"),
    "unknown parameter": (PLAIN | {"scorer": {"name": "random", "parameters": {"self": 1}}}, "no parameter 'self'"),
    "wrong parameter": (PLAIN | {"scorer": {"name": "random", "parameters": {"seed": 0.5}}}, "seed is 0.5"),
    "allocate parameter": (PLAIN | {"allocate": {"parameters": {"a": 1}}}, "has no parameter 'a'"),
    "long table": (PLAIN | {"reduce": "head", "allocate": {"name": "table", "table": [["x"] * 50_000]}}, "integer"),
    "model": (PLAIN | {"model": MODEL | {"n_layers": 0}}, "greater than or equal to 1"),
    "evidence": (PLAIN | {"evidence": [{"schema": "kvlens.bands/1", "sha256": "0" * 63}]}, "pattern"),
    "too large": (json.dumps(PLAIN).encode() + b" " * 2**18, "more than 262,144 bytes"),
}


def refused(path: str | Path, says: str) -> None:
    """One line, with a hint, in under a second of processor time."""
    gc.disable()  # a collection walks through what all earlier tests left: a second of nobody's fault here
    try:
        before = time.process_time()
        with pytest.raises(InputError) as caught:
            read_policy(path)
        taken = time.process_time() - before
    finally:
        gc.enable()
    assert taken < 1.0
    message, hint = caught.value.message, caught.value.hint
    assert says in message
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 700
    assert hint


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(tmp_path: Path, name: str) -> None:
    content, says = HOSTILE[name]
    refused(a_file(tmp_path, content), says)


def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as stream:
        stream.truncate(10**8)
    refused(tmp_path / "large.json", "more than 262,144 bytes")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "no ordinary file")
    refused(tmp_path, "no ordinary file")
    refused("/dev/zero", "no ordinary file")
    refused(tmp_path / "nowhere.json", "there is no policy file")
    refused("x" * 300, "File name too long")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", "policy")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from([4, 0.5, "random"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)
PARTS = ["sinks", "tokens", "name", "parameters", "table", "unit", "keep_fraction", "n_layers", "self", "schema"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*PolicyFile.model_fields, "schema", "self", "_check"]),
    JSON | st.dictionaries(st.sampled_from(PARTS), JSON, max_size=3),
)
def test_any_field_of_any_value_is_a_policy_or_refused(name: str, value: Any) -> None:
    try:
        found = PolicyFile(**PLAIN | {name: value})
    except InputError:
        return
    assert PolicyFile(**json.loads(json.dumps(found.document()))) == found


# Another architecture


@pytest.mark.parametrize("name", ["n_layers", "n_kv_heads", "d_head"])
def test_a_policy_for_another_architecture_is_refused_by_name(name: str) -> None:
    model = models.wrap(llama())
    check_model(PolicyFile(**PLAIN | {"model": MODEL}), model)
    check_model(PolicyFile(**PLAIN | {"model": {name: MODEL[name]}}), model)
    with pytest.raises(InputError, match=f"{name} 99 there, {MODEL[name]} here") as caught:
        check_model(PolicyFile(**PLAIN | {"model": MODEL | {name: 99}}), model)
    assert "--allow-mismatch" in caught.value.hint


def test_apply_takes_a_file_and_looks_at_its_model(tmp_path: Path) -> None:
    model, ids = models.wrap(llama()), token_ids(40)
    options = {"budget": {"tokens": 12}, "trigger": "step"}
    path = a_file(tmp_path, PLAIN | options | {"model": MODEL | {"d_head": 64}})
    with pytest.raises(InputError, match="d_head 64 there, 8 here"), kvlens.apply(path, model):
        pass
    written = []
    plain = Policy(scorer={"name": "random"}, **options)  # type: ignore[arg-type]
    for policy, more in ((path, {"allow_mismatch": True}), (str(path), {"allow_mismatch": True}), (plain, {})):
        with kvlens.apply(policy, model, **more) as run:
            written.append(model.hf.generate(ids, max_new_tokens=9, do_sample=False))
            assert run.report().most_held == 12
    assert all(torch.equal(one, written[0]) for one in written)
    with pytest.raises(InputError, match="there is no policy file"), kvlens.apply(tmp_path / "nowhere", model):
        pass


# Writing


def test_the_same_policy_stays_and_another_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    first, later = PolicyFile(**PLAIN), PolicyFile(**PLAIN | {"created": "2027-01-01T00:00:00+00:00"})
    write_policy(first, path)
    content = path.read_bytes()
    assert write_policy(later, path) == first
    assert path.read_bytes() == content
    other = PolicyFile(**PLAIN | {"trigger": "step"})
    with pytest.raises(InputError, match='trigger is "every:128" there and "step" here') as caught:
        write_policy(other, path)
    assert "--force" in caught.value.hint
    assert path.read_bytes() == content
    assert write_policy(other, path, force=True) == other
    assert read_policy(path) == other


@pytest.mark.parametrize("write", [lambda path: path.write_text("mine"), lambda path: path.mkdir()])
def test_what_is_no_policy_is_not_replaced(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "p.json")
    with pytest.raises(InputError, match=r"holds something else|is a folder"):
        write_policy(PolicyFile(**PLAIN), tmp_path / "p.json")
    with pytest.raises(InputError, match="failed"):
        write_policy(PolicyFile(**PLAIN), tmp_path / "no" / "such" / "folder.json")


def test_a_budget_of_a_share_is_read_as_the_decimal_that_was_written(tmp_path: Path) -> None:
    share = read_policy(a_file(tmp_path, PLAIN | {"budget": {"keep_fraction": 0.29}})).budget.keep_fraction
    assert share is not None
    assert fraction_tokens(share, 100) == 29  # 0.29 * 100 is 28.999...
