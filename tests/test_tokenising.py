"""Tokenising against plain references, over byte-level and metaspace tokenizers, with and without BOS and chat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizers import METASPACE_KINDS, byte_level, metaspace

from kvlens.errors import InputError
from kvlens.records import Tokens, Trace
from kvlens.texts import token_ranges, tokenize

BYTE_LEVEL = [
    byte_level(bos=bos, trim_offsets=trim, digits=digits)
    for bos, trim, digits in [(True, False, True), (False, False, False), (True, True, True)]
]
METASPACE = [metaspace(kind, bos=bos) for kind in METASPACE_KINDS for bos in (True, False)]
ALL = BYTE_LEVEL + METASPACE
TRACE = Trace("t", prompt="Let a = 17.", reasoning="Then b is 41.", target="the answer is 41")
WRITABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=24)


def pieces_of(tokens: Tokens) -> list[np.ndarray]:
    return np.split(tokens.ids, [tokens.n_prompt, tokens.n_context])


def covered(tokens: Tokens) -> list[str]:
    """The text of every token, by its characters."""
    return [tokens.text[start:end] if start >= 0 else "" for start, end in tokens.char_spans]


def without_bos(tokens: Tokens, tokenizer: Any) -> list[int]:
    return [int(i) for i in tokens.ids if i != tokenizer.bos_token_id]


@pytest.mark.parametrize("tokenizer", ALL)
def test_pieces_and_characters_line_up(tokenizer: Any) -> None:
    tokens = tokenize(TRACE, tokenizer)
    assert tokens.text == TRACE.prompt + TRACE.reasoning + TRACE.target
    assert "".join(covered(tokens)) == tokens.text
    texts = ["".join(part) for part in np.split(np.array(covered(tokens)), [tokens.n_prompt, tokens.n_context])]
    assert texts == [TRACE.prompt, TRACE.reasoning, TRACE.target]
    assert tokens.ids.dtype == np.int64
    assert tokens.char_spans.shape == (tokens.n_tokens, 2)
    assert [tokens.segment(pos) for pos in (0, tokens.n_prompt, tokens.n_context)] == ["prompt", "reasoning", "target"]


@pytest.mark.parametrize("tokenizer", METASPACE)
def test_later_pieces_get_no_dummy_prefix(tokenizer: Any) -> None:
    tokens = tokenize(TRACE, tokenizer)
    assert "".join(tokenizer.convert_ids_to_tokens(without_bos(tokens, tokenizer))) == "▁" + tokens.text.replace(
        " ", "▁"
    )
    # Reference: behind a line break that stays a token of its own, a text is in the middle of another one.
    (line_break,) = tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
    for piece, ids in zip((TRACE.reasoning, TRACE.target), pieces_of(tokens)[1:], strict=True):
        anchored = tokenizer("\n" + piece, add_special_tokens=False)["input_ids"]
        assert anchored[-len(ids) - 1 :] == [line_break, *ids]


@pytest.mark.parametrize("tokenizer", METASPACE)
@given(prompt=WRITABLE, reasoning=WRITABLE, target=WRITABLE.filter(bool))
@example(prompt="", reasoning=" a b", target="c")
@example(prompt=" a", reasoning="\nb", target=" ")
def test_metaspace_tokens_spell_the_text(tokenizer: Any, prompt: str, reasoning: str, target: str) -> None:
    trace = Trace("t", prompt="@#" + prompt, reasoning=reasoning, target=target)
    tokens = tokenize(trace, tokenizer)
    spelled = "".join(tokenizer.convert_ids_to_tokens(without_bos(tokens, tokenizer)))
    assert spelled == "▁" + tokens.text.replace(" ", "▁")


@pytest.mark.parametrize("tokenizer", BYTE_LEVEL)
@given(prompt=st.text(max_size=12), reasoning=st.text(max_size=12), target=st.text(min_size=1, max_size=12))
@example(prompt="", reasoning="é 漢字 \U0001f600", target="  ")
def test_byte_level_tokens_spell_the_text(tokenizer: Any, prompt: str, reasoning: str, target: str) -> None:
    if "<s>" in prompt + reasoning + target:
        return
    tokens = tokenize(Trace("t", prompt="@#" + prompt, reasoning=reasoning, target=target), tokenizer)
    parts = [tokenizer.decode([int(i) for i in ids], skip_special_tokens=True) for ids in pieces_of(tokens)]
    assert parts == ["@#" + prompt, reasoning, target]
    seen = {char for start, end in tokens.char_spans for char in range(start, end)}
    assert seen == set(range(len(tokens.text)))
    spans = tokens.char_spans[tokens.char_spans[:, 0] >= 0]
    assert (spans[:, 0] < spans[:, 1]).all()
    assert (np.diff(spans[:, 0]) >= 0).all()


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace("always")])
def test_bos_is_there_once(tokenizer: Any) -> None:
    bos = tokenizer.bos_token_id
    plain = tokenize(TRACE, tokenizer)
    assert (plain.ids == bos).sum() == 1
    assert plain.ids[0] == bos
    assert plain.char_spans[0].tolist() == [-1, -1]
    written = tokenize(Trace("t", prompt="<s>" + TRACE.prompt, target="x"), tokenizer)
    assert (written.ids == bos).sum() == 1
    assert covered(written)[0] == "<s>"


def test_a_tokenizer_that_adds_no_bos_gets_none() -> None:
    tokens = tokenize(TRACE, byte_level(bos=False))
    assert tokens.ids[0] != byte_level(bos=False).bos_token_id
    assert tokens.char_spans[0, 0] == 0


def test_truncation_and_padding_left_on_do_not_cut_a_trace() -> None:
    tokenizer = metaspace.__wrapped__("first")
    tokenizer.pad_token = "<unk>"
    long = Trace("t", prompt="word " * 50, reasoning="word " * 50, target="word " * 50)
    expected = tokenize(long, metaspace("first")).ids
    tokenizer(["a", "b c"], truncation=True, max_length=3, padding="max_length")
    assert (tokenize(long, tokenizer).ids == expected).all()


# Whole texts


@pytest.mark.parametrize("tokenizer", ALL)
def test_the_target_of_a_text_is_its_last_tokens(tokenizer: Any) -> None:
    text = "Let a = 17 and b = a + 24. Then b is 41."
    tokens = tokenize(Trace("t", text=text), tokenizer, target_tokens=5)
    n_bos = int(tokens.ids[0] == tokenizer.bos_token_id)
    assert tokens.ids.tolist() == tokenizer(text)["input_ids"]
    assert (tokens.n_prompt, tokens.n_target) == (n_bos, 5)
    assert tokens.text == text
    assert tokens.segment(n_bos) == "reasoning"


@pytest.mark.parametrize(
    ("n", "reason"), [(0, "target has 0 tokens"), (-1, "target has -1"), (8, "at least 2"), (9, "leave 0 before")]
)
def test_targets_that_do_not_fit_a_text(n: int, reason: str) -> None:
    tokenizer = byte_level(bos=False, digits=False)
    text = Trace("essay", text="@#$%^&*()")
    assert tokenize(text, tokenizer, target_tokens=7).n_context == 2
    with pytest.raises(InputError, match="essay") as caught:
        tokenize(text, tokenizer, target_tokens=n)
    assert reason in caught.value.message


# Refusals


def test_a_trace_longer_than_the_context() -> None:
    n_tokens = tokenize(TRACE, byte_level()).n_tokens
    assert tokenize(TRACE, byte_level(), max_tokens=n_tokens).n_tokens == n_tokens
    with pytest.raises(InputError, match=f"'t'.*{n_tokens} tokens.*context of {n_tokens - 1}") as caught:
        tokenize(TRACE, byte_level(), max_tokens=n_tokens - 1)
    assert "--beyond-context" in caught.value.hint


def test_a_context_of_one_token_and_an_empty_target() -> None:
    with pytest.raises(InputError, match="at least 2 are needed"):
        tokenize(Trace("t", prompt="", target="x"), byte_level())
    with pytest.raises(InputError, match="target has 0 tokens"):
        tokenize(Trace("t", prompt="long enough", target=""), byte_level())


def test_a_tokenizer_without_offsets() -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(InputError, match="no character offsets"):
        tokenize(TRACE, ByT5Tokenizer())


# Chat


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), byte_level(bos=False), metaspace("first"), metaspace("normalizer")]
)
def test_chat_renders_the_prompt_and_continues_the_assistants_turn(tokenizer: Any) -> None:
    trace = Trace("t", prompt="  What is a?\n", reasoning="It is", target=" 17")
    tokens = tokenize(trace, tokenizer, chat=True)
    head = "<s><user>What is a?</user><assistant>"
    assert tokens.text == head + "It is 17"
    assert (tokens.ids == tokenizer.bos_token_id).sum() == 1
    ends = [int(tokens.char_spans[pos - 1, 1]) for pos in (tokens.n_prompt, tokens.n_context, tokens.n_tokens)]
    assert ends == [len(head), len(head) + 5, len(head) + 8]


def test_in_a_chat_the_template_alone_decides_about_bos() -> None:
    tokenizer = byte_level.__wrapped__()
    tokenizer.chat_template = "{{ messages[0].content }}:"
    assert tokenizer.bos_token_id not in tokenize(TRACE, tokenizer, chat=True).ids


def test_chat_moves_spans_to_where_the_template_puts_them() -> None:
    prompt, reasoning = "  What is a?\n", "It is"
    whole = prompt + reasoning + " 17"
    spans = [(2, 6), (10, 11), (0, 12), (whole.index("It"), whole.index("It") + 2), (len(whole) - 2, len(whole))]
    trace = Trace("t", prompt=prompt, reasoning=reasoning, target=" 17", spans=tuple(spans))
    tokens = tokenize(trace, byte_level(), chat=True)
    texts = ["".join(covered(tokens)[start:end]).strip() for start, end in tokens.spans]
    assert texts[:2] == ["What", "a"]
    assert texts[2].startswith("What is a?")
    assert texts[3:] == ["It", "17"]


def test_chat_refusals() -> None:
    bare = byte_level.__wrapped__()
    bare.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        tokenize(TRACE, bare, chat=True)
    with pytest.raises(InputError, match="no prompt"):
        tokenize(Trace("t", text="a b c d"), byte_level(), chat=True, target_tokens=1)
    bare.chat_template = "<s>{{ messages[0].content | upper }}:"
    assert tokenize(TRACE, bare, chat=True).text.startswith("<s>LET A = 17.:")
    with pytest.raises(InputError, match="spans have no place"):
        tokenize(Trace("t", prompt="lower", target="x", spans=((0, 2),)), bare, chat=True)


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ raise_exception('no user turns') }}", "{{ nothing.content }}", "{{ 1 / 0 }}", "{{ 1 + 'a' }}"],
)
def test_a_chat_template_that_fails_is_named(template: str) -> None:
    bare = byte_level.__wrapped__()
    bare.chat_template = template
    with pytest.raises(InputError, match=r"chat template failed: ."):
        tokenize(TRACE, bare, chat=True)


# Spans


@pytest.mark.parametrize("tokenizer", ALL)
def test_a_span_takes_every_token_it_touches_but_not_for_white_space(tokenizer: Any) -> None:
    prompt = "The red box is under the table."
    for start, end in [(4, 7), (3, 8), (5, 6), (8, 18), (0, len(prompt))]:
        trace = Trace("t", prompt=prompt, target=" Yes", spans=((start, end),))
        tokens = tokenize(trace, tokenizer)
        ((first, stop),) = tokens.spans
        visible = {char for char in range(start, end) if not prompt[char].isspace()}
        expected = [
            pos
            for pos, (left, right) in enumerate(tokens.char_spans)
            if left >= 0 and visible & set(range(left, right))
        ]
        assert list(range(first, stop)) == expected


def test_a_span_of_white_space_takes_the_tokens_of_that_space() -> None:
    tokens = tokenize(Trace("t", prompt="a\n\nb", target="c", spans=((1, 3),)), byte_level(bos=False))
    assert "".join(covered(tokens)[slice(*tokens.spans[0])]) == "\n\n"
    assert token_ranges(tokens, []) == []
