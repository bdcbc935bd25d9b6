"""Units against hand-cut texts and the laws they keep; where a model's answer is split off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, metaspace

from kvlens.errors import InputError
from kvlens.records import Tokens, Trace
from kvlens.segmenting import unit_numbers
from kvlens.texts import UNITS, split_reasoning, tokenize, units

TOKENIZERS = [byte_level(), byte_level(bos=False, trim_offsets=True), metaspace("first"), metaspace("normalizer")]


def texts_of(tokens: Tokens, ranges: list[tuple[int, int]]) -> list[str]:
    """The stripped text of each token range."""
    spans = tokens.char_spans
    return [tokens.text[spans[start, 0] : spans[stop - 1, 1]].strip() for start, stop in ranges]


def cut(text: str, unit: str, tokenizer: Any = TOKENIZERS[0]) -> list[str]:
    """The units of `text`, followed by a last context token that no unit may hold."""
    tokens = tokenize(Trace("t", prompt=text, reasoning="@", target="x"), tokenizer)
    return texts_of(tokens, units(tokens, unit))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    ("unit", "parts"),
    [
        ("sentence", ["One is 3.5 and 1,000.2.", "Two! ", "Three?"]),
        ("sentence", ['He said "no."', "She (too.)", "Wait... ", "Well"]),
        ("sentence", ["See e.g. Fig. 3 by Dr. Who vs. him.", "Done."]),
        ("sentence", ["1. First do this.", "\n2. Then that."]),
        ("sentence", ["no stop here", "\nnext line", "\n\nlast"]),
        ("sentence", ["The sum is $x = 4.$", "So $y$ is 4."]),
        ("sentence", ["first.", "\n\n\n   second."]),
        ("line", ["a = 1", "\n  b = 2. Still b", "\n\nc = 3\n"]),
        ("line", ["\n\nonly"]),
        ("step", ["Intro. More.\nSame step.", "\n\nNext paragraph", "\n \n\nThird"]),
        ("step", ["Plan:", "\nStep 1: add.\nstill one.", "\nstep 2 subtract", "\n**Step 3**", "\n## Step 4"]),
        ("clause", ["One, ", "two; ", "three: ", "four – ", "five — ", "six. ", "Seven"]),
        ("clause", ["It is 1,000:5 and a;b, ", "well-known–no, ", "a —b is one."]),
        ("clause", ["See e.g. this, ", "i.e. that; ", "and Fig. 3."]),
        ("clause", ["1. First,", "\nthen, ", "\n\nlast"]),
        ("clause", ["a,, ", "b,; ", "c"]),
        ("step", ["1. one", "\n2) two\n12.5 is no item", "\n3: three", "\n  4. four"]),
    ],
)
def test_hand_cut_texts(tokenizer: Any, unit: str, parts: list[str]) -> None:
    text = "".join(part if part.startswith("\n") or i == 0 else " " + part for i, part in enumerate(parts))
    assert cut(text, unit, tokenizer) == [part.strip() for part in parts]


def test_full_width_stops_end_a_sentence() -> None:
    assert cut("你好。再见！好", "sentence") == ["你好。", "再见！", "好"]


@pytest.mark.parametrize("unit", ["sentence", "clause", "step", "line"])
def test_a_piece_border_is_a_unit_border(unit: str) -> None:
    tokens = tokenize(Trace("t", prompt="Half of", reasoning=" a sentence", target=" x"), byte_level())
    assert texts_of(tokens, units(tokens, unit))[0] == "Half of"
    assert units(tokens, unit)[0] == (1, tokens.n_prompt)  # BOS belongs to none


def test_the_last_context_token_is_in_no_unit() -> None:
    tokens = tokenize(Trace("t", prompt="One. Two. ?!", target=" x", spans=((5, 12), (11, 12), (0, 4))), byte_level())
    for unit in UNITS:
        assert max(stop for _, stop in units(tokens, unit)) == tokens.n_context - 1
    assert units(tokens, "spans")[0][0] == 1


def test_spans_are_clipped_ordered_and_listed_once() -> None:
    prompt = "The red box is under the table"
    spans = ((24, 30), (4, 7), (4, 11), (3, 7), (30, 32))
    tokens = tokenize(Trace("t", prompt=prompt, target=" it is.", spans=spans), byte_level())
    assert len(tokens.spans) == len(spans)
    assert texts_of(tokens, units(tokens, "spans"))[:2] == ["red", "red box"]
    assert units(tokens, "spans") == sorted(set(units(tokens, "spans")))
    assert all(0 <= start < stop < tokens.n_context for start, stop in units(tokens, "spans"))
    bare = tokenize(Trace("t", prompt=prompt, target="x"), byte_level())
    assert units(bare, "spans") == []


def test_a_token_without_text_stays_in_the_unit_around_it() -> None:
    char_spans = np.array([[0, 2], [2, 3], [3, 4], [-1, -1], [4, 6], [6, 8]], dtype=np.int32)
    text = "A.\nB c.!"
    tokens = Tokens(Trace("t", text=text), np.arange(6), n_prompt=0, n_context=6, text=text, char_spans=char_spans)
    assert units(tokens, "sentence") == [(0, 2), (2, 5)]


def test_an_unknown_unit_lists_the_known_ones() -> None:
    tokens = tokenize(Trace("t", prompt="One. Two.", target="x"), byte_level())
    with pytest.raises(InputError, match="'word'") as caught:
        units(tokens, "word")
    assert "sentence" in caught.value.hint


PIECE = st.text(st.sampled_from("aB1.,:!?) \n"), max_size=16)


@pytest.mark.parametrize("unit", ["sentence", "clause", "step", "line"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(prompt=PIECE, reasoning=PIECE)
@example(prompt="", reasoning="")
@example(prompt="\n\n", reasoning=" \n")
def test_units_part_the_context(unit: str, tokenizer: Any, prompt: str, reasoning: str) -> None:
    trace = Trace("t", prompt="@#" + prompt, reasoning=reasoning, target="\nz")
    tokens = tokenize(trace, tokenizer)
    ranges = units(tokens, unit)
    n_bos = int(tokens.char_spans[0, 0] < 0)
    covered = [pos for start, stop in ranges for pos in range(start, stop)]
    assert covered == list(range(n_bos, tokens.n_context - 1))
    if reasoning.strip():
        assert not any(start < tokens.n_prompt < stop for start, stop in ranges)
    for text in texts_of(tokens, ranges):
        assert "\n" not in text or unit == "step"
        assert "\n\n" not in text


@given(prompt=PIECE, reasoning=PIECE)
def test_every_sentence_is_clauses(prompt: str, reasoning: str) -> None:
    tokens = tokenize(Trace("t", prompt="@#" + prompt, reasoning=reasoning, target="\nz"), byte_level())
    clauses, sentences = units(tokens, "clause"), units(tokens, "sentence")
    assert {start for start, _ in sentences} <= {start for start, _ in clauses}
    assert {stop for _, stop in sentences} <= {stop for _, stop in clauses}


# The number of each position's unit


def test_unit_numbers_by_hand() -> None:
    """BOS is in none, so it is one; the last token joins the last unit."""
    text = "A b, c. D"
    char_spans = np.array([[-1, -1], [0, 1], [1, 3], [3, 4], [4, 6], [6, 7], [7, 9], [9, 9]], dtype=np.int32)
    tokens = Tokens(Trace("t", text=text), np.arange(8), n_prompt=0, n_context=7, text=text, char_spans=char_spans)
    assert units(tokens, "clause") == [(1, 4), (4, 6)]
    assert unit_numbers(tokens, "clause").tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert unit_numbers(tokens, "sentence").tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert unit_numbers(tokens, "clause").dtype == np.int64


def test_a_text_without_a_unit_is_one() -> None:
    tokens = tokenize(Trace("t", prompt="a", target="x"), byte_level())
    assert units(tokens, "sentence") == []
    assert unit_numbers(tokens, "sentence").tolist() == [0, 0]


@pytest.mark.parametrize("unit", ["sentence", "clause", "step", "line"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(prompt=PIECE, reasoning=PIECE)
@example(prompt="", reasoning="")
@example(prompt="\n\n", reasoning=" \n")
def test_every_position_has_the_number_of_its_unit(unit: str, tokenizer: Any, prompt: str, reasoning: str) -> None:
    tokens = tokenize(Trace("t", prompt="@#" + prompt, reasoning=reasoning, target="\nz"), tokenizer)
    numbers = unit_numbers(tokens, unit).tolist()
    ranges = units(tokens, unit)
    assert len(numbers) == tokens.n_context
    assert set(np.diff(numbers).tolist()) <= {0, 1}  # ascending, none left out
    wanted: list[int | None] = [None] * tokens.n_context
    for number, (start, stop) in enumerate(ranges, 1):
        wanted[start:stop] = [number] * (stop - start)
    n_before = ranges[0][0]
    assert numbers[:n_before] == [0] * n_before
    assert numbers[n_before:-1] == wanted[n_before:-1]
    assert numbers[-1] == len(ranges)


# Splitting


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("<think>a\nb</think>\n\nThe end.", "The end."),
        ("x</think> y </think> z", " z"),
        (r"I think. So 7. Then \boxed{3.5} it is. Bye.", r" Then \boxed{3.5} it is. Bye."),
        ("First.\nThe answer is 4. Yes, the answer is 5.\n", " Yes, the answer is 5.\n"),
        ("Long.\n#### 72", "#### 72"),
        (r"The answer is \boxed{1}. No answer is better.", r"The answer is \boxed{1}. No answer is better."),
        ("thinking </think> \n", None),
        ("w" * 5, "w" * 5),
    ],
)
def test_split_reasoning(text: str, target: str | None) -> None:
    reasoning, found = split_reasoning(text, byte_level())
    assert reasoning + found == text
    assert target is None or found == target


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_without_an_answer_the_last_tokens_are_the_target(tokenizer: Any) -> None:
    text = "The red box is under the table. Where is it? Under the table, as far as we know\n"
    reasoning, target = split_reasoning(text, tokenizer, tokens_from_end=6)
    assert reasoning + target == text
    tokens = tokenize(Trace("t", text=text), tokenizer, target_tokens=6)
    assert target == text[tokens.char_spans[tokens.n_context, 0] :]
    assert split_reasoning(text, tokenizer, tokens_from_end=500) == ("", text)


@given(st.text(max_size=60), st.sampled_from(["</think>", r"\boxed{1}", "answer is ", "\n"]), st.integers(1, 9))
def test_a_split_loses_nothing_and_leaves_a_target(text: str, mark: str, n: int) -> None:
    whole = text + mark + text
    if not whole.strip():
        return
    reasoning, target = split_reasoning(whole, byte_level(trim_offsets=True), tokens_from_end=n)
    assert reasoning + target == whole
    assert target


def test_an_empty_output_has_nothing_to_split() -> None:
    with pytest.raises(InputError, match="it is empty"):
        split_reasoning(" \n", byte_level())
