"""Words of a variant: every combination reads back as what it was, whatever else is written is refused with a hint."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.errors import InputError
from kvlens.observables.surprise_variant import FAST, FULL, MOST, WORDS, Variant, read_variant

ANY_WORD = st.one_of(
    st.sampled_from(sorted(WORDS)),
    st.builds("{}={}".format, st.sampled_from(["layers", "gap"]), st.integers(1, 9)),
)
NINES = 30 * "9"
variants = st.builds(
    Variant,
    layers=st.none() | st.integers(1, MOST),
    skip_mlp=st.booleans(),
    logprob=st.booleans(),
    no_self=st.booleans(),
    min_gap=st.integers(0, MOST),
    past=st.booleans(),
) | st.builds(
    Variant,
    layers=st.none() | st.integers(1, 99),
    skip_mlp=st.booleans(),
    logprob=st.just(True),
    no_self=st.booleans(),
    unit=st.sampled_from(["sentence", "clause"]),
    min_gap=st.integers(0, 9),
    past=st.booleans(),
)


def fields(words: list[str]) -> dict[str, set[Any]]:
    """What these words say of each field."""
    found: dict[str, set[Any]] = {}
    for word in words:
        name, _, number = word.partition("=")
        says = {"layers" if name == "layers" else "min_gap": int(number)} if number else WORDS[word]
        for field, value in says.items():
            found.setdefault(field, set()).add(value)
    return found


@given(variants)
@settings(max_examples=300, deadline=None)
def test_a_name_reads_back_as_its_variant(variant: Variant) -> None:
    assert read_variant(variant.name) == variant
    words = variant.name.split(",")
    for order in itertools.islice(itertools.permutations(words), 6):
        assert read_variant(" , ".join(order)) == variant


def test_names_are_one_to_one() -> None:
    every = [
        Variant(layers, skip, unit is not None or logprob, no_self, unit, gap, past)
        for layers in (None, 1, 2)
        for skip, logprob, no_self, past in itertools.product((False, True), repeat=4)
        for unit in (None, "sentence", "clause")
        for gap in (0, 1)
    ]
    assert len({variant.name for variant in every}) == len(set(every)) == 3 * 2 * 2 * 2 * 4 * 2


@given(st.lists(ANY_WORD, min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_words_are_read_or_contradict_each_other(words: list[str]) -> None:
    """Two words that say different things of one field contradict each other, whatever their order; so do twins."""
    says = fields(words)
    if all(len(values) == 1 for values in says.values()) and len({*words}) == len(words):
        variant = read_variant(",".join(words))
        assert all(getattr(variant, field) == value for field, (value,) in says.items())
        assert read_variant(variant.name) == variant
    else:
        with pytest.raises(InputError, match=r"contradicts a word|twice") as caught:
            read_variant(",".join(words))
        assert "fast" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("full", FULL),
        ("fast", FAST),
        ("layers=1,skip_mlp", FAST),
        ("skip_mlp", Variant(skip_mlp=True)),
        ("full,skip_mlp", Variant(skip_mlp=True)),
        ("gap=0", FULL),
        ("token,logit,with_self", FULL),
        ("layers=4,no_self,gap=2,past", Variant(4, no_self=True, min_gap=2, past=True)),
        ("fast,clause", Variant(1, True, True, unit="clause")),
        ("sentence,logprob", Variant(logprob=True, unit="sentence")),
    ],
)
def test_what_words_mean(text: str, variant: Variant) -> None:
    assert read_variant(text) == variant


@pytest.mark.parametrize(
    "text",
    [
        "full,fast",
        "fast,layers=2",
        "full,layers=3",
        "layers=2,layers=3",
        "logit,logprob",
        "sentence,logit",
        "logit,clause",
        "sentence,clause",
        "token,sentence",
        "no_self,with_self",
        "gap=1,gap=2",
    ],
)
def test_contradictions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="contradicts"):
        read_variant(text)


@pytest.mark.parametrize("text", ["fast,fast", "past,full,past", "gap=1,gap=1"])
def test_a_word_that_comes_twice_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="twice"):
        read_variant(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "fast,", "slow", "FAST", "layers", "layers=", "gap=-1", "gap=1.5", "gap=+1", "gap=1e3", "gap=x"),
        *("layers=1=2", "gap= 1", "gap=\u0661", "gap=\u00b2", "past=1", "full fast", "unit", "None", "\x00"),
    ],
)
def test_what_is_no_word_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no variant word") as caught:
        read_variant(text)
    assert "gap=N" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text", ["layers=0", "gap=2147483648", f"gap={NINES}", f"layers={200 * NINES}", "gap=00000000000"]
)
def test_numbers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="outside"):
        read_variant(text)


def test_what_is_no_text_is_refused() -> None:
    """In a process of its own, since here types are checked before kvlens sees them."""
    code = """
from kvlens.errors import InputError
from kvlens.observables.surprise_variant import read_variant
for value in (None, 3, 1.5, True, b"fast", ["fast"], {"layers": 1}, object(), ("full",)):
    try:
        read_variant(value)
    except InputError as error:
        assert "no text" in str(error) and "fast" in error.hint
        print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 9


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_junk_is_read_or_refused_and_nothing_else(text: str) -> None:
    with suppress(InputError):
        assert read_variant(read_variant(text).name) == read_variant(text)
