"""What does an eviction policy say? All that decides which cached tokens leave.

1. `Policy` holds a scorer's name and parameters and, apart from them, what is protected, when eviction happens, how
   many tokens stay, in which pieces they leave and how their storage is shaped. Names are those of the policy file.
2. It is checked when it is made: unknown names, wrong types, and what cannot be kept (a budget below what is
   protected) are refused as an InputError.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlens.allocate import table as allocators
from kvlens.allocate.by_table import ByTable
from kvlens.allocate.interface import Allocator
from kvlens.errors import InputError
from kvlens.scorers import table
from kvlens.scorers.interface import Scorer

Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
# A list will do. The first wrong number is enough: a hostile file would make an error of each of its 100,000.
HeadBudgets = Annotated[tuple[Positive, ...], Field(strict=False, fail_fast=True)]
TRIGGER = re.compile(r"prefill|step|every:([1-9][0-9]{0,9})")


class _Part(BaseModel):
    """Frozen, strict, no unknown field. `place` is where it stands in a policy, for errors."""

    place: ClassVar[str] = ""
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **data: Any) -> None:  # a file may have a field named self
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise refusal(error, self.place) from error


class ScorerChoice(_Part):
    """Which method scores, with its parameters."""

    place = "scorer"
    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)

    def make(self) -> Scorer:
        """The scorer itself."""
        try:
            return table.make(self.name, self.parameters)
        except InputError as error:
            hint = error.hint or "leave the parameter out for its default"
            raise InputError(error.message, hint) from error


class Protect(_Part):
    """What never leaves: the first `sinks` tokens of a row, its last `recent` ones, its `prompt`."""

    place = "protect"
    sinks: Count = 4
    prompt: bool = False
    recent: Count = 0


class Granularity(_Part):
    """In which pieces tokens leave: one by one, or pages of `page_size` positions that leave only as a whole."""

    place = "granularity"
    unit: Literal["token", "page"] = "token"
    page_size: Positive = 16


class Allocate(_Part):
    """How many tokens each (layer, KV head) keeps: which method shares the budget, with its parameters.

    `table[layer][kv_head]` are the numbers of the method `table`.
    """

    place = "allocate"
    name: Annotated[str, Field(json_schema_extra={"enum": list(allocators.TABLE)})] = "uniform"
    parameters: dict[str, Any] = Field(default_factory=dict)
    table: Annotated[tuple[HeadBudgets, ...], Field(strict=False, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Allocate:
        if self.table is None and self.name == "table":
            raise ValueError("allocate.name 'table' needs its table of budgets, a row a layer and a number a KV head")
        if self.table is not None and self.name != "table":
            raise ValueError("a table of budgets belongs to allocate.name 'table' alone")
        if self.table is not None and self.parameters:
            raise ValueError("allocate.name 'table' takes no parameters")
        return self

    def make(self) -> Allocator:
        """The allocator itself."""
        if self.table is not None:
            return ByTable(self.table)
        try:
            return allocators.make(self.name, self.parameters)
        except InputError as error:
            raise InputError(error.message, error.hint or "leave the parameter out for its default") from error


class Budget(_Part):
    """How much stays, sinks, prompt and recent tokens included: exactly one of the three.

    `tokens` per KV head; `bytes` of keys and values a row of the batch takes in all managed layers; `keep_fraction` of
    the tokens of a row's prompt.
    """

    place = "budget"
    tokens: Positive | None = None
    bytes: Positive | None = None
    keep_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Budget:
        given = [name for name in ("tokens", "bytes", "keep_fraction") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a budget is one of tokens, bytes and keep_fraction, not {given or 'none of them'}")
        return self


class Policy(_Part):
    """One way to keep a cache within a budget while a model generates."""

    scorer: ScorerChoice
    budget: Budget
    protect: Protect = Protect()
    trigger: Annotated[str, Field(json_schema_extra={"pattern": f"^({TRIGGER.pattern})$"})] = "every:128"
    granularity: Granularity = Granularity()
    reduce: Literal["all", "layer", "head"] = "all"
    positions: Literal["absolute"] = "absolute"
    storage: Literal["ragged", "padded", "uniform_cap"] = "padded"
    allocate: Allocate = Allocate()

    @model_validator(mode="after")
    def _check(self) -> Policy:
        if TRIGGER.fullmatch(self.trigger) is None:
            raise ValueError(f"trigger {self.trigger!r:.40} is none of prefill, step, every:H with H tokens")
        self._check_shares()
        scorer = self.scorer.make()
        if getattr(scorer, "score_prompt", True) is False and not self.protect.prompt:
            raise ValueError(f"scorer {self.scorer.name} with score_prompt off needs protect.prompt")
        if scorer.together and (self.reduce != "all" or self.storage == "ragged"):
            raise ValueError(
                f"scorer {self.scorer.name} reads the same tokens in every layer and head: "
                "it needs reduce 'all' and a storage that is not 'ragged'"
            )
        return self

    def _check_shares(self) -> None:
        """Nothing; raises where the budget cannot be shared like that."""
        allocator, name, table = self.allocate.make(), self.allocate.name, self.allocate.table
        if allocator.reads_scores and self.reduce != "head":
            raise ValueError(f"allocate.name {name!r} gives each head its own number of tokens: it needs reduce 'head'")
        if allocator.per_layer and self.reduce == "all":
            raise ValueError(f"with reduce 'all' every head keeps the same tokens: allocate.{name} needs layer or head")
        if allocator.reads_scores and self.granularity.unit == "page":
            raise ValueError(f"allocate.name {name!r} counts single tokens: it needs granularity.unit 'token'")
        if table is not None and self.reduce == "layer" and any(len(set(row)) > 1 for row in table):
            raise ValueError("with reduce 'layer' the heads of a layer keep the same tokens: their budgets differ")
        least = self.budget.tokens
        if table is not None:
            least = min(min(row, default=0) for row in table) if table else 0
        kept = self.protection()
        if least is not None and self.granularity.unit == "page" and self.kept_anyhow() > least:
            raise ValueError(
                f"sinks {kept.sinks} + recent {kept.recent} on whole pages of {self.granularity.page_size} take up to "
                f"{self.kept_anyhow()} tokens, and the budget is {least}"
            )
        if least is not None and kept.sinks + kept.recent > least:
            floor = (
                f" (the floor of allocate {name}: {name}:floor=N sets it)" if kept.recent > self.protect.recent else ""
            )
            raise ValueError(
                f"sinks {kept.sinks} + recent {kept.recent}{floor} do not fit into {least} tokens: they count inside "
                "the budget"
            )

    def protection(self) -> Protect:
        """What never leaves, the recent tokens that the allocator keeps in every cell included."""
        recent = max(self.protect.recent, self.allocate.make().recent)
        return self.protect.model_copy(update={"recent": recent})

    def kept_anyhow(self) -> int:
        """The most tokens that sinks and recent tokens take, whole pages counted, and at least one page."""
        kept, page = self.protection(), self.granularity.page_size
        if self.granularity.unit == "token":
            return kept.sinks + kept.recent
        return max(page, -(-kept.sinks // page) * page + (kept.recent + page - 1 if kept.recent else 0))

    @property
    def every(self) -> int | None:
        """H of `every:H`, in tokens; 1 for `step`; None for `prefill`."""
        found = TRIGGER.fullmatch(self.trigger)
        return None if self.trigger == "prefill" else int((found and found[1]) or 1)


def refusal(error: ValidationError, place: str = "") -> InputError:
    """What pydantic found first in the part of a policy that stands in this place, as an error of kvlens."""
    first = error.errors(include_url=False)[0]
    path = [*([place] if place else []), *map(str, first["loc"])]
    if first["type"] == "extra_forbidden":
        above = f"{'.'.join(path[:-1])[:80]} of a policy" if path[:-1] else "a policy"
        hint = "a method's parameters stand in scorer.parameters and allocate.parameters; see `kvlens export --help`"
        return InputError(f"{above} has no field {path[-1]!r:.80}", hint)
    where = ".".join(part if part.isprintable() else repr(part) for part in path)
    reason = " ".join(first["msg"].removeprefix("Value error, ").split())
    what = f": {first['input']!r:.80}" if where and first["type"] != "missing" else ""
    return InputError(
        f"policy{' field ' + where[:80] if where else ''}{what}: {reason[:400]}", "see `kvlens export --help`"
    )
