r"""What does the model answer when a span of its cache is hidden? Greedy continuations, and which answers flip.

1. recompute the context of every counterfactual from its first changed position to the last context token, over the
   shared prefix and keeping each row's own keys and values; the recorded target plays no part;
2. take the likeliest token of every row, then one token at a time for all rows at once under the same attention; rows
   that have ended leave the batch;
3. a row ends at a stop token, at the length limit, or where its first answer is complete (`answer_end`);
4. an answer that is changed or missing is a flip (`grading.is_flip`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.grading import boxed, final_answer, is_flip
from kvlens.probe.occlusion import Counterfactual, Occluder, forward_rows

MAX_NEW_TOKENS = 512  # EpiKV's limit
BATCH_TOKENS = 8192  # keys and values of so many tokens, over all rows, are held at once

_MAY_END = re.compile(r"\}|[.!?](?=\s)|\n")


@torch.inference_mode()
def greedy(
    occluder: Occluder,
    batch: Sequence[Counterfactual],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop_ids: Collection[int] | None = None,
    done: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """The ids that each counterfactual continues its context with, without the stop token; ties go to the lowest id.

    Args:
        max_new_tokens: lowered to what the model's trained context has room for.
        stop_ids: default: the model's own.
        done: told a row's ids after each token; the row ends where it answers True.

    Raises: ModelRefused for logits that are not finite.
    Cost: the counterfactuals' context tokens and a forward pass of at most one token a row for each new token.
    Memory: the rows' own keys and values; the prefix is not copied.
    """
    model, n_context = occluder.model, occluder.tokens.n_context
    stops = models.stop_ids(model) if stop_ids is None else stop_ids
    if n_context < model.max_context:
        max_new_tokens = min(max_new_tokens, model.max_context - n_context)
    first = min(occluder.last, *(c.first for c in batch))
    attention = occluder.attention(batch, first, n_room=max_new_tokens, keep=True)
    states = forward_rows(model, occluder.row_ids(batch)[:, first:n_context], first, attention)
    written: list[list[int]] = [[] for _ in batch]
    running = list(range(len(batch)))
    for step in range(max_new_tokens):
        chosen = _likeliest(models.unembed(model, states[:, -1])).tolist()
        going = []  # indices into `running` of the rows that go on
        for index, (row, token) in enumerate(zip(running, chosen, strict=True)):
            if token not in stops:
                written[row].append(token)
                if done is None or not done(written[row]):
                    going.append(index)
        if not going or step == max_new_tokens - 1:
            break
        if len(going) < len(running):
            attention.keep_rows(torch.tensor(going, device=occluder.ids.device))
            running = [running[index] for index in going]
        ids = torch.tensor([written[row][-1:] for row in running], device=occluder.ids.device)
        states = forward_rows(model, ids, n_context + step, attention)
    return written


def _likeliest(logits: Tensor) -> Tensor:
    """The lowest id among the likeliest ones of each row."""
    if not bool(torch.isfinite(logits).all()):
        raise ModelRefused(
            f"{logits.shape[0]} rows of logits hold NaN or infinity", "check the model's weights and dtype"
        )
    return logits.argmax(-1)


def flips(
    occluder: Occluder,
    batch: Sequence[Counterfactual],
    full_answer: str,
    kind: str | None = None,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[bool]:
    """Whether each counterfactual's answer is changed or missing, compared with `full_answer`.

    `full_answer` is the text that the full cache continues with. Both are read up to their first complete answer; where
    `full_answer` states none in a form that `grading.final_answer` knows, as many characters as it has are compared.

    Args:
        kind: a grader; default `math`, or `exact` where `full_answer` states no answer.

    Cost: as `greedy`, in batches of at most `BATCH_TOKENS` tokens.
    Source: EpiKV's label, for windows under `substitute`.
    """
    stated = final_answer(full_answer) is not None
    end = _end_rule(full_answer)
    before = full_answer[: end(full_answer)]
    longest = occluder.tokens.n_context - min(c.first for c in batch) + max_new_tokens
    step = max(1, BATCH_TOKENS // longest)
    flipped = []
    for start in range(0, len(batch), step):
        for after in _texts(occluder, batch[start : start + step], end, max_new_tokens):
            flipped.append(is_flip(kind or ("math" if stated else "exact"), before, after))
    return flipped


def full_answer(occluder: Occluder, *, max_new_tokens: int = MAX_NEW_TOKENS) -> str:
    """What the full cache continues the context with, as far as `flips` needs it.

    That is up to its first complete answer in the form that the recorded target has one (in a box or not), or as many
    characters as the target has where it states none.
    """
    tokens = occluder.tokens
    target = _tokenizer(occluder).decode(tokens.ids[tokens.n_context :].tolist())
    nothing = Counterfactual(occluder.last, occluder.last)
    (text,) = _texts(occluder, [nothing], _end_rule(target), max_new_tokens)
    return text


def compared(occluder: Occluder, answer: str) -> str:
    """What `flips` can compare with the full cache's answer: `answers`, `texts` (it states none) or `nothing`.

    Nothing where the recorded target states an answer and `answer` does not: then nothing could flip.
    """
    if final_answer(answer) is not None:
        return "answers"
    tokens = occluder.tokens
    target = _tokenizer(occluder).decode(tokens.ids[tokens.n_context :].tolist())
    return "texts" if final_answer(target) is None else "nothing"


def _texts(
    occluder: Occluder, batch: Sequence[Counterfactual], end: Callable[[str], int | None], max_new_tokens: int
) -> list[str]:
    """The continuations of a batch, each up to its `end`."""
    tokenizer = _tokenizer(occluder)

    def done(ids: list[int]) -> bool:
        return end(tokenizer.decode(ids)) is not None

    texts = [tokenizer.decode(ids) for ids in greedy(occluder, batch, max_new_tokens=max_new_tokens, done=done)]
    return [text[: end(text)] for text in texts]


def _tokenizer(occluder: Occluder) -> Any:
    if occluder.model.tokenizer is None:
        raise InputError(f"{occluder.model.name} has no tokenizer to read answers with", "load it with its tokenizer")
    return occluder.model.tokenizer


def _end_rule(like: str) -> Callable[[str], int | None]:
    """Where a continuation that is to be compared with `like` ends."""
    if final_answer(like) is None:
        return partial(as_long, other=like)
    return partial(answer_end, in_box=bool(boxed(like)))


def answer_end(text: str, in_box: bool) -> int | None:
    r"""The character at which the first complete answer of `text` ends; None where there is none yet.

    That is the brace that closes the first `\boxed{...}` with something in it. Unless the answer has to be `in_box`,
    also the end of the first sentence or line by which `grading.final_answer` knows an answer; a full stop counts once
    white space follows, since `3.` may become `3.5`.
    """
    if boxed(text) is None and (in_box or final_answer(text) is None):
        return None
    for match in _MAY_END.finditer(text):
        head = text[: match.end()]
        if boxed(head) or (not in_box and match[0] != "}" and final_answer(head) is not None):
            return match.end()
    return None


def as_long(text: str, other: str) -> int | None:
    """The length of `other` once `text` has it."""
    return max(1, len(other)) if len(text) >= max(1, len(other)) else None
