"""`kvlens generate` as a command: text as it comes, report, events, budgets, what it refuses, an interrupt."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import tiny_runs
import tiny_tokenizers
import torch

import kvlens
from kvlens.cli import app
from kvlens.errors import InputError
from kvlens.policy_file import PolicyFile
from kvlens.runtime.apply import Run
from kvlens.runtime.generated_files import EVENTS

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Let a = 17 and b = a + 24. Then b is 17 + 24."
N_NEW = 24


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLENS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=128)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    kvlens.export(None, tmp_path / "policy.json", scorer="random", budget_tokens=16, trigger="step")
    return tmp_path / "policy.json"


def words(model: Path, *more: str, n: int = N_NEW) -> list[str]:
    return ["generate", *more, "-m", str(model), "--device", "cpu", "--max-new-tokens", str(n)]


def document(capsys: pytest.CaptureFixture[str], model: Path, *more: str, n: int = N_NEW) -> dict[str, Any]:
    capsys.readouterr()
    assert app.main([*words(model, *more, n=n), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "tokens" not in err  # the report is in the document
    found: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    return found


# Answers


def test_the_text_goes_to_stdout_and_the_report_to_stderr(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path
) -> None:
    found = document(capsys, model, PROMPT, "--policy", str(policy))
    assert app.main(words(model, PROMPT, "--policy", str(policy))) == 0
    out, err = capsys.readouterr()
    assert out == found["text"] + "\n"
    facts = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in err.splitlines()}
    report = found["report"]
    assert facts["model"] == str(model)
    assert facts["tokens"] == f"{found['n_prompt']} of the prompt, {N_NEW} new (cut off at the longest text)"
    assert facts["policy"] == "random, 16 tokens a head, step"
    assert facts["evicted"].startswith(f"{report['n_evicted']} in {report['n_evictions']} evictions, ")
    assert facts["held"] == f"at most 16 tokens a layer between steps, {report['most_in_pass']} within one"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], model: Path, policy: Path) -> None:
    found = document(capsys, model, PROMPT, "--policy", str(policy))
    assert (found["schema"], found["n_generated"], len(found["ids"])) == ("kvlens.generated/1", N_NEW, N_NEW)
    assert (found["model"]["name"], found["seed"], found["temperature"]) == (str(model), 0, 0.0)
    assert found["policy"] == json.loads(policy.read_text())
    report = found["report"]
    assert "kept" not in report
    n_seen = found["n_prompt"] + N_NEW - 1  # the last token is never read
    assert report["n_evicted"] == n_seen - 16
    assert (report["most_held"], report["n_passes"]) == (16, N_NEW)
    one = report["full_bytes"] // n_seen
    assert report["held_bytes"] == 16 * one
    assert report["physical_bytes"] >= report["held_bytes"] + report["side_bytes"] > report["held_bytes"]


def test_without_a_policy_it_is_the_models_own_generate(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    found = document(capsys, model, PROMPT)
    at_hand = tiny_runs.model(max_position_embeddings=128)
    ids = at_hand.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    plain = at_hand.hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=N_NEW, do_sample=False)
    assert found["ids"] == plain[0, ids.shape[1] :].tolist()
    assert found["n_prompt"] == ids.shape[1]
    assert (found["policy"], found["report"]) == (None, None)
    assert app.main(words(model, PROMPT)) == 0
    assert "none: every token is kept" in capsys.readouterr().err


def test_a_text_that_ends_by_itself_was_not_cut_off(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    cut = document(capsys, model, PROMPT)
    assert cut["hit_length_cap"] is True
    n = next(n for n in range(3, N_NEW) if cut["ids"][n] not in cut["ids"][:n])
    folder = tiny_runs.save_model(tmp_path / "stops", max_position_embeddings=128, eos_token_id=[300, cut["ids"][n]])
    ended = document(capsys, folder, PROMPT)
    assert (ended["ids"], ended["hit_length_cap"]) == (cut["ids"][:n], False)
    assert document(capsys, folder, PROMPT, n=n)["hit_length_cap"] is True  # one token more would have ended it


def test_a_budget_above_the_length_changes_no_token(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path
) -> None:
    plain = document(capsys, model, PROMPT)
    roomy = document(capsys, model, PROMPT, "--policy", str(policy), "--budget-tokens", "128")
    tight = document(capsys, model, PROMPT, "--policy", str(policy))
    assert roomy["ids"] == plain["ids"]
    assert tight["ids"] != plain["ids"]
    assert (roomy["report"]["n_evicted"], roomy["policy"]["budget"]["tokens"]) == (0, 128)


def test_a_prompt_may_come_from_a_file_or_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n", encoding="utf-8")
    given = document(capsys, model, PROMPT + "\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(PROMPT.encode() + b"\n")))
    for found in (
        document(capsys, model, "--prompt-file", str(tmp_path / "prompt.txt")),
        document(capsys, model, "-"),
    ):
        assert (found["ids"], found["n_prompt"]) == (given["ids"], given["n_prompt"])


def test_python_and_command_line_say_the_same(capsys: pytest.CaptureFixture[str], model: Path, policy: Path) -> None:
    found = document(capsys, model, PROMPT, "--policy", str(policy))
    pieces: list[str] = []
    made = kvlens.generate(PROMPT, str(model), policy=policy, max_new_tokens=N_NEW, device="cpu", tell=pieces.append)
    assert "".join(pieces) == made.text == found["text"]
    assert len(pieces) > N_NEW // 3
    again = kvlens.generate(
        PROMPT, tiny_runs.model(max_position_embeddings=128), policy=kvlens.read_policy(policy), max_new_tokens=N_NEW
    )
    assert again.ids == made.ids == found["ids"]
    assert made.report is not None
    assert made.document()["report"]["kept"]["0"] == made.report.kept[0]


def test_sampling_is_seeded_and_leaves_the_random_state(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    before = torch.random.get_rng_state()
    texts = [document(capsys, model, PROMPT, "--temperature", "2", "--seed", seed)["ids"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != document(capsys, model, PROMPT)["ids"]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_chat_is_the_models_own_template(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    found = document(capsys, model, PROMPT, "--chat", n=4)
    assert found["n_prompt"] == len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert found["chat"] is True


# Budgets


@pytest.mark.parametrize(
    ("words_", "held"),
    [("--budget-tokens 20", 20), ("--keep-fraction 0.5", None), ("--budget-bytes 7680", 20)],
)
def test_another_budget_replaces_the_policys(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path, words_: str, held: int | None
) -> None:
    found = document(capsys, model, PROMPT, "--policy", str(policy), *words_.split())
    assert found["report"]["most_held"] == (held or found["n_prompt"] // 2)
    assert json.loads(policy.read_text())["budget"]["tokens"] == 16


# Files


def test_report_and_events_are_written(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path, tmp_path: Path
) -> None:
    report, events = tmp_path / "report.json", tmp_path / "events.parquet"
    asked = [PROMPT, "--policy", str(policy), "--report", str(report), "--events", str(events)]
    found = document(capsys, model, *asked)
    held = json.loads(report.read_text())
    assert {name: held[name] for name in ("schema", "text", "ids", "policy")} == {
        name: found[name] for name in ("schema", "text", "ids", "policy")
    }
    assert (found["report_file"], found["events_file"]) == (str(report), str(events))
    kept = held["report"]["kept"]
    stored = pq.read_table(events)
    assert stored.schema.remove_metadata() == EVENTS
    table = stored.to_pandas()
    assert len(table) == found["report"]["n_evicted"]
    n_seen = found["n_prompt"] + N_NEW - 1
    for layer in kept:  # with one set for all, what left and what stayed make up the text
        assert sorted([*kept[layer][0][0], *table.pos]) == list(range(n_seen))
    assert app.main([*words(model, *asked)]) == 0  # its own files it may write again
    err = capsys.readouterr().err
    assert str(report) in err
    assert str(events) in err
    assert app.main([*words(model, *asked), "--quiet"]) == 0
    assert capsys.readouterr() == (f"{report}\n{events}\n", "")
    assert app.main([*words(model, PROMPT, "--policy", str(policy)), "--quiet"]) == 0  # it wrote no file
    assert capsys.readouterr() == ("", "")


def test_pitfall_38_a_report_says_all_that_it_takes_to_write_the_text_again(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path, tmp_path: Path
) -> None:
    asked = [PROMPT, "--policy", str(policy), "--keep-fraction", "0.4", "--chat", "--temperature", "1.5", "--seed", "3"]
    asked += ["--dtype", "bfloat16", "--attention", "eager"]
    assert app.main([*words(model, *asked, "--report", str(tmp_path / "r.json")), "--quiet"]) == 0
    said = json.loads((tmp_path / "r.json").read_text())
    assert {"kvlens", "python", "torch", "transformers", "tokenizers"} <= said["versions"].keys()
    assert said["versions"]["torch"] == torch.__version__
    assert said["versions"]["kvlens"] == kvlens.__version__
    assert (said["device"], said["dtype"], said["attention"]) == ("cpu", "bfloat16", "eager")
    assert said["prompt_sha256"] == hashlib.sha256(PROMPT.encode()).hexdigest()
    assert said["template_sha256"] == hashlib.sha256(tiny_tokenizers.CHAT_TEMPLATE.encode()).hexdigest()
    assert {"physical_bytes", "full_bytes", "held_bytes", "side_bytes", "claimed_bytes"} <= said["report"].keys()
    names = ("max_new_tokens", "temperature", "seed", "chat", "beyond_context", "device", "dtype", "attention")
    again = kvlens.generate(
        PROMPT,
        said["model"]["name"],
        policy=PolicyFile(**said["policy"]),
        **{name: said[name] for name in names},
    )
    assert again.settings["model"] == said["model"]
    assert (again.ids, again.text, again.n_prompt) == (said["ids"], said["text"], said["n_prompt"])
    kept = again.document()["report"]
    assert {name: kept[name] for name in kept if not name.endswith("seconds")} == {
        name: value for name, value in said["report"].items() if not name.endswith("seconds")
    }
    plain = document(capsys, model, PROMPT, n=4)
    assert (plain["template_sha256"], plain["prompt_sha256"]) == (None, said["prompt_sha256"])


def test_events_are_only_kept_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, model: Path, policy: Path, tmp_path: Path
) -> None:
    runs: list[Any] = []
    after = Run.after
    monkeypatch.setattr(Run, "after", lambda run, *given: (runs.append(run), after(run, *given))[1])
    at_hand = tiny_runs.model(max_position_embeddings=128)
    assert kvlens.generate(PROMPT, at_hand, policy=policy, max_new_tokens=4).events is None
    found = kvlens.generate(PROMPT, at_hand, policy=policy, max_new_tokens=4, events=tmp_path / "e.parquet").events
    assert found is not None
    assert [bool(run.log.parts) for run in (runs[0], runs[-1])] == [False, True]
    pd.testing.assert_frame_equal(found, pd.read_parquet(tmp_path / "e.parquet"), check_dtype=False)


@pytest.mark.parametrize("what", ["report", "events"])
def test_a_strangers_file_needs_force(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("mine")
    asked = words(model, PROMPT, "--policy", str(policy), f"--{what}", str(path), n=2)
    assert app.main(asked) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--force" in err
    assert path.read_text() == "mine"
    assert app.main([*asked, "--force"]) == 0
    assert path.read_bytes() != b"mine"


# The context


@pytest.mark.parametrize("what", ["report", "events"])
@pytest.mark.parametrize("source", ["policy", "prompt file"])
def test_what_is_read_is_never_written_over(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path, tmp_path: Path, what: str, source: str
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    read = {"policy": policy, "prompt file": prompt}[source]
    (tmp_path / "link").symlink_to(read)
    for path in (read, tmp_path / "link"):
        before = read.read_bytes()
        asked = words(model, "--prompt-file", str(prompt), "--policy", str(policy), f"--{what}", str(path), n=2)
        assert app.main([*asked, "--force"]) == 2
        assert f"{what} and {source} are both" in capsys.readouterr().err
        assert read.read_bytes() == before


def test_the_models_context_bounds_the_text(capsys: pytest.CaptureFixture[str], model: Path, policy: Path) -> None:
    long = "Where is the red box? " * 18
    n_prompt = kvlens.generate(long, str(model), max_new_tokens=1, device="cpu").n_prompt
    assert 90 < n_prompt < 128
    capsys.readouterr()
    assert app.main([*words(model, long, "--json", n=60)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["n_generated"] == 128 - n_prompt
    assert f"at most {128 - n_prompt} new tokens" in err
    assert app.main(words(model, long * 2)) == 2
    assert "--beyond-context" in capsys.readouterr().err
    beyond = document(capsys, model, long * 2, "--beyond-context", "--policy", str(policy))
    assert (beyond["n_generated"], beyond["report"]["most_held"]) == (N_NEW, 16)


# Refusals


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ([], 2, "no prompt was given"),
        (["a", "--prompt-file", "{here}/prompt.txt"], 2, "both given"),
        ([""], 2, "is no text"),
        (["--prompt-file", "{here}/empty.txt"], 2, "is empty"),
        (["--prompt-file", "{here}/latin.txt"], 2, "invalid UTF-8 at byte 2"),
        (["--prompt-file", "{here}/nowhere.txt"], 2, "nowhere.txt"),
        (["--prompt-file", "{here}"], 2, "Is a directory"),
        (["--prompt-file", "/dev/zero"], 2, "more than 67,108,864 bytes"),
        ([os.fsdecode(b"a\xff")], 2, "no valid UTF-8"),
        (["a", "--policy", "{here}/nowhere.json"], 2, "there is no policy file"),
        (["a", "--policy", "{here}/latin.txt"], 2, "is no policy file"),
        (["a", "--policy", "{here}"], 2, "no ordinary file"),
        (["a", "--policy", "{here}/other.json"], 2, "n_layers 9 there, 3 here"),
        (["a", "--policy", "{policy}", "--budget-tokens", "3"], 2, "do not fit into 3 tokens"),
        (["a", "--policy", "{policy}", "--budget-tokens", "9", "--budget-bytes", "9"], 2, "one of tokens, bytes"),
        (["a", "--policy", "{policy}", "--budget-bytes", "9"], 2, "too few"),
        (["a", "--policy", "{policy}", "--keep-fraction", "0"], 2, "greater than 0"),
        (["a", "--policy", "{table}", "--budget-tokens", "9"], 2, "no single budget can replace"),
        (["a", "--budget-tokens", "9"], 2, "without a policy"),
        (["a", "--events", "{here}/e.parquet"], 2, "no events without a policy"),
        (["a", "--policy", "{policy}", "--report", "{here}/x", "--events", "{here}/x"], 2, "are both"),
        (["a", "--report", "{here}"], 2, "it is a folder"),
        (["a", "--report", "{here}/no/such.json"], 2, "there is no folder"),
        (["a", "--report", "{policy}"], 2, "was not written as report"),
        (["a", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["a", "--temperature", "-1"], 2, "--temperature"),
        (["a", "--temperature", "nan"], 2, "temperature"),
        (["a", "--temperature", "inf"], 2, "temperature inf"),
        (["a", "--temperature", "1e-40"], 2, "temperature 1e-40"),
        (["a", "--seed", "99999999999999999999"], 2, "seed"),
        (["a", "-m", "{here}/nowhere"], 2, "no such model folder"),
        (["a", "--attention", "flash_attention_2"], 3, "flash_attention_2"),
    ],
)  # fmt: skip
def test_what_cannot_be_generated_is_refused_before_any_text(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path, tmp_path: Path, more: list[str], code: int, says: str
) -> None:
    (tmp_path / "prompt.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"a\xe9b")
    document = json.loads(policy.read_text())
    (tmp_path / "other.json").write_text(json.dumps(document | {"model": {"n_layers": 9}}))
    rows = {"reduce": "head", "allocate": {"name": "table", "table": [[9, 9]] * 3}}
    (tmp_path / "table.json").write_text(json.dumps(document | rows))
    before = {file.name for file in tmp_path.iterdir()}
    places = {"{here}": tmp_path, "{policy}": policy, "{table}": tmp_path / "table.json"}
    for name, place in places.items():
        more = [word.replace(name, str(place)) for word in more]
    assert app.main([*words(model, n=2), *more]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["error", "hint"]
    assert says in err
    assert {file.name for file in tmp_path.iterdir()} == before


def test_another_architecture_may_be_allowed(capsys: pytest.CaptureFixture[str], model: Path, policy: Path) -> None:
    content = json.loads(policy.read_text())
    policy.write_text(json.dumps(content | {"model": {"n_layers": 9, "fingerprint": "f00d"}}))
    assert app.main(words(model, PROMPT, "--policy", str(policy), "--allow-mismatch", n=2)) == 0
    assert "made for another model, of fingerprint f00d" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit_its_protection_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    kvlens.export(None, tmp_path / "p.json", scorer="epikv", budget_tokens=12, trigger="step")
    assert app.main(words(model, PROMPT, "--policy", str(tmp_path / "p.json"))) == 2
    assert "protect" in capsys.readouterr().err


def test_a_prompt_that_will_not_fit_with_what_is_written_is_refused_before_any_text(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    n_prompt = document(capsys, model, PROMPT, n=1)["n_prompt"]
    kvlens.export(None, tmp_path / "p.json", scorer="epikv", budget_tokens=n_prompt + 8, recent=12, sinks=0)
    assert app.main(words(model, PROMPT, "--policy", str(tmp_path / "p.json"), n=8)) == 0
    capsys.readouterr()
    assert app.main(words(model, PROMPT, "--policy", str(tmp_path / "p.json"), n=24)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"the prompt of {n_prompt} tokens and 12 recent tokens are protected" in err


def test_a_share_below_what_is_protected_is_said(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    kvlens.export(None, tmp_path / "p.json", scorer="random", keep_fraction=0.9, recent=9)
    for share, said in ((0.9, False), (0.05, True)):
        more = ["--policy", str(tmp_path / "p.json"), "--keep-fraction", str(share)]
        assert app.main(words(model, PROMPT, *more)) == 0
        assert ("fewer than the 13 that are protected" in capsys.readouterr().err) == said


def test_an_error_in_the_middle_of_a_text_stands_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], model: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        if len(seen) > 3:
            raise InputError("enough", "stop")
        seen.append(1)

    seen: list[int] = []
    monkeypatch.setattr(Run, "_due", refuse)
    assert app.main(words(model, PROMPT, "--policy", str(policy))) == 2
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert out.strip()
    assert err.splitlines()[-2:] == ["error: enough", "hint: stop"]


@pytest.mark.parametrize("prompt", ["", "a\ud800"])
def test_python_refuses_what_is_no_prompt(prompt: str) -> None:
    with pytest.raises(InputError):
        kvlens.generate(prompt, tiny_runs.model())


# What only a real process shows


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    folder = tiny_runs.save_model(tmp_path / "model", max_position_embeddings=10**6, eos_token_id=None)
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from kvlens.cli.app import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *words(folder, PROMPT, n=500_000)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)  # text comes while the model writes
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-2:] == ["error: interrupted", "hint: nothing was written, run it again"]


def test_the_events_schema_is_the_contracts() -> None:
    whole = dict.fromkeys(("step", "pos", "tenure"), "int32") | dict.fromkeys(("layer", "kv_head"), "int16")
    columns = whole | {"event": "string", "score": "float"}
    assert {name: str(EVENTS.field(name).type) for name in columns} == columns
    assert np.dtype("int32") == EVENTS.field("row").type.to_pandas_dtype()
