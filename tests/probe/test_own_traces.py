"""Own traces: what is written, graded and seeded, and what survives a kill, another configuration and bad prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_tokenizers
import torch

from kvlens import decoding
from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model, wrap
from kvlens.probe.own_traces import prompt_seed, traces
from kvlens.records import Trace
from kvlens.texts import read_traces, tokenize

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["Let a = 17 and b = a + 24.", "Where is the box? ", "The red box is under the table.\n"]
PROMPTS = [Trace(f"p{i}", prompt=text, meta={"topic": i}) for i, text in enumerate(TEXTS)]
N_NEW = 20


def tiny_model(**changes: Any) -> Model:
    tokenizer = tiny_tokenizers.byte_level()
    return wrap(tiny.llama(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=None, **changes), tokenizer)


@pytest.fixture
def model() -> Model:
    return tiny_model()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "own.jsonl"


@pytest.fixture
def make(model: Model, out: Path) -> Callable[..., list[Trace]]:
    def make(prompts: Any = PROMPTS, **options: Any) -> list[Trace]:
        return traces(prompts, model, out, **{"max_new_tokens": N_NEW} | options)

    return make


@pytest.fixture
def n_generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every prompt that a model was made to answer."""
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> list[int]:
        calls.append(1)
        return decoding.generate(*args, **options)

    monkeypatch.setattr(models, "generate", counted)
    return calls


def texts(made: list[Trace]) -> list[str]:
    return [trace.reasoning + trace.target for trace in made]


def test_the_text_is_what_transformers_generates_after_the_prompt(
    make: Callable[..., list[Trace]], model: Model, out: Path
) -> None:
    made = make()
    assert read_traces(out) == made
    assert [trace.id for trace in made] == ["p0", "p1", "p2"]
    for prompt, trace in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([model.tokenizer(prompt.prompt)["input_ids"]])
        assert ids[0, 0] == 0  # the BOS token
        with torch.no_grad():
            new = model.hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=N_NEW)
        assert trace.prompt == prompt.prompt
        assert texts([trace]) == [model.tokenizer.decode(new[0, ids.shape[1] :]).rstrip("\ufffd")]
        assert tokenize(trace, model.tokenizer).n_target > 0


def test_meta_says_how_a_trace_was_made(make: Callable[..., list[Trace]], model: Model) -> None:
    (trace,) = make(PROMPTS[1:2], temperature=0.5, seed=3)
    assert trace.meta["made_by"] == {
        "fingerprint": model.fingerprint,
        "dtype": "float32",
        "seed": 3,
        "max_new_tokens": N_NEW,
        "temperature": 0.5,
        "chat": False,
        "grade": "math",
    }
    assert trace.meta["topic"] == 1
    assert trace.meta["model"] == "in-memory"
    assert trace.meta["versions"]["torch"] == torch.__version__
    assert trace.meta["prompt_seed"] == prompt_seed(3, "p1") != prompt_seed(3, "p2") != prompt_seed(4, "p2")
    assert (trace.meta["n_generated"], trace.meta["hit_length_cap"]) == (N_NEW, True)
    assert (trace.meta["score"], trace.meta["correct"]) == (None, None)


def test_the_target_is_graded_against_the_prompts_answers(make: Callable[..., list[Trace]]) -> None:
    target = make()[0].target
    for answer, score in ((("no such thing", target), 1.0), (("no such thing",), 0.0)):
        (trace,) = make([replace(PROMPTS[0], answer=answer)], grade="exact", force=True)
        assert (trace.meta["score"], trace.meta["correct"]) == (score, score == 1.0)
        assert trace.answer == answer


def test_draws_depend_on_the_seed_and_the_prompts_id_alone(make: Callable[..., list[Trace]], out: Path) -> None:
    together = texts(make(temperature=2.0))
    out.unlink()
    assert texts(make([PROMPTS[2], PROMPTS[0]], temperature=2.0)) == [together[2], together[0]]
    assert texts(make(temperature=2.0, seed=1, force=True)) != together
    renamed = [replace(PROMPTS[0], id="q0")]
    assert texts(make(renamed, temperature=2.0, force=True)) != together[:1]


def test_a_chat_prompt_is_rendered_by_the_models_template(make: Callable[..., list[Trace]], model: Model) -> None:
    (trace,) = make(PROMPTS[:1], chat=True)
    ids = model.tokenizer(f"<s><user>{TEXTS[0]}</user><assistant>", add_special_tokens=False)["input_ids"]
    new = decoding.generate(model, ids, max_new_tokens=N_NEW)
    assert trace.prompt == TEXTS[0]
    assert texts([trace]) == [model.tokenizer.decode(new).rstrip("\ufffd")]


def test_cut_anywhere_the_same_call_ends_in_the_same_bytes(
    make: Callable[..., list[Trace]], out: Path, n_generated: list[int]
) -> None:
    made = make()
    whole = out.read_bytes()
    first, second = whole.index(b"\n") + 1, whole.index(b"\n", whole.index(b"\n") + 1) + 1
    cuts = {1: 0, first - 1: 0, first: 1, first + 20: 1, first + 300: 1, second - 1: 1, second: 2, len(whole): 3}
    for cut, n_kept in cuts.items():
        out.write_bytes(whole[:cut])
        n_generated.clear()
        assert make() == made
        assert len(n_generated) == 3 - n_kept
        assert out.read_bytes() == whole


def test_more_prompts_later_continue_the_file(make: Callable[..., list[Trace]], n_generated: list[int]) -> None:
    assert len(make(limit=1)) == 1
    ticks: list[tuple[int, int]] = []
    assert len(make(progress=lambda done, total: ticks.append((done, total)))) == 3
    assert len(n_generated) == 3
    assert ticks == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.slow
def test_a_real_kill_loses_no_finished_line(tmp_path: Path, make: Callable[..., list[Trace]], out: Path) -> None:
    """The child kills itself as it turns to the third prompt; what it leaves is continued to the same bytes."""
    code = f"""
import os, sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests" / "probe")!r}]
import test_own_traces as t
die = lambda done, total: os.kill(os.getpid(), 9) if done == 2 else None
t.traces(t.PROMPTS, t.tiny_model(), {str(tmp_path / "killed.jsonl")!r}, max_new_tokens=t.N_NEW, progress=die)
"""
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    make()
    whole, left = out.read_bytes(), (tmp_path / "killed.jsonl").read_bytes()
    assert left == b"".join(whole.splitlines(keepends=True)[:2])
    os.replace(tmp_path / "killed.jsonl", out)
    make()
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"max_new_tokens": 5}, "max_new_tokens is 20 there and 5 here"),
        ({"temperature": 1.0}, "temperature is 0.0 there and 1.0 here"),
        ({"chat": True}, "chat is False there and True here"),
        ({"grade": "exact"}, "grade is 'math' there"),
        ({"model": tiny_model(num_hidden_layers=1)}, "fingerprint is"),
        ({"prompts": PROMPTS[:2]}, "trace 'p2' is not among the 2 prompts"),
        ({"prompts": [replace(PROMPTS[0], prompt="Other"), *PROMPTS[1:]]}, "the prompt of 'p0' is another one"),
        ({"prompts": [replace(PROMPTS[0], answer=("1",)), *PROMPTS[1:]]}, "the prompt of 'p0' is another one"),
    ],
)
def test_another_configuration_is_refused_and_replaced_with_force(
    make: Callable[..., list[Trace]], model: Model, out: Path, options: dict[str, Any], reason: str
) -> None:
    make()
    before = out.read_bytes()
    arguments = {"prompts": PROMPTS, "model": model, "out": out, "max_new_tokens": N_NEW} | options
    with pytest.raises(InputError, match="different configuration") as refusal:
        traces(**arguments)
    assert reason in refusal.value.message
    assert "--force" in refusal.value.hint
    assert out.read_bytes() == before
    found = traces(**arguments, force=True)
    assert [trace.id for trace in found] == [prompt.id for prompt in arguments["prompts"]]
    assert out.read_bytes() != before


@pytest.mark.parametrize(
    "content",
    [
        b'{"id": "p0", "prompt": "mine", "target": "x"}\n',
        b'{"id": "p0", "prompt": "no newline at the end", "target": "x"}',
        b"notes\n",
        b"notes",
        b"[1]\n",
        b"\xff\xfe\n",
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_file_of_someone_elses_is_never_touched(
    make: Callable[..., list[Trace]], out: Path, content: bytes, force: bool
) -> None:
    out.write_bytes(content)
    with pytest.raises(InputError, match="line 1 was not written by"):
        make(force=force)
    assert out.read_bytes() == content


def test_a_damaged_line_is_named(make: Callable[..., list[Trace]], out: Path) -> None:
    make()
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    with pytest.raises(InputError, match="line 2 was not written by"):
        make()


def test_a_prompt_the_model_has_no_embeddings_for_is_kept_out(model: Model, out: Path) -> None:
    small = replace(model, d_vocab=40)
    skipped: dict[str, str] = {}
    with pytest.raises(InputError, match="none of the 1 prompts"):
        traces(PROMPTS[:1], small, out, max_new_tokens=N_NEW, on_skip=skipped.__setitem__)
    assert "outside the vocabulary" in skipped["p0"]


def test_prompts_without_a_trace_are_kept_out_with_a_reason(out: Path) -> None:
    """One prompt fills the context, one leaves room for a single token, one gets an empty answer."""
    model = tiny_model(max_position_embeddings=40)
    n_long = len(model.tokenizer("a" * 38)["input_ids"])
    assert n_long == 39
    asked = [
        PROMPTS[0],
        Trace("full", prompt="a" * 60),
        Trace("one token left", prompt="a" * 38),
        Trace("silent", prompt="The table."),
    ]
    silent = tokenize(replace(asked[3], target="."), model.tokenizer)
    (stop,) = decoding.generate(model, silent.ids[: silent.n_prompt].tolist(), max_new_tokens=1)
    model.hf.generation_config.eos_token_id = stop
    skipped: dict[str, str] = {}
    found = traces(asked, model, out, max_new_tokens=N_NEW, on_skip=skipped.__setitem__)
    assert skipped == {
        "full": "its prompt of 61 tokens fills the model's context of 40",
        "silent": "cannot split a model's output: it is empty",
    }
    assert [trace.id for trace in found] == ["p0", "one token left"]
    assert (found[1].meta["n_generated"], found[1].meta["hit_length_cap"]) == (1, True)
    assert len(out.read_text().splitlines()) == 2
    again: dict[str, str] = {}
    assert traces(asked, model, out, max_new_tokens=N_NEW, on_skip=again.__setitem__) == found
    assert again == skipped
    out.unlink()
    with pytest.raises(InputError, match="none of the 1 prompts gave a trace"):
        traces(asked[1:2], model, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": "own.txt"}, "not a JSONL file"),
        ({"max_new_tokens": 0}, "cannot generate 0 tokens"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"grade": "vibes"}, "no such grader"),
        ({"prompts": []}, "no traces"),
        ({"prompts": [PROMPTS[0], PROMPTS[0]]}, "stands for 2"),
        ({"prompts": [Trace("blank", prompt=" ")]}, "the prompt is empty"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        traces(**{"prompts": PROMPTS, "model": "no such model", "out": tmp_path / "own.jsonl"} | arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_prompts_own_file_is_no_place_for_traces(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "p0", "prompt": TEXTS[0]}))
    with pytest.raises(InputError, match="file of prompts itself"):
        traces(path, model, tmp_path / "." / "prompts.jsonl", force=True)
    assert path.read_text() == json.dumps({"id": "p0", "prompt": TEXTS[0]})


@pytest.mark.real
def test_smollm2_answers_a_chat_and_is_graded(smollm2: Model, out: Path) -> None:
    asked = [
        Trace("capital", prompt="What is the capital of France? Answer with one word.", answer=("Paris",)),
        Trace("wrong", prompt="What is the capital of Italy? Answer with one word.", answer=("Paris",)),
    ]
    found = traces(asked, smollm2, out, max_new_tokens=16, chat=True, grade="contains")
    assert [trace.meta["correct"] for trace in found] == [True, False]
    assert not found[0].meta["hit_length_cap"]
    assert "<|im_end|>" not in found[0].target
    # The trace, read back as a label run would, is the sequence that the model wrote.
    tokens = tokenize(read_traces(out)[0], smollm2.tokenizer, chat=True)
    new = decoding.generate(smollm2, tokens.ids[: tokens.n_prompt].tolist(), max_new_tokens=16)
    assert tokens.ids[tokens.n_prompt :].tolist() == new
