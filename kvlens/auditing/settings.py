"""What is asked of an audit? Methods and settings, settled and refused before anything is loaded.

1. Scorers of kvlens' table, policy files and presses become methods; `all` stands for every one that can run.
2. Protection is common: the first `sinks` and the last `recent` tokens stay under every scorer, policy and press that
   only scores. A press with a `compress` of its own protects what it protects.
3. `keep_fraction` is every method's budget; without it policies keep their own budget and protection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvlens.auditing.enforce import SHAPES, Enforced
from kvlens.auditing.methods import Full, Method, PolicyMethod
from kvlens.auditing.press_table import PRESSES, PressChoice, kvpress_version, make_press, read_press
from kvlens.auditing.presses import PressMethod
from kvlens.auditing.visibility import Case
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.policy import Budget, Policy, Protect, ScorerChoice
from kvlens.policy_file import check_model, read_policy
from kvlens.runtime import budget
from kvlens.scorers import table

ALL = "all"
T = TypeVar("T")
NOT_BY_NAME = {
    "fitted": "it has no weights of its own: give its policy file",
    "oracle": "it replays labels: offline only",
}


@dataclass(frozen=True)
class Settings:
    """What was asked for, checked."""

    keep_fraction: float | None
    protect: Protect
    methods: tuple[Method, ...]
    kvpress: str | None  # its version, where a press is asked for

    def config(self) -> dict[str, Any]:
        """What tells one run from another: every method with all that decides its numbers."""
        said = {
            method.name: method.policy.model_dump(mode="json", by_alias=True)
            for method in self.methods
            if isinstance(method, PolicyMethod)
        }
        return {
            "keep_fraction": self.keep_fraction,
            "sinks": self.protect.sinks,
            "recent": self.protect.recent,
            "methods": [method.name for method in self.methods],
            "policies": said,
            "kvpress": self.kvpress,
        }


def settle(
    policies: Sequence[str | Path | Policy],
    scorers: Sequence[str],
    presses: Sequence[str],
    *,
    keep_fraction: float | None,
    sinks: int,
    recent: int,
    enforce: bool,
    seed: int = 0,
) -> Settings:
    """The settings. Raises: InputError for what is not known or does not go together; EnvironmentLacks for presses
    where kvpress is not installed.
    """
    if type(enforce) is not bool:
        raise InputError(f"enforce {enforce!r:.40} is neither true nor false", "leave it out for false")
    policies, scorers = _several(policies, "policies", (str, Path, Policy)), _several(scorers, "scorers", (str,))
    presses = _several(presses, "presses", (str,))
    if not policies and not scorers and not presses:
        raise InputError("an audit of nothing", "name methods: --scorer all, --press all, --policy FILE")
    if keep_fraction is None and (scorers or presses):
        raise InputError("scorers and presses have no budget of their own", "add --keep-fraction, such as 0.5")
    ok = keep_fraction is None or (type(keep_fraction) in (int, float) and 0 < keep_fraction <= 1)
    if not ok:
        raise InputError(f"a budget of {keep_fraction!r:.40} of the length", "give a fraction above 0, at most 1")
    protect = Protect(sinks=sinks, recent=recent)
    methods: list[Method] = [Full()]
    methods += _numbered(_once(_policy(one, keep_fraction, protect) for one in policies))
    share = float(keep_fraction or 1)
    methods += [_scorer(words, share, protect, seed) for words in _expand(scorers, _scorers())]
    chosen = _once(read_press(words, seed) for words in _expand(presses, list(PRESSES)))
    version = kvpress_version() if chosen else None
    methods += _presses(chosen, share, protect, enforce)
    names = [method.name for method in methods]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two methods are called {twice!r:.80}", "write the parameters of one of them in the same way")
    return Settings(keep_fraction, protect, tuple(methods), version)


def _several(asked: Any, what: str, kinds: tuple[type, ...]) -> list[Any]:
    """What was asked for as a list; one alone will do."""
    found = [asked] if isinstance(asked, kinds) else list(asked) if isinstance(asked, (list, tuple)) else None
    if found is None or not all(isinstance(one, kinds) for one in found):
        raise InputError(f"{what} {asked!r:.80} name no methods", f"give a list, such as {what}=['all']")
    return found


def _expand(asked: Sequence[str], every: Iterable[str]) -> list[str]:
    """The words asked for, each once, with `all` unfolded."""
    return list(dict.fromkeys(one for words in asked for one in (every if words == ALL else [words])))


def _once(asked: Iterable[T]) -> list[T]:
    """Each once, in the order of the first."""
    found: list[T] = []
    for one in asked:
        if one not in found:
            found.append(one)
    return found


def _numbered(methods: Sequence[PolicyMethod]) -> list[PolicyMethod]:
    """The same with names of their own: the second of a name is `NAME#2`."""
    names = [method.name for method in methods]
    counts = [names[: number + 1].count(name) for number, name in enumerate(names)]
    return [
        method if count == 1 else replace(method, name=f"{method.name}#{count}")
        for method, count in zip(methods, counts, strict=True)
    ]


def _scorers() -> list[str]:
    return [name for name in table.TABLE if name not in NOT_BY_NAME]


def _scorer(words: str, keep_fraction: float, protect: Protect, seed: int) -> PolicyMethod:
    """A scorer at the common budget; each head keeps its own tokens, but where its score is the same in all layers."""
    if words in NOT_BY_NAME:
        raise InputError(f"scorer {words} cannot be audited by name: {NOT_BY_NAME[words]}", "choose another scorer")
    scorer = table.make(words, {})
    policy = Policy(
        scorer=ScorerChoice(name=words, parameters={"seed": seed} if hasattr(scorer, "seed") else {}),
        budget=Budget(keep_fraction=keep_fraction),
        protect=protect,
        trigger="prefill",
        reduce="head" if scorer.per_layer and not scorer.together else "all",
    )
    return PolicyMethod(words, "scorer", policy)


def _policy(one: str | Path | Policy, keep_fraction: float | None, protect: Protect) -> PolicyMethod:
    """A policy, at the common budget and protection where there is one and it names no budgets of its own."""
    policy = one if isinstance(one, Policy) else read_policy(one)
    name = policy.scorer.name if isinstance(one, Policy) else Path(one).stem
    if keep_fraction is not None:
        changes: dict[str, Any] = {"protect": protect.model_dump()}
        if policy.allocate.table is None:
            changes["budget"] = {"keep_fraction": keep_fraction}
        policy = type(policy)(**policy.model_dump(mode="json", by_alias=True) | changes)
    return PolicyMethod(f"policy:{name}", "policy", policy)


def _presses(chosen: Sequence[PressChoice], keep_fraction: float, protect: Protect, enforce: bool) -> list[Method]:
    """Presses as they ship, and those that mark also in every shape of storage."""
    found: list[Method] = []
    for choice in chosen:
        make_press(choice, round(1 - keep_fraction, 12))  # a slip is told before any work
        press = PressMethod(choice, keep_fraction, protect)
        found.append(press)
        if enforce and PRESSES[choice.name].marks:
            found += [Enforced(press, shape) for shape in SHAPES]
    return found


def check_budgets(settings: Settings, model: Model, cases: Sequence[Case]) -> None:
    """Nothing; raises InputError for a budget that a text cannot be compressed to, or a policy of another model."""
    for method in settings.methods:
        if isinstance(method, PolicyMethod):
            try:
                check_model(method.policy, model)
                budget.check_table(method.policy, model)
            except InputError as error:
                raise InputError(f"{method.name}: {error.message}", "export a policy for this model") from error
    layers = tuple(index for index, window in enumerate(model.sliding) if window is None)
    for case in cases:
        fixed = settings.protect.sinks + settings.protect.recent
        share = settings.keep_fraction
        if share is not None and budget.fraction_tokens(share, case.n_seen) < fixed:
            raise InputError(
                f"{share:g} of the {case.n_seen} tokens of trace {case.id!r} is less than the {fixed} protected ones",
                "raise --keep-fraction, lower --sinks or --recent, or use longer traces",
            )
        for method in settings.methods:
            if isinstance(method, PolicyMethod):
                least = method.policy.kept_anyhow()
                if share is not None and budget.fraction_tokens(share, case.n_seen) < least:
                    raise InputError(
                        f"{method.name} keeps {least} tokens whatever the budget says, more than {share:g} of the "
                        f"{case.n_seen} tokens of trace {case.id!r}",
                        "raise --keep-fraction, lower the floor of its allocator, or use longer traces",
                    )
                tokens = budget.fixed_tokens(method.policy, model, layers)
                if tokens is not None and tokens >= case.n_seen:
                    raise InputError(
                        f"{method.name} keeps {tokens:,} tokens, and trace {case.id!r} has {case.n_seen:,} to compress",
                        "give a smaller budget (--keep-fraction), or longer traces",
                    )
