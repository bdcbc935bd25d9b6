r"""Is an answer right? One number in [0, 1] for an output and the accepted answers, and whether an answer flipped.

1. `final_answer` finds what an output answers: the last complete `\boxed{...}`, else what follows the last marker
   (`####`, `answer is`, `Answer:`) up to the end of its sentence.
2. `GRADERS` holds one function a kind, each (output, one accepted answer) -> [0, 1].
3. `grade` takes the best over the accepted answers.
4. `is_flip` reads both answers and compares them by the same grader.

Math equivalence is decided by the math-verify package in a child process with a time limit (`math_worker.py`):
expressions such as 9^{9^{9^9}} keep a computer algebra system busy in a way that no signal interrupts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvlens.errors import InputError
from kvlens.math_worker import equivalent

_MARKER = re.compile(r"####(?=\s*[-$\d\\.(])|\banswer\b[*_\s]*(?:is\b|:|=)[:*_\s]*", re.IGNORECASE)
_ANSWER_END = re.compile(r"[.!?](?=\s|$)|\n")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_OPTION = r"[\W_]*(?:(?i:option|choice)\s+)?"
_LETTER_ALONE = re.compile(
    _OPTION + r"(?:\(([A-Ja-j])\)|([A-J])(?=[\W_]*$|[.):](?:\W|$)|\s+[-\u2013]|\*)|([a-j])(?=[\W_]*$|[.)](?:\W|$)))"
)
_LETTER_FIRST = re.compile(_OPTION + r"([A-J])(?![\w'\u2019])")
_LETTER_NAMED = re.compile(r"(?<!\w)\(([A-J])\)|\b(?i:option|choice)\s+([A-J])(?![\w'\u2019])")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")

# 1. What an output answers


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces close; escaped braces do not count."""
    answer = None
    for match in _BOX.finditer(text):
        content = _braced(text, match.end())
        answer = answer if content is None else content
    return answer


def _braced(text: str, start: int) -> str | None:
    """The text from `start` up to the brace that closes the one before `start`."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()].strip()
    return None


def answer_start(text: str) -> int | None:
    """The character at which the last boxed answer, else the last answer marker, starts; None without either."""
    starts = [match.start() for match in _BOX.finditer(text) if _braced(text, match.end()) is not None]
    starts = starts or [match.start() for match in _MARKER.finditer(text)]
    return starts[-1] if starts else None


def final_answer(text: str) -> str | None:
    """What `text` answers; None where it states no answer in a form that `answer_start` knows."""
    answer = boxed(text)
    if answer is None:
        for match in _MARKER.finditer(text):
            rest = text[match.end() :].lstrip()
            end = _ANSWER_END.search(rest)
            answer = (rest[: end.start()] if end else rest).strip(" \t*$:") or answer
    return answer or None


# 2. Graders


def exact(output: str, answer: str) -> float:
    """1 where both are the same text, white space collapsed, case kept."""
    return float(output.split() == answer.split())


def contains(output: str, answer: str) -> float:
    """1 where the answer stands in the output as whole words, whatever the case: 5 is not in 15, -5, 5.2 or 1,500."""
    words = r"\s+".join(map(re.escape, answer.casefold().split()))
    before = r"(?<!\w)(?<!\d[.,])" + (r"(?<![-\u2212])" if answer.strip()[:1].isdigit() else "")
    return float(bool(re.search(rf"{before}{words}(?!\w|[.,]\d)", output.casefold()))) if words else 0.0


def normalised(text: str) -> str:
    """`text` in lower case without ASCII punctuation, English articles and extra white space, as SQuAD scores it."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", text).split())


def token_f1(output: str, answer: str) -> float:
    """The F1 of the words that output and answer share, counted with repeats; normalised as SQuAD does.

    Source: Rajpurkar et al. 2016.
    """
    found, wanted = normalised(output).split(), normalised(answer).split()
    return _f1((Counter(found) & Counter(wanted)).total(), found, wanted)


def rouge_l(output: str, answer: str) -> float:
    """The F1 of the longest common subsequence of words, in lower case without punctuation.

    Source: Lin 2004, with precision and recall weighted alike.
    """
    found, wanted = re.findall(r"\w+", output.casefold()), re.findall(r"\w+", answer.casefold())
    lengths = [0] * (len(wanted) + 1)
    for word in found:
        diagonal = 0
        for i, other in enumerate(wanted, start=1):
            diagonal, lengths[i] = lengths[i], diagonal + 1 if word == other else max(lengths[i], lengths[i - 1])
    return _f1(lengths[-1], found, wanted)


def _f1(n_shared: int, found: Sequence[str], wanted: Sequence[str]) -> float:
    """2 x shared / (found + wanted): harmonic mean of precision and recall; two empty texts are equal."""
    return 2 * n_shared / (len(found) + len(wanted)) if found or wanted else 1.0


def math_equal(output: str, answer: str) -> float:
    """1 where the output's final answer equals the answer mathematically; without one math-verify looks for it.

    Raises:
        EnvironmentLacks: the math-verify package is missing or does not start.
    Cost: a second for a process's first call, then milliseconds; 5 seconds, and 0, for what takes longer than that.
    """
    found, wanted = final_answer(output), (final_answer(answer) or answer).strip("$ \n")
    if found is not None and found.strip("$ ") == wanted:
        return 1.0
    return float(equivalent(output if found is None else f"\\boxed{{{found.strip('$ ')}}}", f"\\boxed{{{wanted}}}"))


def choice(output: str, answer: str) -> float:
    """1 where the output chooses the option that `answer` names: `B`, `(B)`, `B. Paris`, or an option's text alone."""
    chosen, wanted = chosen_letter(output), chosen_letter(answer)
    if wanted is None:
        return contains(final_answer(output) or output, answer)
    if chosen is None:
        option = re.sub(r"^\W*\w\W*", "", answer)
        return contains(final_answer(output) or output, option)
    return float(chosen == wanted)


def chosen_letter(text: str) -> str | None:
    """The option letter, A to J, that a text chooses: in its final answer, at its start, or elsewhere."""
    answer = _LATEX_TEXT.sub(r"\1", final_answer(text) or "")
    match = _LETTER_ALONE.match(answer) or _LETTER_FIRST.match(answer) or _LETTER_ALONE.match(text)
    if match:
        return next(letter for letter in match.groups() if letter).upper()
    named = _LETTER_NAMED.findall(text)
    return max(named[-1]) if named else None


GRADERS: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "contains": contains,
    "token_f1": token_f1,
    "rouge_l": rouge_l,
    "math": math_equal,
    "choice": choice,
}


# 3. and 4.


def grade(kind: str, output: str, answers: str | Sequence[str]) -> float:
    """How right `output` is by the grader `kind`, in [0, 1]: the best over the accepted answers."""
    if kind not in GRADERS:
        raise InputError(f"cannot grade by {kind!r}: no such grader", f"use one of {', '.join(GRADERS)}")
    accepted = [answers] if isinstance(answers, str) else list(answers)
    if not accepted:
        raise InputError(f"cannot grade by {kind!r}: there is no accepted answer", "give the trace an `answer`")
    return max(GRADERS[kind](output, answer) for answer in accepted)


def is_flip(kind: str, full_output: str, occluded_output: str) -> bool:
    """Whether the answer of the full run is changed or missing in the occluded one, compared by the grader `kind`.

    An output's answer is its final answer (`choice`: its letter); for the kinds other than `math` and `choice` a text
    without one is its own answer. Where the full output has no answer, any answer at all is a change.
    """
    before, after = _answer_of(kind, full_output), _answer_of(kind, occluded_output)
    if before is None or after is None:
        return before is not after
    return grade(kind, after, before) < 1.0


def _answer_of(kind: str, output: str) -> str | None:
    """What `is_flip` compares."""
    if kind == "choice":
        return chosen_letter(output)
    answer = final_answer(output)
    return answer if answer is not None or kind == "math" else output.strip() or None
