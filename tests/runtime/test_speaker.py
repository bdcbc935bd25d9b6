"""A text that is told while it is written: every character once and whole, whatever the tokenizer, at a steady cost."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tiny_runs
import tiny_tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from kvlens.model import Model
from kvlens.runtime.speaker import Pieces, Speaker

CUT_OFF = "\ufffd"
MADE = tiny_runs.model()
N_IDS = len(tiny_tokenizers.byte_level())


def told(model: Model, prompt: list[int], ids: Sequence[int], *, at_once: int = 1) -> tuple[Speaker, list[str]]:
    """The speaker and what has been told after each of its calls."""
    pieces: list[str] = []
    speaker = Speaker(model, prompt, pieces.append)
    speaker.put(torch.tensor([prompt]))
    heard = []
    for start in range(0, len(ids), at_once):
        speaker.put(torch.tensor(ids[start : start + at_once]))
        heard.append("".join(pieces))
    speaker.end()
    return speaker, [*heard, "".join(pieces)]


def with_tokenizer(tokenizer: Any) -> Model:
    return replace(MADE, tokenizer=tokenizer)


def space_dropping(kind: str) -> Any:
    """A tokenizer that drops the space in front of what it decodes."""
    tokenizer = copy.deepcopy(tiny_tokenizers.metaspace(kind))
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_fallback() -> Any:
    """The kind of Llama 2: what its vocabulary lacks becomes byte tokens, which are decoded a whole run at a time."""
    words = ["<s>", "<unk>", "▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")


# What is told


def test_no_piece_of_a_character_is_told() -> None:
    text = "Step 1: é, 東京 and 🙂.\n"
    ids = MADE.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text)
    _, heard = told(MADE, [5, 6], [*ids, 2])  # the last ends the text
    assert heard[-1] == text
    assert CUT_OFF not in heard[-1]
    assert all(text.startswith(one) for one in heard)
    assert len(set(heard)) > len(text) / 2


def test_what_is_cut_off_inside_a_character_leaves_it_out() -> None:
    ids = MADE.tokenizer("a🙂", add_special_tokens=False)["input_ids"]
    speaker, heard = told(MADE, [5], ids[:-1])
    assert heard[-1] == speaker.text_of(ids[:-1]) == "a"


@pytest.mark.parametrize("kind", tiny_tokenizers.METASPACE_KINDS)
def test_a_space_that_the_tokenizer_drops_in_front_is_told(kind: str) -> None:
    tokenizer = space_dropping(kind)
    ids = tokenizer("Where the red box is", add_special_tokens=False)["input_ids"]
    n_first = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]) == "Where")
    assert tokenizer.decode(ids[n_first:]) == "the red box is"  # by themselves they have lost it
    _, heard = told(with_tokenizer(tokenizer), ids[:n_first], ids[n_first:])
    assert heard[-1] == " the red box is"
    _, heard = told(with_tokenizer(tokenizer), [0], ids)  # behind what is no text, only the first space is dropped
    assert heard[-1] == "Where the red box is"


def test_a_token_may_end_inside_a_character() -> None:
    vocabulary = {"b": 0, "aæ": 1, "c": 2, "±": 3}  # a with the first byte of 汱; one of the other two
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    model = with_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert told(model, [0], [1, 3, 3])[1] == ["", "", "a汱", "a汱"]
    assert told(model, [0], [1, 3])[1] == ["", "", "a"]


@pytest.mark.parametrize("prompt", ["a", "a東", "a🙂", "東京"])
def test_characters_of_byte_tokens_are_told_one_by_one(prompt: str) -> None:
    tokenizer = byte_fallback()
    before, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, "東京 a🙂b"))
    _, heard = told(with_tokenizer(tokenizer), before, ids[1:])  # without the space that it puts in front
    assert [*dict.fromkeys(heard)] == ["", "東", "東京", "東京 a", "東京 a🙂", "東京 a🙂b"]


def test_a_byte_that_belongs_nowhere_does_not_stop_the_text() -> None:
    tokenizer = byte_fallback()
    broken = tokenizer.convert_tokens_to_ids(["<0xE6>", "<0x9D>", "<0xB1>", "<0xFF>", "a", "b"])
    _, heard = told(with_tokenizer(tokenizer), [3], broken)
    assert heard[-1] == f"東{CUT_OFF}ab"


def test_special_tokens_and_stops_are_no_text() -> None:
    ids = MADE.tokenizer(" the red box", add_special_tokens=False)["input_ids"]
    assert MADE.tokenizer.bos_token_id == 0
    assert MADE.tokenizer.decode([2]) != ""
    between = [i for token in ids for i in (0, token, 2)]
    speaker, heard = told(MADE, [5], between, at_once=4)
    assert heard[-1] == speaker.text_of(between) == " the red box"


def test_spaces_are_not_cleaned_up() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizers.byte_level())
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    tokenizer.add_tokens([" ,"])
    text = "a , b ."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) != text
    assert told(with_tokenizer(tokenizer), [5], ids)[1][-1] == text


# Whatever a model may write


def check_any(model: Model, prompt: list[int], ids: list[int], at_once: int, *, stable: bool) -> None:
    """What is told is what `text_of` says and, where decoding never changes what stands before, the whole decoded."""
    speaker, heard = told(model, prompt, ids, at_once=at_once)
    assert heard[-1] == speaker.text_of(ids)
    assert all(later.startswith(earlier) for earlier, later in pairwise(heard))
    assert not heard[-1].endswith(CUT_OFF)
    if stable:
        kept = [i for i in ids if i not in speaker.stops]
        head, whole = (model.tokenizer.decode([*prompt, *more], skip_special_tokens=True) for more in ([], kept))
        if not head.endswith(CUT_OFF):
            assert head + heard[-1] == whole.rstrip(CUT_OFF)


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(3, N_IDS - 1), min_size=1, max_size=6),
    ids=st.lists(st.one_of(st.integers(0, N_IDS - 1), st.integers(0, 256)), max_size=40),
    at_once=st.integers(1, 3),
)
def test_any_ids_of_a_byte_level_tokenizer(prompt: list[int], ids: list[int], at_once: int) -> None:
    check_any(MADE, prompt, ids, at_once, stable=True)


FALLBACK = with_tokenizer(byte_fallback())
SPACES = with_tokenizer(space_dropping("first"))


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 261), min_size=1, max_size=6),
    ids=st.lists(st.one_of(st.integers(0, 261), st.integers(0, 6)), max_size=40),
)
def test_any_ids_of_a_tokenizer_with_byte_tokens(prompt: list[int], ids: list[int]) -> None:
    check_any(FALLBACK, prompt, ids, 1, stable=False)


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(3, len(SPACES.tokenizer) - 1), min_size=1, max_size=6),
    ids=st.lists(st.integers(0, len(SPACES.tokenizer) - 1), max_size=40),
)
def test_any_ids_of_a_tokenizer_that_drops_spaces(prompt: list[int], ids: list[int]) -> None:
    check_any(SPACES, prompt, ids, 1, stable=True)


@pytest.mark.real
def test_any_ids_of_the_default_model(smollm2: Model) -> None:
    @settings(max_examples=200, deadline=None)
    @given(
        prompt=st.lists(st.integers(3, 49_000), min_size=1, max_size=4),
        ids=st.lists(st.one_of(st.integers(0, 49_151), st.integers(0, 300)), max_size=40),
    )
    def check(prompt: list[int], ids: list[int]) -> None:
        check_any(smollm2, prompt, ids, 1, stable=True)

    check()


# What it costs


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    class Counting:
        def __init__(self) -> None:
            self.n_read: list[int] = []

        def decode(self, ids: Sequence[int], **more: Any) -> str:
            self.n_read.append(len(ids))
            return str(MADE.tokenizer.decode(ids, **more))

    counting = Counting()
    ids = MADE.tokenizer("Where is the red box? 東京 🙂 " * 40, add_special_tokens=False)["input_ids"]
    pieces = Pieces(counting, [5])
    assert "".join(map(pieces.take, ids)) == "Where is the red box? 東京 🙂 " * 40
    assert max(counting.n_read) <= 8  # a character behind a character
    assert len(counting.n_read) <= 2 * len(ids) + 2
