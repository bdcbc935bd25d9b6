"""What does a model itself write to a prompt, and is it right? Graded traces, one line each, from prompts.

1. read the prompts and load the model; look at what the file already holds: lines of the same configuration are kept,
   a last line that a kill cut off is removed, anything else is refused;
2. for each prompt without a line: generate with a seed made of (run seed, id), so that no trace depends on another;
3. split the text into reasoning and target, check that it can be labelled, grade the target;
4. append the line in one write that has reached the disk before the next prompt begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.linefile import LineFile
from kvlens.model import Model
from kvlens.records import Trace
from kvlens.texts import read_prompts, read_traces

DEFAULT_MAX_NEW_TOKENS = 512


def traces(
    prompts: str | Path | Sequence[Trace],
    model: str | Model = models.DEFAULT_MODEL,
    out: str | Path = "traces.jsonl",
    *,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    temperature: float = 0.0,
    chat: bool = False,
    grade: str = "math",
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    seed: int = 0,
    limit: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    on_skip: Callable[[str, str], None] | None = None,
) -> list[Trace]:
    """The model's own traces, in the order of the prompts, which `out` (.jsonl) then holds, one a line.

    A trace's `meta` has the prompt's own, `correct` and `score` (null without an answer to grade against), `made_by`
    (the settings and the model's fingerprint), `model`, `versions`, `prompt_seed`, `n_generated` and `hit_length_cap`.

    Args:
        prompts: what `read_prompts` takes, or prompts at hand.
        model: what `-m` takes, or a loaded `Model` (then device, dtype and attention are its own).
        temperature: 0 takes the likeliest token at every step.
        chat: render the prompt with the model's chat template; label such traces with `chat` as well.
        grade: the grader of `kvlens.grading` that compares target and answer.
        force: replace traces of another configuration in `out`.
        progress: called with (prompts done, prompts in all); on_skip: with (id, reason) for a prompt without a trace.

    Raises: InputError, EnvironmentLacks, ModelRefused; finished lines stay, and the same call continues after them.
    Cost: a prefill a prompt and a forward pass a token, one prompt at a time.
    """
    asked = read_prompts(prompts, limit=limit) if isinstance(prompts, (str, Path)) else list(prompts)[:limit]
    path = Path(out)
    _check(asked, path, max_new_tokens, temperature, grade)
    loaded = model if isinstance(model, Model) else models.load(model, device=device, dtype=dtype, attention=attention)
    settings = {
        "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "chat": chat,
        "grade": grade,
    }
    writer = Writer(loaded, settings)
    with LineFile(path) as lines:
        finished = _finished(lines, asked, settings, force)
        for number, prompt in enumerate(asked):
            if progress:
                progress(number, len(asked))
            if prompt.id not in finished:
                made = writer.trace(prompt)
                if isinstance(made, str):
                    if on_skip:
                        on_skip(prompt.id, made)
                else:
                    lines.append(json.dumps(_row(made), ensure_ascii=False))
        if progress:
            progress(len(asked), len(asked))
        empty = lines.empty
    if empty:
        raise InputError(f"none of the {len(asked)} prompts gave a trace", "see the reasons, or use another model")
    return read_traces(path)
