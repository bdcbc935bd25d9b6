"""`kvlens export` as a command: every source, every option, the defaults of each method, what it refuses."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import made_runs
import made_signals
import numpy as np
import pytest
import tiny_runs
import torch

import kvlens
from kvlens.cli import app
from kvlens.discover.simulate import Simulated, simulate
from kvlens.errors import InputError, VerdictNo
from kvlens.exporting import usual
from kvlens.policy import Budget
from kvlens.policy_file import PolicyFile, read_policy
from kvlens.scorers.interface import Facts

N_LAYERS, POSITIVE, NEGATIVE = 10, (1, 4), (6, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of bands: of both signs, of one, and of too few traces; and a ranking."""
    folder = tmp_path_factory.mktemp("runs")
    worlds = simulate(0, n_traces=24, n_layers=N_LAYERS, band=POSITIVE, rho=0.33, n_tokens=(120, 200))
    both = []
    for signal, label in worlds:
        signal = signal.copy()
        signal[:, slice(*NEGATIVE)] = -signal[:, [1, 2, 3, 2]]
        both.append(Simulated(signal, label))
    for name, chosen in {"both": both, "one": worlds, "few": both[:4]}.items():
        labels, signals = made_signals.pair(folder / name, chosen)
        kvlens.bands(labels, signals, folder / name / "bands")
    kvlens.signals(folder / "one" / "labels", folder / "one" / "signals", folder / "ranking")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))


def exported(out: Path, *words: str) -> PolicyFile:
    assert app.main(["export", *words, "-o", str(out), "--quiet"]) == 0
    return read_policy(out)


def without_date(policy: PolicyFile) -> dict[str, Any]:
    return policy.document() | {"created": ""}


# Sources


def test_bands_become_depths_and_evidence(folder: Path, tmp_path: Path) -> None:
    file = folder / "both" / "bands" / "bands.json"
    found = json.loads(file.read_text())
    kept = {band["sign"]: band for band in found["bands"]}
    assert {sign: (band["start"], band["stop"]) for sign, band in kept.items()} == {1: POSITIVE, -1: NEGATIVE}
    policy = exported(tmp_path / "p.json", str(file))
    assert policy.scorer.name == "epikv"
    parameters = policy.scorer.parameters
    assert (parameters["depth_a"], parameters["depth_b"]) == (2 / N_LAYERS, 7 / N_LAYERS)  # of 6 to 9 the lower middle
    assert parameters == {"window": 64, "score_prompt": True, "exclude_current": False} | {
        name: parameters[name] for name in ("depth_a", "depth_b")
    }
    assert policy.scorer.make().hidden_layers(Facts(N_LAYERS, 4, 2, 8, tuple(range(N_LAYERS)))) == (2, 7)
    assert policy.model is not None
    assert (policy.model.fingerprint, policy.model.n_layers, policy.model.n_kv_heads) == ("c0ffee-f00d", N_LAYERS, None)
    (evidence,) = policy.evidence
    assert evidence.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (evidence.file_schema, evidence.path) == ("kvlens.bands/1", str(file))
    assert evidence.numbers["n_traces"] == 24
    assert evidence.numbers["model"] == "made-up"
    for band in evidence.numbers["bands"]:  # type: ignore[union-attr]
        assert band["confirm_rho"] == kept[band["sign"]]["confirm_rho"]  # type: ignore[index, call-overload]


def test_a_folder_a_file_and_python_say_the_same(folder: Path, tmp_path: Path) -> None:
    run = folder / "both" / "bands"
    one = exported(tmp_path / "a.json", str(run))
    other = exported(tmp_path / "b.json", str(run / "bands.json"))
    third = kvlens.export(kvlens.load(run), tmp_path / "c.json")
    assert without_date(one) == without_date(other) == without_date(third)
    assert read_policy(tmp_path / "c.json") == third


@pytest.mark.parametrize("name", ["few", "one"])
def test_without_confirmed_bands_the_answer_is_no(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, name: str
) -> None:
    assert app.main(["export", str(folder / name / "bands"), "-o", str(tmp_path / "p.json")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["error", "hint"]
    assert ("found no band" if name == "few" else "confirmed no negative band") in err
    assert "--bands paper" in err
    assert not (tmp_path / "p.json").exists()
    with pytest.raises(VerdictNo):
        kvlens.export(folder / name / "bands", tmp_path / "p.json")


def test_the_depth_that_no_band_says_may_be_set(folder: Path, tmp_path: Path) -> None:
    policy = exported(tmp_path / "p.json", str(folder / "one" / "bands"), "--set", "depth_b=0.75")
    assert (policy.scorer.parameters["depth_a"], policy.scorer.parameters["depth_b"]) == (0.2, 0.75)
    both = str(folder / "both" / "bands")
    given = exported(tmp_path / "q.json", both, "--set", "depth_a=0.45", "--set", "window=9").scorer.parameters
    assert (given["depth_a"], given["depth_b"], given["window"]) == (0.45, 0.7, 9)
    (band,) = policy.evidence[0].numbers["bands"]  # type: ignore[misc]
    assert band["sign"] == 1  # type: ignore[index, call-overload]


def test_of_several_bands_of_a_sign_the_strongest_confirmed_one_counts(folder: Path, tmp_path: Path) -> None:
    found = json.loads((folder / "both" / "bands" / "bands.json").read_text())
    (band,) = (band for band in found["bands"] if band["sign"] == 1)
    weak = band | {"start": 0, "stop": 1, "confirm_rho": band["confirm_rho"] / 2}
    loud = band | {"start": 4, "stop": 6, "confirm_rho": 0.99, "confirmed": False}
    found["bands"] = [weak, loud, *found["bands"]]
    (tmp_path / "bands.json").write_text(json.dumps(found))
    policy = exported(tmp_path / "p.json", str(tmp_path / "bands.json"))
    assert policy.scorer.parameters["depth_a"] == 2 / N_LAYERS


def test_the_middle_of_the_papers_bands_are_the_papers_layers(folder: Path, tmp_path: Path) -> None:
    found = json.loads((folder / "both" / "bands" / "bands.json").read_text())
    found["layers"] = found["layers"][:1] * 32
    for trace in found["traces"]:
        trace["rho"] = [0.0] * 32
    for band in found["bands"]:
        band["start"], band["stop"] = (7, 14) if band["sign"] > 0 else (18, 26)
    (tmp_path / "bands.json").write_text(json.dumps(found))
    paper = exported(tmp_path / "paper.json", "--bands", "paper")
    assert exported(tmp_path / "p.json", str(tmp_path / "bands.json")).scorer == paper.scorer
    assert paper.scorer.parameters["depth_b"] == 21 / 32
    assert (paper.model, paper.evidence) == (None, ())


def test_another_scorer_may_take_the_depths(folder: Path, tmp_path: Path) -> None:
    policy = exported(tmp_path / "p.json", str(folder / "both" / "bands"), "--scorer", "hidden_change")
    assert (policy.scorer.name, policy.scorer.parameters["depth_b"]) == ("hidden_change", 0.7)
    paper = exported(tmp_path / "q.json", "--bands", "paper", "--scorer", "hidden_change")
    assert paper.scorer.parameters["depth_a"] == 10 / 32


def test_bands_themselves_go_to_a_scorer_that_takes_bands(folder: Path, tmp_path: Path) -> None:
    policy = exported(tmp_path / "p.json", str(folder / "both" / "bands"), "--scorer", "band_adaptive")
    found = json.loads((folder / "both" / "bands" / "bands.json").read_text())
    edges = {band["sign"]: [band["start"] / N_LAYERS, band["stop"] / N_LAYERS] for band in found["bands"]}
    assert (policy.scorer.parameters["band_a"], policy.scorer.parameters["band_b"]) == (edges[1], edges[-1])
    one = str(folder / "one" / "bands")
    assert app.main(["export", one, "--scorer", "band_adaptive", "-o", str(tmp_path / "q.json")]) == 1
    by_hand = exported(tmp_path / "q.json", one, "--scorer", "band_adaptive", "--set", "band_b=[0.5, 0.8]")
    assert by_hand.scorer.parameters["band_b"] == [0.5, 0.8]


def test_a_ranking_gives_its_weights(folder: Path, tmp_path: Path) -> None:
    fitted = json.loads((folder / "ranking" / "fitted.json").read_text())
    policy = exported(tmp_path / "p.json", str(folder / "ranking"))
    assert policy.scorer.name == "fitted"
    rows = fitted["features"]
    assert policy.scorer.parameters["signals"] == [row["signal"] for row in rows]
    assert policy.scorer.parameters["layers"] == [row["layer"] for row in rows]
    assert policy.scorer.parameters["weights"] == [row["ridge"] for row in rows]
    assert policy.scorer.make().weights == tuple(row["ridge"] for row in rows)  # type: ignore[attr-defined]
    (evidence,) = policy.evidence
    assert evidence.file_schema == "kvlens.fitted/1"
    assert evidence.sha256 == hashlib.sha256((folder / "ranking" / "fitted.json").read_bytes()).hexdigest()
    assert evidence.numbers["score"] == fitted["held_out"]["score"]
    assert policy.model is not None
    assert policy.model.n_layers == N_LAYERS
    nothing = tmp_path / "nothing.json"
    nothing.write_text(json.dumps(fitted | {"features": []}))
    assert app.main(["export", str(nothing), "-o", str(tmp_path / "q.json")]) == 1


def test_a_program_stands_beside_the_policy(model: Path, tmp_path: Path) -> None:
    words = ["export", "--scorer", "epikv", "-o", str(tmp_path / "p.json"), "--program", str(tmp_path / "p.pt2")]
    assert app.main(words) == 2  # of which model?
    assert not (tmp_path / "p.json").exists()
    assert app.main([*words, "-m", str(model)]) == 0
    loaded = torch.export.load(tmp_path / "p.pt2").module()
    d_model = tiny_runs.model().d_model
    nothing = torch.full((1, 2, 63), torch.nan, dtype=torch.float64)
    last, _, score = loaded(torch.full((1, 2, d_model), torch.nan), nothing, torch.ones(1, 2, d_model))
    assert torch.equal(last, torch.ones(1, 2, d_model))
    assert (score.shape, score.dtype) == ((1,), torch.float32)


def test_the_answer_names_the_program(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    words = ["--scorer", "keynorm", "-m", str(model), "--program", str(tmp_path / "a.pt2"), "-o", str(tmp_path / "p")]
    assert app.main(["export", *words]) == 0
    assert f"program       {tmp_path / 'a.pt2'} (what goes in" in capsys.readouterr().out


def test_a_program_replaces_only_itself(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    policy, program = tmp_path / "p.json", tmp_path / "p.pt2"
    words = ["export", "--scorer", "epikv", "-m", str(model), "-o", str(policy), "--program", str(program)]
    for content in (b"mine", None):
        if content is not None:
            program.write_bytes(content)
        else:
            with zipfile.ZipFile(program, "w") as archive:
                archive.writestr("thesis.tex", "mine")
        before = program.read_bytes()
        assert app.main(words) == 2
        assert "--force" in capsys.readouterr().err
        assert program.read_bytes() == before
        assert not policy.exists()
    assert app.main([*words, "--force"]) == 0
    assert app.main(words) == 0  # the same again
    made, said = program.read_bytes(), policy.read_bytes()
    assert app.main([*words, "--set", "window=9"]) == 2  # another one
    assert app.main([*words, "--sinks", "1", "--program", str(tmp_path / "q.pt2")]) == 2  # another policy
    assert not (tmp_path / "q.pt2").exists()
    assert app.main([*words, "--program", str(policy), "--force"]) == 2
    assert "are both" in capsys.readouterr().err
    assert (program.read_bytes(), policy.read_bytes()) == (made, said)
    assert app.main([*words, "--quiet"]) == 0
    assert capsys.readouterr().out == f"{policy}\n{program}\n"


# Options


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("", {}),
        ("--sinks 0 --recent 7", {"protect": {"sinks": 0, "prompt": False, "recent": 7}}),
        ("--protect-prompt", {"protect": {"sinks": 4, "prompt": True, "recent": 0}}),
        ("--trigger prefill", {"trigger": "prefill"}),
        ("--trigger every:32 --reduce head --storage ragged", {"trigger": "every:32", "reduce": "head", "storage": "ragged"}),  # noqa: E501
        ("--page-size 8", {"granularity": {"unit": "page", "page_size": 8}}),
        ("--allocate uniform", {}),
        ("--allocate pyramid", {"reduce": "layer", "allocate": {"name": "pyramid", "parameters": {"beta": 20.0}, "table": None}}),  # noqa: E501
        ("--allocate ada:alpha=0.5", {"reduce": "head", "storage": "ragged", "allocate": {"name": "ada", "parameters": {"alpha": 0.5}, "table": None}}),  # noqa: E501
        ("--allocate contour --storage uniform_cap", {"reduce": "head", "storage": "uniform_cap", "allocate": {"name": "contour", "parameters": {"floor": 32}, "table": None}}),  # noqa: E501
        ("--allocate contour_mass:floor=8", {"reduce": "head", "storage": "ragged", "allocate": {"name": "contour_mass", "parameters": {"floor": 8}, "table": None}}),  # noqa: E501
        ("--budget-tokens 64", {"budget": {"tokens": 64, "bytes": None, "keep_fraction": None}}),
        ("--budget-bytes 4096", {"budget": {"tokens": None, "bytes": 4096, "keep_fraction": None}}),
        ("--keep-fraction 0.25", {"budget": {"tokens": None, "bytes": None, "keep_fraction": 0.25}}),
        ("--set seed=7", {"scorer": {"name": "random", "parameters": {"seed": 7}}}),
    ],
)  # fmt: skip
def test_options_become_fields(tmp_path: Path, words: str, changed: dict[str, Any]) -> None:
    plain = exported(tmp_path / "plain.json", "--scorer", "random")
    assert plain.scorer.parameters == {"seed": 0}
    assert plain.budget.tokens == 512
    policy = exported(tmp_path / "p.json", "--scorer", "random", *words.split())
    assert without_date(policy) == without_date(plain) | changed


def test_a_table_of_budgets_comes_from_python(tmp_path: Path) -> None:
    rows = [[8, 16], [12, 12]]
    made = kvlens.export(
        None, tmp_path / "p.json", scorer="keynorm", reduce="head", allocate={"name": "table", "table": rows}
    )
    assert read_policy(tmp_path / "p.json") == made
    assert made.document()["allocate"]["table"] == rows


@pytest.mark.parametrize(
    ("scorer", "budget", "fields"),
    [
        ("epikv", {"tokens": 512}, {"protect": {"recent": 128, "prompt": True}}),
        ("epikv", {"tokens": 100}, {"protect": {"recent": 25, "prompt": True}}),
        ("hidden_change", {"bytes": 10**6}, {"protect": {"recent": 128, "prompt": True}}),
        ("band_adaptive", {"keep_fraction": 0.5}, {"protect": {"recent": 128}}),
        ("h2o", {"tokens": 64}, {"protect": {"recent": 32}, "reduce": "head"}),
        ("snapkv", {"tokens": 512}, {"protect": {"recent": 64}, "reduce": "head", "trigger": "prefill"}),
        ("raas", {"tokens": 512}, {"protect": {"prompt": True}}),
        ("tova", {"tokens": 512}, {"reduce": "layer"}),
        ("sliding_window", {"tokens": 512}, {}),
        ("surprise", {"tokens": 512}, {}),
    ],
)
def test_each_method_has_its_papers_defaults(scorer: str, budget: dict[str, Any], fields: dict[str, Any]) -> None:
    assert usual(scorer, Budget(**budget)) == fields


def test_defaults_reach_the_file_and_give_way_to_options(tmp_path: Path) -> None:
    plain = exported(tmp_path / "a.json", "--scorer", "epikv").protect
    assert (plain.sinks, plain.recent, plain.prompt) == (4, 128, True)
    asked = exported(
        tmp_path / "b.json", "--scorer", "epikv", "--no-protect-prompt", "--recent", "0", "--sinks", "1"
    ).protect
    assert (asked.sinks, asked.recent, asked.prompt) == (1, 0, False)


def test_the_model_block(model: Path, folder: Path, tmp_path: Path) -> None:
    at_hand = tiny_runs.model()
    made_for = exported(tmp_path / "p.json", "--scorer", "random", "-m", str(model)).model
    assert made_for is not None
    assert made_for.model_dump() == {
        name: getattr(at_hand, name) for name in ("fingerprint", "n_layers", "n_kv_heads", "d_head")
    }
    assert kvlens.export(None, tmp_path / "q.json", scorer="random", model=at_hand).model == made_for
    with pytest.raises(InputError, match="10 layers, tiny has 3"):
        kvlens.export(folder / "both" / "bands", tmp_path / "r.json", model=at_hand)


# Answers


def test_the_answer_for_people_and_as_json(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    words = ["export", str(folder / "both" / "bands"), "-o", str(tmp_path / "p.json")]
    assert app.main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    facts = dict(line.strip().split("  ", 1) for line in out.splitlines())
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["scorer"] == "epikv"
    assert facts["with"].startswith("depth_a 0.2, depth_b 0.7, window 64")
    assert facts["budget"] == "512 tokens a head"
    assert facts["protected"] == "4 first, 128 last, the prompt"
    assert facts["model"] == "10 layers, fingerprint c0ffee-f00d"
    assert facts["file"] == str(tmp_path / "p.json")
    assert app.main([*words, "--json"]) == 0  # the same policy again: nothing to refuse
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document.pop("path") == str(tmp_path / "p.json")
    assert document == json.loads((tmp_path / "p.json").read_text())
    assert app.main([*words, "--quiet"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'p.json'}\n", "")


# Refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "nothing to export was named"),
        ("--scorer oracle", "offline only"),
        ("--scorer epiky", "there is no scorer 'epiky'"),
        ("--scorer random --set seed=x", "seed is 'x'"),
        ("--scorer random --set seed=NaN", "seed is 'NaN'"),
        ("--scorer random --set seed=-1", "seed is -1"),
        ("--scorer random --set seed", "no KEY=VALUE"),
        ("--scorer random --set =1", "no KEY=VALUE"),
        ("--scorer random --set seed=1 --set seed=2", "given twice"),
        ("--scorer random --set sead=1", "no parameter 'sead'"),
        ("--scorer random --budget-tokens 0", "--budget-tokens"),
        ("--scorer random --budget-tokens 9 --keep-fraction 0.5", "one of tokens, bytes and keep_fraction"),
        ("--scorer random --keep-fraction 1.5", "less than or equal to 1"),
        ("--scorer random --keep-fraction nan", "keep_fraction"),
        ("--scorer random --keep-fraction=-0.5", "greater than 0"),
        ("--scorer random --sinks 600", "do not fit into 512 tokens"),
        ("--scorer random --trigger every:0", "none of prefill, step, every:H"),
        ("--scorer random --storage sparse", "sparse"),
        ("--scorer random --allocate table", "needs its table of budgets"),
        ("--scorer random --allocate nobody", "there is no allocator 'nobody'"),
        ("--scorer random --allocate contour:flor=3", "no parameter 'flor'"),
        ("--scorer random --allocate contour:floor=-1", "floor is -1"),
        ("--scorer random --allocate contour:floor", "--allocate 'floor' is no KEY=VALUE"),
        ("--scorer random --allocate ada:alpha=1.5", "alpha is 1.5"),
        ("--scorer random --allocate pyramid:beta=0.5", "beta is 0.5"),
        ("--scorer random --allocate ada --reduce layer", "needs reduce 'head'"),
        ("--scorer random --allocate contour --reduce all", "needs reduce 'head'"),
        ("--scorer random --allocate pyramid --reduce all", "every head keeps the same tokens"),
        ("--scorer random --allocate contour_mass --page-size 8", "granularity.unit 'token'"),
        ("--scorer random --allocate contour --budget-tokens 35", "the floor of allocate contour"),
        ("--scorer surprise --allocate ada", "reads the same tokens in every layer and head"),
        ("--scorer random -m ./nowhere", "no such model folder or file"),
        ("--bands paper --scorer random", "takes no depths of bands"),
        ("--bands theirs", "theirs"),
        ("{both} --bands paper", "bands and a source were both given"),
        ("{both} --scorer random", "takes no depths of bands"),
        ("{ranking} --scorer epikv", "fitted weights, which scorer epikv does not take"),
        ("{folder}/one/labels", "it is a run of schema 'kvlens.labels/1'"),
        ("{folder}", "it has no run.json"),
        ("{folder}/nowhere", "there is no such file or folder"),
        ("{here}/text.json", "no JSON object with a schema"),
        ("{here}/list.json", "no JSON object with a schema"),
        ("{here}/deep.json", "no JSON object with a schema"),
        ("{here}/other.json", "its schema is 'kvlens.policy/1'"),
        ("{here}/bands.json", "damaged or no bands"),
        ("{here}/fitted.json", "damaged"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, words: str, says: str
) -> None:
    for name, content in {
        "text": "not json",
        "list": "[1]",
        "deep": "[" * 100_000,
        "other": '{"schema": "kvlens.policy/1"}',
        "bands": '{"schema": "kvlens.bands/1", "traces": 3}',
        "fitted": '{"schema": "kvlens.fitted/1", "features": 3}',
    }.items():
        (tmp_path / f"{name}.json").write_text(content)
    places = {
        "{both}": folder / "both" / "bands",
        "{ranking}": folder / "ranking",
        "{folder}": folder,
        "{here}": tmp_path,
    }
    for name, place in places.items():
        words = words.replace(name, str(place))
    assert app.main(["export", *words.split(), "-o", str(tmp_path / "out.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["error", "hint"]
    assert says in err
    assert not (tmp_path / "out.json").exists()


def test_a_source_changed_since_its_run_is_refused(tmp_path: Path) -> None:
    worlds = simulate(0, n_traces=4, n_layers=3, band=(0, 1), rho=0.3, n_tokens=(90, 120))
    run = kvlens.bands(*made_signals.pair(tmp_path, worlds), tmp_path / "bands")
    (tmp_path / "bands" / "bands.json").write_text(json.dumps(run.documents["bands"] | {"verdict": "bands"}))
    with pytest.raises(InputError, match="changed since the run wrote it"):
        kvlens.export(tmp_path / "bands", tmp_path / "p.json")


def test_bands_of_another_signal_are_refused(folder: Path, tmp_path: Path) -> None:
    found = json.loads((folder / "both" / "bands" / "bands.json").read_text()) | {"signal": "key_var"}
    (tmp_path / "bands.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match="bands of 'key_var'"):
        kvlens.export(tmp_path / "bands.json", tmp_path / "p.json")


@pytest.mark.parametrize("out", ["bands.json", "run.json"])
def test_force_never_replaces_the_source(capsys: pytest.CaptureFixture[str], folder: Path, out: str) -> None:
    run = folder / "both" / "bands"
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    for source in (run, run / "bands.json"):
        target = run / out
        if source == run or out == "bands.json":
            assert app.main(["export", str(source), "-o", str(target), "--force"]) == 2
            assert "the source is read from there" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


def test_another_policy_needs_force(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    exported(out, "--scorer", "random")
    content = out.read_bytes()
    capsys.readouterr()
    words = ["export", "--scorer", "random", "--sinks", "1", "-o", str(out)]
    assert app.main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_bytes() == content
    assert app.main([*words, "--force"]) == 0
    assert read_policy(out).protect.sinks == 1
    made_runs.write(tmp_path / "labels", {"apples": made_runs.APPLES})
    assert app.main(["export", "--scorer", "random", "-o", str(tmp_path / "labels"), "--force"]) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_numpy_parameters_are_written_as_numbers(tmp_path: Path) -> None:
    made = kvlens.export(None, tmp_path / "p.json", scorer="epikv", parameters={"window": np.int64(32)})
    assert made.scorer.parameters["window"] == 32
    with pytest.raises(InputError, match="hold what no file can"):
        kvlens.export(None, tmp_path / "q.json", scorer="epikv", parameters={"window": object()})
    for wrong in ("x", 1.5, -1, True):
        with pytest.raises(InputError, match=r"valid integer|greater than or equal"):
            PolicyFile(**made.document() | {"protect": {"sinks": wrong}})


@pytest.mark.parametrize("what", ["-o", "--program"])
def test_force_never_replaces_the_models_own_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str
) -> None:
    model = tiny_runs.save_model(tmp_path / "model")
    for name in ("config.json", "model.safetensors"):
        before = (model / name).read_bytes()
        words = ["--scorer", "keynorm", "-m", str(model), "--force"]
        words += [what, str(model / name)] + (["-o", str(tmp_path / "p.json")] if what == "--program" else [])
        assert app.main(["export", *words]) == 2
        assert "is a file of the model itself" in capsys.readouterr().err
        assert (model / name).read_bytes() == before
    assert not (tmp_path / "p.json").exists()
    exported(model / "p.json", "--scorer", "keynorm", "-m", str(model))  # beside them it may lie
    exported(model / "p.json", "--scorer", "random", "-m", str(model), "--force")


@pytest.mark.parametrize("program", ["no/folder/a.pt2", "folder"])
def test_where_no_program_can_be_no_policy_is_left(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, program: str
) -> None:
    (tmp_path / "folder").mkdir()
    words = ["--scorer", "keynorm", "-m", str(model), "--program", str(tmp_path / program), "--force"]
    assert app.main(["export", *words, "-o", str(tmp_path / "p.json")]) == 2
    assert "folder" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_a_policy_that_could_not_be_read_again_is_not_written(folder: Path, tmp_path: Path) -> None:
    bands = json.loads((folder / "both" / "bands" / "bands.json").read_text())
    nested: Any = 1
    for _ in range(12):
        nested = [nested]
    for changes in ({"intervention": "a" * 300_000}, {"n_traces": nested}, {"intervention": "\ud800"}):
        source = tmp_path / "bands.json"
        source.write_text(json.dumps(bands | changes))
        with pytest.raises(InputError, match=r"could not be read again|intervention|n_traces"):
            kvlens.export(source, tmp_path / "p.json")
        assert not (tmp_path / "p.json").exists()
    table = {"name": "table", "table": [[512] * 400] * 200}
    with pytest.raises(InputError, match="could not be read again"):
        kvlens.export(None, tmp_path / "p.json", scorer="random", reduce="head", allocate=table)
