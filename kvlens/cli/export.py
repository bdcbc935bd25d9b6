"""`kvlens export`: a finding, or a named method, as a policy file."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns
from kvlens.errors import InputError

if TYPE_CHECKING:
    from kvlens.policy import Budget
    from kvlens.policy_file import PolicyFile


def command(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The policy file to write.")],
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SOURCE]", help="A bands run or its bands.json, a signals run or its fitted.json."),
    ] = None,
    bands: Annotated[
        Literal["paper"] | None, typer.Option("--bands", help="Take the depths that the EpiKV paper published.")
    ] = None,
    scorer: Annotated[
        str | None, typer.Option("--scorer", metavar="NAME", help="The method; a wrong name lists what there is.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the method; may be given several times."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", help="Write this model's shape and fingerprint into the file."),
    ] = None,
    budget_tokens: options.BudgetTokens = None,
    budget_bytes: options.BudgetBytes = None,
    keep_fraction: options.KeepFraction = None,
    sinks: Annotated[
        int | None, typer.Option("--sinks", min=0, metavar="N", help="First tokens that never leave (default 4).")
    ] = None,
    recent: Annotated[
        int | None, typer.Option("--recent", min=0, metavar="N", help="Last tokens that never leave (by method).")
    ] = None,
    protect_prompt: Annotated[
        bool | None,
        typer.Option("--protect-prompt/--no-protect-prompt", help="Whether the prompt never leaves (by method)."),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option("--trigger", metavar="prefill|step|every:H", help="When tokens leave (default every:128)."),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option("--page-size", min=1, metavar="N", help="Evict whole pages of N positions.")
    ] = None,
    storage: Annotated[
        Literal["ragged", "padded", "uniform_cap"] | None,
        typer.Option("--storage", help="How heads with different numbers of tokens are held (default padded)."),
    ] = None,
    allocate: Annotated[
        str | None,
        typer.Option(
            "--allocate", metavar="NAME[:KEY=VALUE]", help="How layers and heads share the budget (default uniform)."
        ),
    ] = None,
    reduce: Annotated[
        Literal["all", "layer", "head"] | None,
        typer.Option("--reduce", help="Which layers and heads keep the same tokens (by method, else all)."),
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            "--program", metavar="FILE", help="Also write the decode-time scorer as a .pt2 that runs without kvlens."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what the files hold.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a policy file: which tokens leave a cache, when, and how many stay."""
    from kvlens.exporting import export

    policy = export(
        source, out,
        bands=bands, scorer=scorer, parameters=_parameters("--set", set_ or []), model=model, sinks=sinks,
        recent=recent, protect_prompt=protect_prompt, trigger=trigger, page_size=page_size, storage=storage,
        allocate=_allocate(allocate), reduce=reduce, budget_tokens=budget_tokens, budget_bytes=budget_bytes,
        keep_fraction=keep_fraction, program=program, force=force,
    )  # fmt: skip
    document = {"path": out, **policy.document()}
    paths = [out] if program is None else [out, program]
    document |= {} if program is None else {"program": program}
    Output(json, quiet).answer(document, text=_text(policy, out, program), paths=paths)


def _allocate(text: str | None) -> dict[str, Any] | None:
    """What `--allocate contour:floor=32` says."""
    if text is None:
        return None
    name, *words = text.split(":")
    return {"name": name, "parameters": _parameters("--allocate", words)}


def _parameters(option: str, words: Sequence[str]) -> dict[str, Any]:
    """The parameters that an option gives: a value that JSON can read is what it says, any other is text."""
    found: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not (key and sign) or key in found:
            what = "is given twice" if key in found else "is no KEY=VALUE"
            example = {"--set": "window=32", "--allocate": "contour:floor=32"}[option]
            raise InputError(f"{option} {word!r:.80} {what}", f"write it as {option} {example}, each key once")
        try:
            found[key] = json_text.loads(value, parse_constant=_no_number)
        except (ValueError, RecursionError):
            found[key] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def budget_words(budget: Budget) -> str:
    """A budget in words."""
    if budget.tokens is not None:
        return f"{budget.tokens:,} tokens a head"
    if budget.bytes is not None:
        return f"{budget.bytes:,} bytes a text"
    return f"{budget.keep_fraction:g} of the prompt"


def _text(policy: PolicyFile, out: Path, program: Path | None) -> str:
    protect, made_for, pages = policy.protect, policy.model, policy.granularity
    kept = [f"{protect.sinks} first", f"{protect.recent} last"] + (["the prompt"] if protect.prompt else [])
    shared = "" if policy.allocate.name == "uniform" else policy.allocate.name
    if policy.allocate.parameters:
        shared += " with " + ", ".join(f"{name} {_short(value)}" for name, value in policy.allocate.parameters.items())
    shape = "" if made_for is None else f"{made_for.n_layers} layers, fingerprint {made_for.fingerprint}"
    facts = {
        "scorer": policy.scorer.name,
        "  with": ", ".join(f"{name} {_short(value)}" for name, value in policy.scorer.parameters.items()),
        "budget": budget_words(policy.budget),
        "shared by": shared,
        "protected": ", ".join(kept),
        "trigger": policy.trigger + (f", pages of {pages.page_size}" if pages.unit == "page" else ""),
        "kept sets": {"all": "one for all layers and heads", "layer": "one a layer", "head": "one a head"}[
            policy.reduce
        ],
        "model": shape,
        "evidence": "; ".join(f"{part.path} (sha256 {part.sha256[:12]})" for part in policy.evidence),
        "file": str(out),
        "program": "" if program is None else f"{program} (what goes in and out is in its kvlens.json)",
    }
    return columns({name: value for name, value in facts.items() if value})


def _short(value: Any) -> str:
    if isinstance(value, str) and not value.isprintable():
        return repr(value)
    return f"{value:.4g}" if isinstance(value, float) else f"{len(value)}" if isinstance(value, list) else f"{value}"
