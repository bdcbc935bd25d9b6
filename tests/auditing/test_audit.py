"""The audit from end to end: cheats fail, kvlens' own methods hold, visibility is told apart, slips are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_audit as made
import pytest
import tiny_runs
import torch

import kvlens
from kvlens.auditing.audit import Job
from kvlens.auditing.bytes import verdict
from kvlens.auditing.settings import NOT_BY_NAME, Settings
from kvlens.auditing.visibility import AGNOSTIC, AWARE, asked, cases
from kvlens.cli import app
from kvlens.errors import InputError
from kvlens.model import Model
from kvlens.policy import Protect
from kvlens.runtime.cache import HeldLayer
from kvlens.scorers.table import TABLE
from kvlens.texts import tokenize

HALF: dict[str, Any] = {"keep_fraction": 0.5, "sinks": 2, "recent": 3, "target_tokens": 12}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_runs.model(head_dim=8, num_hidden_layers=3)


def rows(model: Model, out: Path, **settings: Any) -> dict[Any, dict[str, Any]]:
    found = kvlens.audit([settings.pop("trace", made.TEXT)], model, out, **HALF | settings)
    return {(row["method"], row["visibility"]): row for row in found.documents["audit"]["rows"]}


def audited(model: Model, *methods: Any) -> list[dict[str, Any]]:
    """Rows of methods that are no policy, scorer or press."""
    read = asked([made.TEXT], question_last=False, chat=False)
    texts = cases([tokenize(read[0][0], model.tokenizer, target_tokens=12)], [False], question_last=False)
    settings = Settings(0.5, Protect(), methods, None)
    job = Job(model, settings, texts, 0, lambda *_: None, lambda *_: None)
    full = job._full(texts[0])
    return [job.row(method, texts[0], full) for method in methods]


def keep_behind_a_view(self: HeldLayer, index: torch.Tensor) -> None:
    """An eviction that cuts the cache short without copying it."""
    for part in range(2):
        self._set_room(part, (self.keys, self.values)[part][:, :, : index.shape[2]])


def test_cheats_fail(model: Model) -> None:
    masks, hoards = audited(model, made.Cheat(), made.Hoarder())
    assert masks["simulated"]
    assert masks["physical_bytes"] == masks["full_bytes"] > masks["claimed_bytes"] * 1.9
    assert hoards["physical_bytes"] >= hoards["full_bytes"] > hoards["claimed_bytes"] * 1.8
    assert hoards["side_bytes"] > 0.4 * hoards["full_bytes"]
    for row in (masks, hoards):
        assert verdict(row["claimed_bytes"], row["physical_bytes"]) == "claim not met"


def test_a_runtime_that_keeps_the_old_storage_behind_a_view_fails(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows(model, tmp_path / "a", scorers=["keynorm"])["keynorm", AGNOSTIC]["verdict"] == "holds"
    monkeypatch.setattr(HeldLayer, "evict", keep_behind_a_view)
    row = rows(model, tmp_path / "b", scorers=["keynorm"])["keynorm", AGNOSTIC]
    assert row["verdict"] == "claim not met"
    assert row["simulated"]


def test_every_scorer_of_kvlens_holds_what_it_claims(model: Model, tmp_path: Path) -> None:
    found = rows(model, tmp_path, scorers=["all"])
    assert {name for name, _ in found} == {"full", *TABLE} - {*NOT_BY_NAME}
    for (name, _), row in found.items():
        assert row["verdict"] == "holds", name
        assert not row["simulated"]
        assert row["n_texts"] == 1
    n_seen = kvlens.load(tmp_path).cases.n_seen[0]
    one = 2 * 2 * 8 * 4 * 3
    assert found["full", AGNOSTIC]["physical_bytes"] == n_seen * one
    assert found["full", AGNOSTIC]["kl_nats"] == pytest.approx(0, abs=1e-9)
    assert found["random", AGNOSTIC]["physical_bytes"] - found["random", AGNOSTIC]["side_bytes"] == n_seen // 2 * one
    assert found["random", AGNOSTIC]["kept_tokens_total"] == n_seen // 2 * 6
    assert found["random", AGNOSTIC]["kl_nats"] > 1e-3


def test_policies_keep_their_own_budget_or_take_the_common_one(model: Model, tmp_path: Path) -> None:
    policy = tmp_path / "few.json"
    kvlens.export(None, policy, scorer="random", budget_tokens=20, trigger="step")
    own = rows(model, tmp_path / "own", policies=[policy], keep_fraction=None)["policy:few", AGNOSTIC]
    common = rows(model, tmp_path / "common", policies=[policy])["policy:few", AGNOSTIC]
    assert own["kept_tokens_total"] == 20 * 6
    assert common["kept_tokens_total"] == kvlens.load(tmp_path / "common").cases.n_seen[0] // 2 * 6


def test_question_last_asks_before_and_after(model: Model, tmp_path: Path) -> None:
    for trace, name in ((made.PROMPT, "prompt"), (made.ASKED, "asked/1")):
        out = tmp_path / trace.id
        found = rows(model, out, trace=trace, scorers=["random"], question_last=True)
        assert set(found) == {("full", AGNOSTIC), ("full", AWARE), ("random", AGNOSTIC), ("random", AWARE)}
        held = kvlens.load(out).cases
        assert set(held.trace_id) == {name}
        before, after = (held[held.visibility == kind].n_seen.iloc[0] for kind in (AGNOSTIC, AWARE))
        n_context = len(model.tokenizer(2 * made.WORDS)["input_ids"])
        assert before == pytest.approx(n_context, abs=2)
        assert before < after
        differences = kvlens.load(out).documents["audit"]["differences"]
        assert [one["method"] for one in differences] == ["full", "random"]
        change = found["random", AGNOSTIC]["kl_nats"] - found["random", AWARE]["kl_nats"]
        assert differences[1]["kl_nats_before_less_after"] == pytest.approx(change)


def test_what_was_seen_decides_the_word() -> None:
    tokens = [tokenize(trace, tiny_runs.model().tokenizer) for trace in (made.PROMPT, made.TEXT)]
    found = cases(tokens, [False, False], question_last=False)
    assert [case.visibility for case in found] == [AWARE, AGNOSTIC]
    assert [case.n_seen for case in found] == [one.n_context - 1 for one in tokens]


def test_a_run_goes_on_where_it_stopped_and_is_never_overwritten(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, calls = Job.row, []

    def counted(self: Job, method: Any, case: Any, full: Any) -> dict[str, Any]:
        calls.append(method.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return row(self, method, case, full)

    monkeypatch.setattr(Job, "row", counted)
    with pytest.raises(KeyboardInterrupt):
        rows(model, tmp_path, scorers=["random", "keynorm"])
    again = rows(model, tmp_path, scorers=["random", "keynorm"])
    assert calls == ["full", "random", "keynorm", "keynorm"]
    assert len(again) == 3
    assert rows(model, tmp_path, scorers=["random", "keynorm"]) == again
    with pytest.raises(InputError, match="different configuration"):
        rows(model, tmp_path, scorers=["random"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "an audit of nothing"),
        ({"scorers": ["random"], "keep_fraction": None}, "no budget of their own"),
        ({"scorers": ["random"], "keep_fraction": 1.5}, "a budget of 1.5"),
        ({"scorers": ["random"], "keep_fraction": 0.0}, "a budget of 0.0"),
        ({"scorers": ["random"], "keep_fraction": 0.01}, "less than the 5 protected ones"),
        ({"scorers": ["rondom"]}, "there is no scorer"),
        ({"scorers": ["oracle"]}, "replays labels"),
        ({"scorers": ["random"], "trace": made.TEXT, "question_last": True}, "asks nothing"),
        ({"presses": ["duoattention"]}, "over the network"),
    ],
)
def test_slips_are_refused_with_a_hint(model: Model, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        rows(model, tmp_path / "out", **settings)
    assert refused.value.hint
    assert not (tmp_path / "out").exists()


def test_what_an_allocator_keeps_anyhow_must_fit_the_common_budget(model: Model, tmp_path: Path) -> None:
    kvlens.export(None, tmp_path / "p.json", scorer="h2o", allocate="contour", keep_fraction=0.5)
    with pytest.raises(InputError, match=r"keeps 34 tokens whatever the budget says, more than 0\.2 of the"):
        rows(model, tmp_path / "out", policies=[tmp_path / "p.json"], keep_fraction=0.2)


def test_predictions_that_are_no_numbers_are_no_result(tmp_path: Path) -> None:
    broken = tiny_runs.model(head_dim=8)
    with torch.no_grad():
        broken.hf.lm_head.weight.fill_(torch.inf)
    for row in rows(broken, tmp_path, scorers=["random"]).values():
        assert row["verdict"].startswith("refused: its predictions, or the full cache's, are no finite numbers")
        assert row["kl_nats"] is None


def test_seeds_reach_what_draws(model: Model, tmp_path: Path) -> None:
    found = [rows(model, tmp_path / str(seed), scorers=["random", "keynorm"], seed=seed) for seed in (0, 0, 7)]
    losses = [[row["kl_nats"] for row in these.values()][1:] for these in found]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[2][0]
    assert losses[0][1] == losses[2][1]


def test_texts_of_one_name_are_refused(model: Model, tmp_path: Path) -> None:
    other = replace(made.TEXT, id=f"{made.ASKED.id}/1")
    with pytest.raises(InputError, match="two texts are called 'asked/1'"):
        kvlens.audit([made.ASKED, other], model, tmp_path / "out", scorers=["random"], keep_fraction=0.5)


def test_budgets_above_the_length_and_other_models_policies_are_refused(model: Model, tmp_path: Path) -> None:
    long, other = tmp_path / "long.json", tmp_path / "other.json"
    kvlens.export(None, long, scorer="random", budget_tokens=5000)
    kvlens.export(None, other, scorer="random", budget_tokens=20)
    document = json.loads(other.read_text())
    document["model"] = {"fingerprint": None, "n_layers": 30, "n_kv_heads": 3, "d_head": 64}
    other.write_text(json.dumps(document))
    with pytest.raises(InputError, match="keeps 5,000 tokens"):
        rows(model, tmp_path / "out", policies=[long], keep_fraction=None)
    with pytest.raises(InputError, match="another architecture"):
        rows(model, tmp_path / "out", policies=[other])


def test_the_command_answers_in_a_table_in_json_and_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))
    folder = tiny_runs.save_model(tmp_path / "model", head_dim=8)
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"id": "text", "text": made.TEXT.text}))
    words = ["audit", str(file), "-m", str(folder), "-o", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--keep-fraction", "0.5", "--recent", "3", "--target-tokens", "12", "--scorer", "random"]
    assert app.main(words) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("full", "random"))] == ["full", "random"]
    assert "query_agnostic" in out
    assert app.main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["schema"] == "kvlens.audit/1"
    wanted = "method source claimed_bytes physical_bytes side_bytes peak_bytes full_bytes simulated visibility "
    wanted += "kept_tokens_total kl_nats next_token_agreement verdict"
    assert set(wanted.split()) <= set(document["rows"][0])
    monkeypatch.setattr(HeldLayer, "evict", keep_behind_a_view)
    assert app.main([*words, "--force"]) == 1
    out, err = capsys.readouterr()
    assert "claim not met (simulated)" in out
    assert "1 of 2 rows hold more than they claim" in err
