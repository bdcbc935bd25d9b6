"""`kvlens generate`: a text written under a policy, and what the cache held meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns
from kvlens.errors import InputError, KvlensError

if TYPE_CHECKING:
    from kvlens.runtime.generate import Generated

MOST_BYTES = 2**26  # no model's context holds a longer text, and some files never end


def command(
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads it from stdin.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from this file.")
    ] = None,
    model: options.Model = "smollm2-135m",
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="A policy that `kvlens export` wrote (default: full cache)."),
    ] = None,
    budget_tokens: options.BudgetTokens = None,
    budget_bytes: options.BudgetBytes = None,
    keep_fraction: options.KeepFraction = None,
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Take a policy that was made for another architecture.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, metavar="N", help="The longest text to generate.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="T", help="0 takes the likeliest token at every step.")
    ] = 0.0,
    chat: options.Chat = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also write the report, as JSON.")
    ] = None,
    events: Annotated[
        Path | None, typer.Option("--events", metavar="FILE", help="Also write every eviction, as Parquet.")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    seed: options.Seed = 0,
    beyond_context: options.BeyondContext = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what --report and --events hold.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Let the model write after a prompt, its cache kept within a policy's budget; what leaves it frees its bytes."""
    text = _prompt(prompt, prompt_file)
    from kvlens.runtime.generate import generate
    from kvlens.runtime.generated_files import check_apart

    files = {"report": report, "events": events}
    if prompt_file is not None:
        check_apart({name: path for name, path in files.items() if path is not None}, prompt_file, "prompt file")
    say = Output(json, quiet)
    told = False

    def tell(piece: str) -> None:
        nonlocal told
        told = told or bool(piece)
        say.stream(piece)

    try:
        found = generate(
            text, model,
            policy=policy, budget_tokens=budget_tokens, budget_bytes=budget_bytes, keep_fraction=keep_fraction,
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chat=chat, allow_mismatch=allow_mismatch,
            beyond_context=beyond_context, report=report, events=events, force=force, device=device, dtype=dtype,
            attention=attention, tell=tell, note=say.note,
        )  # fmt: skip
    except (KvlensError, KeyboardInterrupt):
        say.stream("\n" if told else "")  # what is said of it stands on a line of its own
        raise
    if json or quiet:
        paths = [path for path in files.values() if path is not None]
        named = {f"{name}_file": path for name, path in files.items()}
        say.answer(found.document(kept=False) | named, text="", paths=paths)
        return
    say.stream("\n")
    say.note(_facts(found, report, events))


def _prompt(words: str | None, file: Path | None) -> str:
    """The prompt, from wherever it was said to come."""
    if (words is None) == (file is None):
        what = "no prompt was given" if words is None else "a prompt and --prompt-file were both given"
        raise InputError(what, "give a PROMPT, --prompt-file FILE, or - for stdin")
    if file is None and words != "-":
        return str(words)
    from kvlens.disk import as_path, disk

    if file is None:
        content, name = (b"" if sys.stdin is None else sys.stdin.buffer.read(MOST_BYTES + 1)), "stdin"
    else:
        with disk(f"reading '{file}'"), as_path(file, "prompt file").open("rb") as stream:
            content, name = stream.read(MOST_BYTES + 1), f"'{file}'"
    if len(content) > MOST_BYTES:
        raise InputError(f"the prompt in {name} has more than {MOST_BYTES:,} bytes", "give a shorter one")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"reading {name} failed: invalid UTF-8 at byte {error.start + 1}", "save the text as UTF-8"
        ) from error
    if not text:
        raise InputError(f"the prompt in {name} is empty", "give a prompt with text in it")
    return text


def _facts(found: Generated, report_file: Path | None, events_file: Path | None) -> str:
    from kvlens.cli.export import budget_words
    from kvlens.wording import duration

    model, report = found.settings["model"], found.report
    n_new = len(found.ids)
    facts = {
        "model": model["name"] + (f" ({model['note']})" if model["note"] else ""),
        "tokens": f"{found.n_prompt:,} of the prompt, {n_new:,} new"
        + (" (cut off at the longest text)" if found.hit_length_cap else ""),
        "time": f"{duration(found.seconds)}, {n_new / found.seconds:.1f} new tokens a second",
    }
    if found.policy is None or report is None:
        facts["policy"] = "none: every token is kept"
    else:
        facts |= {
            "policy": f"{found.policy.scorer.name}, {budget_words(found.policy.budget)}, {found.policy.trigger}",
            **report.facts(),
        }
    files = {"report": report_file, "events": events_file}
    return columns(facts | {name: str(path) for name, path in files.items() if path is not None})
