"""What does a model write under a policy, and what does its cache hold meanwhile?

1. The prompt becomes tokens: the text as it is, or (chat) as a user turn of the model's own template.
2. The policy is read, its budget replaced where another one is given, and checked against the model.
3. The model generates under it (apply.py), greedy or sampled; every piece of text is told as soon as it is certain.
4. The report and the events go to files where asked, which is settled before the model begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from kvlens import model as models
from kvlens.causal_lm import Model
from kvlens.errors import InputError
from kvlens.policy import Policy
from kvlens.policy_file import PolicyFile, read_policy
from kvlens.provenance import plain, versions
from kvlens.runtime import budget
from kvlens.runtime.apply import Run, apply
from kvlens.runtime.generated_files import SCHEMA, files_of, write
from kvlens.runtime.report import Report
from kvlens.runtime.speaker import Speaker
from kvlens.tokenising import prompt_ids

COLDEST, HOTTEST = 1e-3, 1e3  # beyond, logits overflow or all tokens are alike


@dataclass(frozen=True, eq=False)
class Generated:
    """A text that a model wrote, and how.

    `report` and `events` are None without a policy; `events` also where no file of them was asked for.
    """

    text: str
    ids: list[int]
    n_prompt: int
    hit_length_cap: bool
    seconds: float
    settings: dict[str, Any]
    policy: Policy | None = None
    report: Report | None = None
    events: pd.DataFrame | None = None

    def document(self, *, kept: bool = True) -> dict[str, Any]:
        """All but the events, as JSON has it; without `kept`, the positions still held are left out."""
        report = None if self.report is None else asdict(self.report)
        if report is not None and not kept:
            del report["kept"]
        policy = None if self.policy is None else self.policy.model_dump(mode="json", by_alias=True)
        said = {name: getattr(self, name) for name in ("text", "ids", "n_prompt", "hit_length_cap", "seconds")}
        facts = {"n_generated": len(self.ids), **self.settings, "policy": policy, "report": report}
        return dict(plain({"schema": SCHEMA} | said | facts))


def generate(
    prompt: str,
    model: str | Path | Model = models.DEFAULT_MODEL,
    *,
    policy: Policy | str | Path | None = None,
    budget_tokens: int | None = None,
    budget_bytes: int | None = None,
    keep_fraction: float | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    allow_mismatch: bool = False,
    beyond_context: bool = False,
    report: str | Path | None = None,
    events: str | Path | None = None,
    force: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    tell: Callable[[str], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Generated:
    """What the model writes after the prompt.

    Args:
        policy: a policy or the path of a policy file; None keeps every token.
        budget_tokens, budget_bytes, keep_fraction: one of them instead of the policy's budget.
        temperature: 0 takes the likeliest token at every step.
        chat: the prompt is a user turn of the model's chat template.
        allow_mismatch: take a policy that was made for another architecture.
        beyond_context: allow a text longer than the model was trained for.
        report, events: files to write, JSON and Parquet; `force` replaces what is no such file.
        tell: called with every piece of the text; note: with a line that people should read.

    Raises: InputError for a prompt, policy or file that cannot be used; EnvironmentLacks, ModelRefused.
    Cost: a prefill, a forward pass a token, and what the policy's scorer takes.
    """
    _check(prompt, max_new_tokens, temperature, seed)
    files = files_of(report, events, policy, force)
    chosen = _with_budget(policy, budget_tokens, budget_bytes, keep_fraction)
    loaded = models.as_model(model, device=device, dtype=dtype, attention=attention)
    ids = prompt_ids(prompt, loaded.tokenizer, chat=chat)
    models.check_ids(loaded, ids)
    room = _room(loaded, len(ids), max_new_tokens, beyond_context)
    say = note or _ignore
    if room < max_new_tokens:
        say(f"at most {room:,} new tokens: then the model's context of {loaded.max_context:,} is full")
    _say_whose(chosen, loaded, say)
    speaker = Speaker(loaded, ids, tell or _ignore)
    applied = (
        nullcontext()
        if chosen is None
        else apply(chosen, loaded, record="events" in files, allow_mismatch=allow_mismatch)
    )
    started = perf_counter()
    with applied as run:
        if run is not None:
            _check_budget(run, len(ids), room, say)
        new = models.generate(loaded, ids, max_new_tokens=room, temperature=temperature, seed=seed, streamer=speaker)
    seconds = perf_counter() - started
    settings = _facts(loaded, prompt, chat) | {
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "seed": seed,
        "chat": bool(chat),
        "beyond_context": bool(beyond_context),
    }
    found = Generated(
        speaker.text_of(new), new, len(ids), len(new) == room, seconds, settings, chosen, *_told(run, files)
    )
    write(found, files)
    return found


def _facts(model: Model, prompt: str, chat: bool) -> dict[str, Any]:
    """What a text's settings say of the model, the versions and what was read."""
    return {
        "model": {"name": model.name, "fingerprint": model.fingerprint, "note": model.note},
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.attention,
        "versions": versions(),
        "prompt_sha256": _sha256(prompt),
        "template_sha256": _sha256(model.tokenizer.chat_template) if chat else None,
    }


def _sha256(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def _ignore(_: str) -> None:
    """Nobody listens."""


def _say_whose(policy: Policy | None, model: Model, say: Callable[[str], None]) -> None:
    """Say where a policy file was made for another model of the same architecture."""
    made_for = policy.model if isinstance(policy, PolicyFile) else None
    if made_for is not None and made_for.fingerprint not in (None, model.fingerprint):
        say(f"the policy was made for another model, of fingerprint {made_for.fingerprint}")


def _check_budget(run: Run, n_prompt: int, room: int, say: Callable[[str], None]) -> None:
    """Raise where a protected prompt will not fit; say where a share of the prompt is less than what is protected."""
    rows, share = torch.tensor([n_prompt]), run.policy.budget.keep_fraction
    budget.check_prompt(run.policy, run.tokens, rows, run.layers, room)
    if share is None:
        return
    asked, held = budget.fraction_tokens(share, n_prompt), int(budget.nominal(run.policy, None, rows, run.layers))
    if held > asked:
        say(f"{share:g} of {n_prompt:,} tokens are {asked:,}, fewer than the {held:,} that are protected: those stay")


def _told(run: Run | None, files: dict[str, Path]) -> tuple[Report | None, pd.DataFrame | None]:
    if run is None:
        return None, None
    return run.report(), run.events() if "events" in files else None


# What cannot work, before anything is loaded


def _check(prompt: object, max_new_tokens: object, temperature: Any, seed: Any) -> None:
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f"prompt {prompt!r:.80} is no text", "give a prompt with text in it")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise InputError("the prompt is no valid UTF-8", "save the text as UTF-8")
    count = type(max_new_tokens) is int and max_new_tokens >= 1
    warm = type(temperature) in (int, float) and (temperature == 0 or COLDEST <= temperature <= HOTTEST)
    if not (count and warm):
        raise InputError(
            f"cannot generate {max_new_tokens!r:.80} tokens at temperature {temperature!r:.80}",
            f"give at least 1 token and a temperature of 0, or from {COLDEST:g} to {HOTTEST:g}",
        )
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise InputError(f"seed {seed!r:.80} is no whole number of 0 or more", "give one below 2^63")


def _with_budget(
    policy: Policy | str | Path | None, tokens: int | None, n_bytes: int | None, fraction: float | None
) -> Policy | None:
    """2. without the model."""
    given = {"tokens": tokens, "bytes": n_bytes, "keep_fraction": fraction}
    given = {name: value for name, value in given.items() if value is not None}
    if policy is None:
        if given:
            raise InputError("a budget says nothing without a policy", "add --policy FILE, written by `kvlens export`")
        return None
    chosen = policy if isinstance(policy, Policy) else read_policy(policy)
    if not given:
        return chosen
    if chosen.allocate.table is not None:
        raise InputError(
            "this policy says how many tokens each head keeps, so no single budget can replace its own",
            "leave the budget out, or export a policy without allocate.table",
        )
    return type(chosen)(**chosen.model_dump(mode="json", by_alias=True) | {"budget": given})


def _room(model: Model, n_prompt: int, max_new_tokens: int, beyond_context: bool) -> int:
    """How many new tokens fit."""
    most = models.learned_positions(model) if beyond_context else model.max_context
    if most is None:
        return max_new_tokens
    if n_prompt >= most:
        hint = "shorten it" if beyond_context else "shorten it, or use --beyond-context"
        raise InputError(f"the prompt of {n_prompt:,} tokens fills the model's context of {most:,}", hint)
    return min(max_new_tokens, most - n_prompt)
