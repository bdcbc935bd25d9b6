"""`kvlens ceilings` as a command: its three forms of answer, its options, what it refuses, and a SIGKILL."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_runs

import kvlens
from kvlens.cli import app, output
from kvlens.cli.ceilings import _text, percent

N_TRACES = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_runs.write_rows(tmp_path / "traces.jsonl")


def words(source: Path, model: Path, out: Path, *more: str, small: bool = True) -> list[str]:
    quick = ["--budgets", "2,4", "--rows-per-head", "3"] if small else []
    return ["ceilings", str(source), "-m", str(model), "-o", str(out), "--device", "cpu", *quick, *more]


def cells(line: str) -> list[str]:
    return [cell for cell in (part.strip() for part in line.split("  ")) if cell]


# Answers


def test_the_answer_for_people(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--cross-entropy")) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "72 rows of 2 traces at 2 budgets, each real and under 3 nulls"
    assert err.splitlines()[1].startswith("cross-entropy of 1 held-out trace, 4 keys kept in ")
    assert len(err.splitlines()) == 2
    found = kvlens.load(tmp_path / "run").documents["summary"]
    lines = out.splitlines()
    facts = {cells(line)[0]: cells(line)[-1] for line in lines if len(cells(line)) == 2}
    assert facts["model"] == str(model)
    assert facts["rows"] == "72 of 2 documents, few: intervals are rough"
    worst = found["check"]["worst"]
    said = f"72 rows against the model's own output, 0 off, the worst at {worst:.2f} of what is allowed"
    assert facts["checked"] == said
    at = lines.index(next(line for line in lines if "kappa <= 1.5" in line))
    assert cells(lines[at])[0] == "kept"
    for line, row in zip(found["budgets"], lines[at + 1 : at + 3], strict=True):
        real = line["real"]
        assert cells(row) == [
            str(line["budget"]),
            percent(real["ceiling"]["median"]),
            f"[{percent(real['ceiling']['low'])}, {percent(real['ceiling']['high'])}]",
            percent(real["share_kappa_close"]),
            percent(real["share_top_mass_optimal"]),
            percent(real["share_balanced_optimal"]),
            f"{real['pi']['median']:.2f}",
        ]
    assert cells(lines[at + 4]) == ["kept", "values", "ceiling", "95 % interval", "AUC", "95 % interval"]
    rows = iter(lines[at + 5 : at + 13])
    for line in found["budgets"]:
        for name, value in {"real": line["real"], **line["nulls"]}.items():
            ceiling, auc = value["ceiling"], value["auc"]
            assert cells(next(rows)) == [
                *([str(line["budget"])] if name == "real" else []),
                name,
                percent(ceiling["median"]),
                f"[{percent(ceiling['low'])}, {percent(ceiling['high'])}]",
                f"{auc['mean']:.2f}",
                f"[{auc['low']:.2f}, {auc['high']:.2f}]",
            ]
    best = found["predictors"][0]
    assert facts["AUC at 4"].startswith(f"{best['statistic']} {best['auc']:.2f}, ")
    assert facts["flat cells"].startswith(f"{found['cells']['n_flat']} of 12 ")
    assert facts["excess at 4"].startswith(f"top_mass {found['rules']['top_mass']['4']['median']:.2f}, streaming ")
    cost = found["shared_sets"]["4"]["cost"]["median"]
    assert facts["shared set"] == f"{cost:.2f} times the error of each head's own largest weights"
    for arm in ("flat", "random", "all"):
        value = found["cross_entropy"]["arms"][arm]
        added = f"{value['added_nats']:+.3f}".replace("-", "\N{MINUS SIGN}")
        assert facts[f"forced {arm}"].startswith(
            f"{value['n_cells']} cells keep 4 keys, 1 held-out document: {added} nats a token"
        )
    assert cells(lines[-1]) == ["run", str(tmp_path / "run")]


def test_what_is_unknown_is_left_empty(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    source = tiny_runs.write_rows(tmp_path / "traces.jsonl", [tiny_runs.SUM, {"id": "s", "prompt": "a", "target": "b"}])
    assert app.main(words(source, model, tmp_path / "run", "--nulls", "none")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "(1 left out)" in lines[1]
    assert "no null controls" in lines
    (row,) = [cells(line) for line in lines if cells(line)[:1] == ["4"]]
    assert len(row) == 6  # one trace has no interval
    assert "[" not in " ".join(row)
    run = kvlens.load(tmp_path / "run")
    found = run.documents["summary"]
    found["budgets"][1]["real"]["pi"]["median"] = found["rules"]["random"]["4"]["median"] = "inf"
    text = _text(run.path, run.meta, found)
    assert "random inf" in text
    (row,) = [cells(line) for line in text.splitlines() if cells(line)[:1] == ["4"]]
    assert (len(row), row[-1]) == (6, "inf")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path) -> None:
    asked = words(source, model, tmp_path / "run", "--json")
    assert app.main(asked) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document.pop("run") == str(tmp_path / "run")
    assert document.pop("counts") == {"skipped": [], "traces": 2, "rows": 72, "instances": 144}
    assert document == json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert app.main(asked) == 0  # the finished run answers the same
    out, err = capsys.readouterr()
    assert json.loads(out)["budgets"] == document["budgets"]
    assert "holds this run already, finished" in err


def test_quiet_says_the_path_alone(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    assert app.main(words(source, model, tmp_path / "run", "--quiet", "--nulls", "none")) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'run'}\n", "")


def test_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: Path, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    assert app.main(words(source, model, tmp_path / "run", "--json", "--nulls", "none")) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "layers: 3 of 6" in err
    assert "layers: 6 of 6" in err


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("--budgets 2 --rows-per-head 1", {"budgets": [2], "rows_per_head": 1}),
        ("--budgets 4,2,4 --nulls none", {"budgets": [2, 4], "nulls": []}),
        ("--budgets 2 --nulls all --chat --beyond-context", {"budgets": [2], "chat": True, "beyond_context": True}),
        ("--budgets 2 --limit 2 --cross-entropy", {"budgets": [2], "cross_entropy": True}),
    ],
)
def test_options_become_the_configuration(
    source: Path, model: Path, tmp_path: Path, options: str, changed: dict[str, Any]
) -> None:
    one = [] if "--limit" in options else ["--limit", "1"]
    asked = words(source, model, tmp_path / "run", "--quiet", "--seed", "7", *one, *options.split(), small=False)
    assert app.main([*asked, "--attention", "eager"]) == 0
    run = kvlens.load(tmp_path / "run")
    plain = {"rows_per_head": 6, "nulls": ["permuted", "gaussian", "rank 4"], "cross_entropy": False, "chat": False}
    assert run.meta["config"] == plain | {"beyond_context": False} | changed
    assert (run.meta["seed"], run.meta["device"], run.meta["attention"]) == (7, "cpu", "eager")
    assert run.rows.trace_id.nunique() == (2 if "--limit" in options else 1)


def test_the_plain_command_has_the_papers_budgets(source: Path, model: Path, tmp_path: Path) -> None:
    asked = words(source, model, tmp_path / "run", "--quiet", "--nulls", "none", "--limit", "1", small=False)
    assert app.main(asked) == 0
    config = tiny_runs.state(tmp_path / "run")["config"]
    assert (config["budgets"], config["rows_per_head"]) == ([4, 8, 16, 32], 6)
    assert kvlens.load(tmp_path / "run").documents["summary"]["predictor_budget"] == 8


def test_python_and_command_line_write_the_same_bytes(source: Path, model: Path, tmp_path: Path) -> None:
    assert app.main(words(source, model, tmp_path / "a", "--quiet")) == 0
    asked: dict[str, Any] = {"budgets": (2, 4), "rows_per_head": 3}
    kvlens.ceilings(source, str(model), tmp_path / "b", device="cpu", **asked)
    at_hand = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
    kvlens.ceilings(at_hand, tiny_runs.model(max_position_embeddings=64), tmp_path / "c", **asked)
    assert tiny_runs.hashes(tmp_path / "a") == tiny_runs.hashes(tmp_path / "b") == tiny_runs.hashes(tmp_path / "c")
    assert (tmp_path / "a" / "summary.json").read_bytes() == (tmp_path / "b" / "summary.json").read_bytes()


def test_another_configuration_needs_force(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    asked = ["--quiet", "--nulls", "none", "--budgets"]
    assert app.main(words(source, model, tmp_path / "run", *asked, "2")) == 0
    before = tiny_runs.hashes(tmp_path / "run")
    capsys.readouterr()
    other = words(source, model, tmp_path / "run", *asked, "3")
    assert app.main(other) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "budgets is [2] there and [3] here" in err
    assert "--force" in err
    assert tiny_runs.hashes(tmp_path / "run") == before
    assert app.main([*other, "--force"]) == 0
    assert tiny_runs.state(tmp_path / "run")["config"]["budgets"] == [3]
    kvlens.observe(source, str(model), tmp_path / "signals", device="cpu", signals="age")
    assert app.main(words(source, model, tmp_path / "signals", *asked, "2")) == 2
    assert "schema is 'kvlens.signals/1' there and 'kvlens.ceilings/1' here" in capsys.readouterr().err


# Refusals


def a_file(content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "bad.jsonl"
        path.write_text(content, encoding="utf-8")
        return path

    return write


SHORT = json.dumps({"id": "short", "prompt": "a", "target": "b"})


@pytest.mark.parametrize(
    ("make", "options", "code", "message"),
    [
        (None, "--budgets 4,x", 2, "budgets '4,x' are no whole numbers"),
        (None, "--budgets 4,", 2, "budgets '4,' are no whole numbers"),
        (None, "--budgets 4.5", 2, "budgets '4.5' are no whole numbers"),
        (None, "--budgets 0", 2, "budgets [0] are no numbers of keys"),
        (None, "--budgets=-4", 2, "budgets '-4' are no whole numbers"),
        (None, "--budgets 5000", 2, "budgets [5000] are no numbers of keys"),
        (None, "--budgets 60", 2, "0 of its 44 tokens see 61 keys or more"),
        (None, "--rows-per-head 0", 2, "--rows-per-head"),
        (None, "--rows-per-head many", 2, "--rows-per-head"),
        (None, "--rows-per-head 99", 2, "99 rows a head were asked for"),
        (None, "--nulls some", 2, "'some'"),
        (None, "--limit 0", 2, "--limit"),
        (None, "--limit 1 --cross-entropy", 2, "two traces or more, and there is 1"),
        (None, "--attention flash_attention_2", 3, "flash_attention_2"),
        (None, "--device cuda:99", 2, "cuda:99"),
        (None, "-m no/such-model", 3, "no/such-model"),
        (None, "-m ./nowhere", 2, "no such model folder or file"),
        (None, "--no-such-option", 2, "--no-such-option"),
        (a_file(SHORT), "", 2, "0 of its 3 tokens see 5 keys or more"),
        (a_file(""), "", 2, "it is empty"),
        (a_file('{"id": "a", "prompt": "p"}\n'), "", 2, "line 1: the field 'target' is missing"),
        (a_file(json.dumps({"id": "a", "prompt": "word " * 99, "target": "t"})), "", 2, "model's context of 64"),
        (a_file(json.dumps({"id": "a", "text": "word " * 40})), "--chat", 2, "no prompt to render"),
        (lambda folder: folder / "nowhere.jsonl", "", 2, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str],
    source: Path,
    model: Path,
    tmp_path: Path,
    make: Callable[[Path], Path] | None,
    options: str,
    code: int,
    message: str,
) -> None:
    asked = words(source if make is None else make(tmp_path), model, tmp_path / "out", *options.split())
    assert app.main(asked) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["error", "hint"]
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_strangers_folder_is_untouched(
    capsys: pytest.CaptureFixture[str], source: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert app.main(words(source, model, tmp_path / "out", "--force")) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.tex"]


# A kill


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that start with the slow imports done, so that a kill costs no more than the work it undoes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvlens.studies.ceilings", "transformers.models.llama.modeling_llama"])
    return context


def n_parts(out: Path) -> int:
    return sum(1 for _ in out.glob(".parts/*/*.part"))


def test_killed_at_many_instants_the_same_command_ends_in_the_same_bytes(
    processes: Any, model: Path, tmp_path: Path
) -> None:
    rows = [row | {"id": f"{row['id']} {number}"} for number in range(N_TRACES // 2) for row in tiny_runs.ROWS]
    source = tiny_runs.write_rows(tmp_path / "traces.jsonl", rows)
    out = tmp_path / "killed"
    for parts in (1, 12, 33):
        process = processes.Process(target=app.main, args=(words(source, model, out, "--quiet"),))
        process.start()
        while process.is_alive() and n_parts(out) < parts:
            time.sleep(0.0005)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert tiny_runs.state(out)["status"] == "running"
        assert parts <= n_parts(out) < 5 * N_TRACES
    for folder in (out, tmp_path / "whole"):
        process = processes.Process(target=app.main, args=(words(source, model, folder, "--quiet"),))
        process.start()
        process.join(240)
        assert process.exitcode == 0
    assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")
    assert (out / "summary.json").read_bytes() == (tmp_path / "whole" / "summary.json").read_bytes()
    assert {file.name for file in out.iterdir()} == {"run.json", "summary.json", *tiny_runs.hashes(out)}
    assert list(kvlens.load(out).rows.trace_id.unique()) == [row["id"] for row in rows]
