"""What does a policy file hold, and which files are refused? One JSON object, schema `kvlens.policy/1`.

1. `PolicyFile`: a policy, and with it for which model it was made, from which runs (hash and headline numbers), when
   and by which version. `policy_schema.json` beside this file is its JSON Schema.
2. `read_policy`: an ordinary file of at most 256 KiB; strict JSON (UTF-8, no NaN, no name twice, shallow); the
   schema known; then every field is checked. Nothing in it is run, and no other file is opened for it.
3. `check_model`: a policy made for layers and heads of other numbers is refused.
4. `write_policy`: what it replaces is the same policy, or asked for.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, JsonValue

from kvlens.disk import as_path, disk, write_whole
from kvlens.errors import InputError
from kvlens.policy import Policy, Positive, _Part
from kvlens.provenance import plain

SCHEMA = "kvlens.policy/1"
MOST_BYTES = 2**18
MOST_DEPTH = 12
HINT = "write one with `kvlens export`"
_ANOTHER = "choose another file, or add --force to replace it"
Short = Annotated[str, Field(max_length=200)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class MadeFor(_Part):
    """The model that a policy was made for; numbers that nobody told are null."""

    fingerprint: Short | None = None
    n_layers: Positive | None = None
    n_kv_heads: Positive | None = None
    d_head: Positive | None = None


class Evidence(_Part):
    """A file that the policy was built from: its schema and SHA-256, where it lay, and what it says in short."""

    file_schema: Short = Field(alias="schema")
    sha256: Sha256
    path: str = ""
    numbers: dict[str, JsonValue] = Field(default_factory=dict)


class PolicyFile(Policy):
    """A policy with what its file says beside it."""

    file_schema: Literal["kvlens.policy/1"] = Field(alias="schema")
    model: MadeFor | None = None
    evidence: Annotated[tuple[Evidence, ...], Field(strict=False, fail_fast=True)] = ()
    created: Short
    kvlens_version: Short

    def document(self) -> dict[str, Any]:
        """The file's content, `schema` first."""
        found = self.model_dump(mode="json", by_alias=True)
        return {"schema": found.pop("schema")} | found


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a policy file, as `policy_schema.json` holds it; what it lets through is checked further."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **PolicyFile.model_json_schema()}


# 2.


def read_policy(path: str | Path) -> PolicyFile:
    """The policy in a file.

    Raises: InputError for what is no policy file of a known schema, and for a policy that cannot be.
    """
    file = as_path(path, "policy")
    with disk(f"reading '{file}'"):
        if not file.exists():
            raise InputError(f"there is no policy file '{file}'", HINT)
        if not file.is_file():  # a pipe would be waited for
            raise InputError(f"'{file}' is no policy file: it is no ordinary file", HINT)
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    value = _strict_json(file, content)
    if not isinstance(value, dict):
        _refuse(file, "it holds no JSON object")
    if (schema := value.get("schema")) != SCHEMA:
        known = isinstance(schema, str) and schema.startswith("kvlens.policy/")
        hint = "update kvlens" if known else HINT
        raise InputError(f"'{file}' is no policy file: its schema is {schema!r:.80}, not '{SCHEMA}'", hint)
    try:
        return PolicyFile(**value)
    except InputError as error:
        raise InputError(f"'{file}': {error.message}", error.hint or HINT) from error


def _refuse(file: Path, reason: str) -> NoReturn:
    raise InputError(f"'{file}' is no policy file: {reason}", HINT)


def _strict_json(file: Path, content: bytes) -> Any:
    """The value that a small, strict JSON file holds."""
    if len(content) > MOST_BYTES:
        _refuse(file, f"it has more than {MOST_BYTES:,} bytes")
    try:
        value = json.loads(content.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_no_name_twice)
    except UnicodeDecodeError as error:
        _refuse(file, f"invalid UTF-8 at byte {error.start + 1}")
    except RecursionError:
        _refuse(file, "it is nested too deep")
    except ValueError as error:
        _refuse(file, f"invalid JSON: {str(error).partition(';')[0]}")
    level, depth = [value], 0
    while level:
        if depth > MOST_DEPTH:
            _refuse(file, "it is nested too deep")
        if reason := next((said for one in level if (said := _unfit(one))), ""):
            _refuse(file, reason)
        inner = [[*one, *one.values()] if isinstance(one, dict) else one for one in level]
        level, depth = [part for parts in inner if isinstance(parts, list) for part in parts], depth + 1
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not standard JSON")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r:.80} stands twice in one object")
    return found


def _unfit(value: Any) -> str:
    """What is wrong with a single value that is standard JSON as far as its letters go."""
    if isinstance(value, float) and not math.isfinite(value):
        return "it holds a number that is too large"
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "it holds half a character (a lone surrogate)"
    return ""


# 3.


def check_model(policy: Policy, model: Any) -> None:
    """Nothing; raises InputError where a policy file names layers or heads of other numbers than the model's."""
    made_for = getattr(policy, "model", None)
    if made_for is None:
        return
    wanted = {name: getattr(made_for, name) for name in ("n_layers", "n_kv_heads", "d_head")}
    wrong = [
        f"{name} {value} there, {getattr(model, name)} here"
        for name, value in wanted.items()
        if value not in (None, getattr(model, name))
    ]
    if wrong:
        raise InputError(
            f"this policy was made for another architecture than {model.name}: {'; '.join(wrong)}",
            "export one for this model, or allow it: --allow-mismatch, allow_mismatch=True",
        )


# 4.


def write_policy(policy: PolicyFile, path: str | Path, *, force: bool = False) -> PolicyFile:
    """The policy that the file holds afterwards: where the same stands there already, that one, with its own date.

    Raises: InputError where the file holds something else and `force` is not given, and for a policy that could not be
        read again.
    """
    file = as_path(path, "output")
    content = _readable(file, policy)
    with disk(f"reading '{file}'"):
        is_file, is_folder = file.is_file(), file.is_dir()
    if is_folder:
        raise InputError(f"writing '{file}' failed: it is a folder", "name a file, such as policy.json")
    if is_file and not force:
        try:
            held = read_policy(file)
        except InputError as error:
            raise InputError(f"'{file}' is there and holds something else", _ANOTHER) from error
        there, here = held.document(), policy.document()
        if name := next((name for name in here if name != "created" and there[name] != here[name]), ""):
            change = f"{name} is {json.dumps(there[name]):.100} there and {json.dumps(here[name]):.100} here"
            what = "it was built from other runs" if name == "evidence" else change
            raise InputError(f"'{file}' holds another policy: {what}", _ANOTHER)
        return held
    write_whole(file, content)
    return policy


def _readable(file: Path, policy: PolicyFile) -> bytes:
    """The file's content. Raises: InputError for one that `read_policy` would refuse."""
    text = json.dumps(plain(policy.document()), indent=1, ensure_ascii=False, allow_nan=False)
    content = text.encode(errors="surrogatepass") + b"\n"
    try:
        _strict_json(file, content)
    except InputError as error:
        raise InputError(
            f"this policy could not be read again: {error.message}", "export one of shorter parameters and sources"
        ) from error
    return content
