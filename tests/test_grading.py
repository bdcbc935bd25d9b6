"""Grading: hand-made cases a grader, an independent reference for ROUGE-L, and a child process that cannot hang."""

from __future__ import annotations

import os
import threading
import time
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlens import grading, math_worker
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.grading import GRADERS, boxed, chosen_letter, final_answer, grade, is_flip

# What an output answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1}, no, \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{x}", "x"),
        (r"\boxed {3}", "3"),
        (r"\boxed{1} and \boxed{\frac{2}{3}", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_boxed(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@given(st.recursive(st.sampled_from(["x", "1", r"\}", r"\{", r"\\", " "]), lambda s: s.map("{{{}}}".format)))
def test_boxed_gives_back_any_balanced_content(content: str) -> None:
    assert boxed(rf"text }} \boxed{{{content}}} {{ more") == content.strip()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 3.5. Good.", "3.5"),
        ("Answer: 1\nwait\nAnswer: 2\n", "2"),
        ("**Final Answer:** $42$", "42"),
        ("Thus.\n#### 72", "72"),
        ("#### Step 4\nnothing", None),
        ("Answer:\nParis!", "Paris"),
        (r"The answer is 3, that is \boxed{4}", "4"),
        (r"The answer is 3 (not \boxed{4", r"3 (not \boxed{4"),
        ("I answered it.", None),
        (r"\boxed{}", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


# Graders

CASES = [
    ("exact", " the  end\n", "the end", 1.0),
    ("exact", "The end", "the end", 0.0),
    ("exact", "3.5", "35", 0.0),
    ("contains", "It was the  Eiffel\nTower, I think", "eiffel tower", 1.0),
    ("contains", "the year 1999.", "1999", 1.0),
    ("contains", "15", "5", 0.0),
    ("contains", "5.2", "5", 0.0),
    ("contains", "1,500", "500", 0.0),
    ("contains", "-5", "5", 0.0),
    ("contains", "-5", "-5", 1.0),
    ("contains", "well-known", "known", 1.0),
    ("contains", "a+b=c (x)", "(x)", 1.0),
    ("contains", "anything", " ", 0.0),
    ("token_f1", "The cat sat!", "a cat sat", 1.0),
    ("token_f1", "cat cat", "cat", 2 / 3),
    ("token_f1", "cat cat dog", "cat cat", 4 / 5),
    ("token_f1", "big red dog", "red dog house", 2 / 3),
    ("token_f1", "dog", "cat", 0.0),
    ("token_f1", "the", "an", 1.0),
    ("token_f1", "cat", "the", 0.0),
    ("rouge_l", "the police killed the gunman", "police kill the gunman", 2 * 3 / 9),
    ("rouge_l", "a b c d", "d c b a", 0.25),
    ("rouge_l", "A, b; C!", "a b c", 1.0),
    ("rouge_l", "", "x", 0.0),
    ("rouge_l", "!", "", 1.0),
    ("choice", "B", "B", 1.0),
    ("choice", "b", "(B)", 1.0),
    ("choice", "(C) because", "B", 0.0),
    ("choice", "B. Paris", "B) Paris", 1.0),
    ("choice", "The answer is D since A and B fail.", "D", 1.0),
    ("choice", r"(A)? No: \boxed{\text{C}}", "C", 1.0),
    ("choice", "A cat sat there.", "A", 0.0),
    ("choice", "Neither (A) nor (B), so option C", "C", 1.0),
    ("choice", "It must be Paris.", "B. Paris", 1.0),
    ("choice", "The answer is Paris", "Paris", 1.0),
    ("choice", "The answer is Rome", "Paris", 0.0),
]


@pytest.mark.parametrize(("kind", "output", "answer", "score"), CASES)
def test_cases(kind: str, output: str, answer: str, score: float) -> None:
    assert grade(kind, output, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "letter"),
    [("E.g., this", None), ("I think so", None), ("the answer is a dog", None), ("**Answer:** (c).", "C"), ("", None)],
)
def test_chosen_letter(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter


WORDS = st.lists(st.sampled_from("abc"), max_size=7).map(" ".join)


@given(WORDS, WORDS)
def test_rouge_l_equals_a_recursive_reference(output: str, answer: str) -> None:
    a, b = output.split(), answer.split()

    @cache
    def longest(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        return 1 + longest(i + 1, j + 1) if a[i] == b[j] else max(longest(i + 1, j), longest(i, j + 1))

    expected = 2 * longest(0, 0) / (len(a) + len(b)) if a or b else 1.0
    assert grading.rouge_l(output, answer) == pytest.approx(expected)
    blocks = sum(block.size for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
    assert longest(0, 0) >= blocks  # the reference itself: no common subsequence is longer


@given(st.sampled_from([kind for kind in GRADERS if kind != "math"]), st.text(max_size=20), st.text(max_size=20))
def test_scores_are_in_range_and_a_text_equals_itself(kind: str, output: str, answer: str) -> None:
    assert 0.0 <= grade(kind, output, answer) <= 1.0
    if kind in ("exact", "token_f1", "rouge_l"):
        assert grade(kind, output, output) == 1.0
        assert grade(kind, output, answer) == grade(kind, answer, output)


def test_grade_takes_the_best_answer_and_refuses_what_it_cannot_grade() -> None:
    assert grade("contains", "it is four", ["4", "four"]) == 1.0
    with pytest.raises(InputError, match="no such grader") as caught:
        grade("bleu", "x", "x")
    assert "rouge_l" in caught.value.hint
    with pytest.raises(InputError, match="no accepted answer"):
        grade("exact", "x", [])


# Mathematics


@pytest.mark.parametrize(
    ("output", "answer", "score"),
    [
        ("The answer is 12.", "12 apples", 1.0),
        (r"\boxed{\frac{3}{4}}", ".75", 1.0),
        (r"\boxed{2\sqrt2}", r"$\sqrt{8}$", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        ("72", "so\n#### 72", 1.0),
        ("First 12, then we get 13", "13", 1.0),
        (r"The answer is 12, no: \boxed{13}", "12", 0.0),
        (r"\boxed{(2, 1)}", "(1,2)", 0.0),
        (r"\boxed{-7}", "7", 0.0),
        ("no idea", "7", 0.0),
        (r"\boxed{}}{", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_math(output: str, answer: str, score: float) -> None:
    pytest.importorskip("math_verify")
    assert grade("math", output, answer) == score


def test_math_on_endless_powers_ends_and_the_next_question_is_answered() -> None:
    pytest.importorskip("math_verify")
    start = time.monotonic()
    assert grade("math", r"\boxed{9^{9^{9^9}}}", "3") == 0.0
    assert grade("math", "the answer is 9**9**9**9", "3") == 0.0
    assert time.monotonic() - start < 4 * math_worker.LIMIT_SECONDS
    assert grade("math", r"\boxed{6/2}", "3") == 1.0


def test_math_answers_the_right_question_from_many_threads() -> None:
    pytest.importorskip("math_verify")
    scores: dict[int, list[float]] = {}

    def ask(i: int) -> None:
        scores[i] = [grade("math", rf"\boxed{{{i}/1}}", str(j)) for j in range(4)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {i: [float(i == j) for j in range(4)] for i in range(4)}


def test_math_survives_a_child_that_was_killed() -> None:
    pytest.importorskip("math_verify")
    child = math_worker._Child()
    assert child.ask(r"\boxed{1/2}", r"\boxed{0.5}")
    assert child.process is not None
    child.process.kill()
    child.process.wait()
    assert child.ask(r"\boxed{1/2}", r"\boxed{0.5}")
    child.close()


def test_math_without_the_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with pytest.raises(EnvironmentLacks, match="math-verify package is missing") as caught:
        math_worker._Child().ask("1", "1")
    assert "pip install" in caught.value.hint


# Flips


@pytest.mark.parametrize(
    ("kind", "full", "occluded", "flipped"),
    [
        ("math", r"\boxed{1/2}", r"so it is \boxed{0.5}", False),
        ("math", r"\boxed{1/2}", r"\boxed{0.25}", True),
        ("math", r"\boxed{1/2}", "it is a half", True),
        ("math", "no", "idea", False),
        ("math", "no", r"\boxed{1}", True),
        ("choice", "The answer is (B)", "B", False),
        ("choice", "The answer is (B)", "(A)", True),
        ("choice", "The answer is (B)", "none", True),
        ("exact", "Long thought. The answer is blue.", "Other thought. The answer is blue.", False),
        ("exact", "The answer is blue.", "The answer is red.", True),
        ("exact", "blue", " blue ", False),
        ("exact", "blue", "", True),
        ("contains", "the answer is Paris", "the answer is in Paris, France", False),
        ("token_f1", "the answer is a blue box", "the answer is the blue box", False),
        ("rouge_l", "blue box", "blue boxes", True),
    ],
)
def test_is_flip(kind: str, full: str, occluded: str, flipped: bool) -> None:
    if kind == "math":
        pytest.importorskip("math_verify")
    assert is_flip(kind, full, occluded) is flipped


def test_is_flip_refuses_an_unknown_kind() -> None:
    with pytest.raises(InputError, match="no such grader"):
        is_flip("bleu", "x", "x")
