"""`kvlens.ceilings`: are the tables the definitions' over the model's own attention, and a second start no second run?

The truth is written out here: weights that the eager model reports, values from its cache, every subset of the pool.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pandas as pd
import pyarrow.parquet as pq
import pytest
import tiny
import tiny_runs
import tiny_tokenizers
import torch

import kvlens
from kvlens import model as models
from kvlens.discover.nulls import NULLS
from kvlens.errors import EnvironmentLacks, InputError, ModelRefused
from kvlens.model import Model, wrap
from kvlens.probe.rows import choose_queries
from kvlens.records import Trace
from kvlens.schemas import CEILINGS, CEILINGS_TABLES
from kvlens.studies import ceilings as studying
from kvlens.texts import tokenize

MODEL = tiny_runs.model(max_position_embeddings=64)
TRACES = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
TOKENS = {trace.id: tokenize(trace, MODEL.tokenizer) for trace in TRACES}
SHORT = Trace("short", prompt="a", target="b")
BUDGETS, ROWS = (2, 4), 3
AT = ["trace_id", "layer", "head", "query"]
SAME = 1 + 1e-9
ATOL = 2e-4  # beside values of length 1 to 5: two float32 passes of a model drawn wide


def measure(out: Path, traces: list[Trace] = TRACES, model: Model = MODEL, **asked: Any) -> kvlens.Run:
    return kvlens.ceilings(traces, model, out, **{"budgets": BUDGETS, "rows_per_head": ROWS} | asked)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> kvlens.Run:
    return measure(tmp_path_factory.mktemp("runs") / "run", cross_entropy=True)


# The truth


@torch.no_grad()
def states(build: Callable[[], Any], ids: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of every layer, in float64: eager weights [head, query, key], keys and values [kv_head, key, d_head]."""
    model = wrap(build())
    kept = models.new_cache(model)
    models.hidden(model, ids[None], cache=kept)
    layers = [(keys[0].double().numpy(), values[0].double().numpy()) for keys, values in models.cache_layers(kept)]
    weights = [layer.astype(float) for layer in oracles.eager_weights(build, ids)]
    return [(p, *pair) for p, pair in zip(weights, layers, strict=True)]


@cache
def all_sets(n: int, size: int) -> np.ndarray:
    return np.array(list(combinations(range(n), size)))


def error(p: np.ndarray, v: np.ndarray, kept: Any, sink: float) -> float:
    """||mu - m_A||, a learned sink being a key of value 0 that is always kept."""
    return float(np.linalg.norm(p @ v - p[kept] @ v[kept] / (p[kept].sum() + sink)))


def truth(p: np.ndarray, v: np.ndarray, budget: int, sink: float = 0.0) -> dict[str, float]:
    """What one row's columns should be; `p` and `v` of the keys it sees."""
    p = p * (1 - sink) / p.sum()
    mu = p @ v
    by_weight = np.argsort(-p, kind="stable")
    top, rest = by_weight[:budget], by_weight[budget:]
    single = p[rest] * np.linalg.norm(v[rest] - mu, axis=1)
    pool = np.r_[top, rest[np.argsort(-single, kind="stable")[:24]]]  # 24 keys at budgets up to 4
    sets = pool[all_sets(len(pool), budget)]
    outputs = (p[sets][:, :, None] * v[sets]).sum(1) / (p[sets].sum(1) + sink)[:, None]
    contributions = p[:, None] * (v - mu)
    spectrum = np.linalg.eigvalsh(contributions.T @ contributions)
    return {
        "top_mass_error": error(p, v, top, sink),
        "best_error": float(np.linalg.norm(mu - outputs, axis=1).min()),
        "dropped_mass": 1 - sink - p[top].sum(),
        "n_subsets": len(sets),
        "scope": "all" if len(pool) == len(p) else "pool",
        "sigma": float(np.sqrt(p @ ((v - mu) ** 2).sum(1) + sink * (mu @ mu))),
        "effective_rank": spectrum.sum() ** 2 / (spectrum**2).sum(),
    }


def compare(rows: pd.DataFrame, build: Callable[[], Any], ids: torch.Tensor, sinks: bool, sliding: Any) -> None:
    """Every line of one trace against its truth."""
    layers = states(build, ids)
    for row in rows.itertuples():
        weights, _, values = layers[row.layer]
        window = sliding[row.layer] or len(ids)
        seen = slice(max(0, row.query + 1 - window), row.query + 1)
        assert row.n_keys == len(range(len(ids))[seen])
        p = weights[row.head, row.query]
        v = values[row.head // (len(weights) // len(values)), seen]
        expected = truth(p[seen], v, row.budget, sink=float(1 - p.sum()) if sinks else 0.0)
        for name, value in expected.items():
            if isinstance(value, float):
                assert getattr(row, name) == pytest.approx(value, rel=2e-3, abs=ATOL), (name, row)
            else:
                assert getattr(row, name) == value, (name, row)


# Tables


def test_tables_are_as_the_contract_says(run: kvlens.Run) -> None:
    folder, meta = Path(run.path), run.meta
    for name, schema in CEILINGS_TABLES.items():
        assert pq.read_schema(folder / f"{name}.parquet").equals(schema)
        assert meta["tables"][name]["rows"] == len(run[name]) > 0
    files = [*(f"{name}.parquet" for name in CEILINGS_TABLES), "run.json", "summary.json"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(files)
    assert (meta["schema"], meta["status"], meta["dtype"], meta["seed"]) == (CEILINGS, "complete", "float32", 0)
    assert meta["model"] == {"name": "tiny", "fingerprint": MODEL.fingerprint, "note": ""}
    assert meta["config"] == {
        "budgets": [2, 4], "rows_per_head": 3, "nulls": list(NULLS), "cross_entropy": True, "chat": False,
        "beyond_context": False,
    }  # fmt: skip
    n_rows = len(TRACES) * 3 * 4 * ROWS
    assert meta["counts"] == {"skipped": [], "traces": 2, "rows": n_rows, "instances": 2 * n_rows}
    again = kvlens.load(folder)
    for name in CEILINGS_TABLES:
        pd.testing.assert_frame_equal(again[name], run[name])
    assert again.documents == run.documents


def test_rows_are_those_of_every_trace_layer_and_head_at_the_drawn_queries(run: kvlens.Run) -> None:
    expected = [
        (tokens.trace.id, layer, head, query, budget)
        for tokens in TOKENS.values()
        for layer, of_layer in enumerate(choose_queries(MODEL, tokens, rows_per_head=ROWS, least_keys=5).tolist())
        for head in range(4)
        for query in of_layer[head // 2]
        for budget in BUDGETS
    ]
    found = run.rows[[*AT, "budget"]].itertuples(index=False, name=None)
    assert list(found) == expected
    n_rows = len(expected) // 2
    for name, times in {"nulls": len(NULLS) * 2, "statistics": 1, "excess": 4 * 2, "groups": 1}.items():
        assert len(run[name]) == times * n_rows
        heads = ["trace_id", "layer", "first_head", "query"] if name == "groups" else AT
        of_group = run.rows.assign(first_head=run.rows["head"] // 2 * 2)
        assert set(map(tuple, run[name][heads].to_numpy())) == set(map(tuple, of_group[heads].to_numpy()))


def test_errors_are_those_of_every_subset_over_the_models_own_attention(run: kvlens.Run) -> None:
    assert set(run.rows.scope) == {"all", "pool"}
    for trace_id, tokens in TOKENS.items():
        ids = torch.from_numpy(tokens.ids)
        compare(run.rows[run.rows.trace_id == trace_id], tiny_runs.hf_model, ids, False, [None] * 3)


def test_ratios_are_those_of_the_errors(run: kvlens.Run) -> None:
    for table in (run.rows, run.nulls):
        assert (table.top_mass_error > 0).all()
        np.testing.assert_allclose(table.kappa, table.top_mass_error / table.best_error, rtol=1e-12)
        np.testing.assert_allclose(table.ceiling, 1 - table.best_error / table.top_mass_error, atol=1e-12)
        assert table.closable.equals(table.kappa > 1.11)
        assert 0 < table.closable.mean() < 1


def test_no_choice_beats_the_best_one_of_its_scope(run: kvlens.Run) -> None:
    rows = run.rows
    assert rows.exact.all()
    assert (rows.best_error <= rows.balanced_error * SAME).all()
    assert (rows.balanced_error <= rows.top_mass_error * SAME).all()
    assert (rows.best_error < rows.balanced_error / SAME).any()
    assert (rows.balanced_all_error <= rows.top_mass_error * SAME).all()
    within = rows[rows.scope == "all"]
    np.testing.assert_allclose(within.balanced_all_error, within.balanced_error, rtol=1e-9)
    assert (rows.free_error <= rows.best_error * SAME).all()
    assert (rows.free_top_error <= rows.top_mass_error * SAME).all()
    assert (rows.free_search_error < rows.free_error / SAME).any()
    for name in ("free", "free_top", "free_search"):
        assert rows[f"{name}_gap"].between(0, 1e-6).all()
    assert (run.nulls.best_error <= run.nulls.top_mass_error * SAME).all()
    excess = run.excess.merge(rows[[*AT, "budget", "scope", "best_error"]], on=[*AT, "budget"], validate="m:1")
    np.testing.assert_allclose(excess.excess, excess.error / excess.best_error, rtol=1e-9)
    whole = excess[excess.scope == "all"]
    assert set(whole.rule) == {"streaming", "key_norm", "value_weighted", "random"}
    assert (whole.excess >= 1 / SAME).all()
    wider = rows.pivot(index=AT, columns="budget", values=["best_error", "dropped_mass", "scope"])
    whole = (wider["scope"] == "all").all(axis=1)
    assert (wider["dropped_mass"][4] < wider["dropped_mass"][2]).all()
    assert (wider["best_error"][4] < wider["best_error"][2])[whole].mean() > 0.9


def test_null_rows_keep_the_weights_and_lose_the_values(run: kvlens.Run) -> None:
    both = run.nulls.merge(run.rows, on=[*AT, "budget"], suffixes=("", "_real"), validate="m:1")
    assert both["null"].value_counts().to_dict() == dict.fromkeys(NULLS, len(run.rows))
    np.testing.assert_allclose(both.dropped_mass, both.dropped_mass_real, rtol=1e-12)
    for _, part in both.groupby("null"):
        assert (np.abs(part.top_mass_error / part.top_mass_error_real - 1) > 1e-6).mean() > 0.95
    median = both.groupby("null").ceiling.median()
    assert median["rank 4"] > 2 * median["gaussian"]  # in few dimensions sets balance more easily


def test_rules_groups_and_statistics_are_recomputed(run: kvlens.Run) -> None:
    ids = torch.from_numpy(TOKENS["sum"].ids)
    layers = states(tiny_runs.hf_model, ids)
    of_trace = {name: run[name][run[name].trace_id == "sum"] for name in ("excess", "groups", "statistics")}

    def row(layer: int, head: int, query: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights, keys, values = layers[layer]
        p = weights[head, query, : query + 1]
        return p / p.sum(), values[head // 2, : query + 1], np.linalg.norm(keys[head // 2, : query + 1], axis=1)

    n_compared = Counter[str]()
    for line in of_trace["excess"].itertuples():
        p, v, norms = row(line.layer, line.head, line.query)
        s, n = line.budget, len(p)
        kept = {
            "streaming": [*range(min(4, s - 1)), *range(n - s + min(4, s - 1), n)],
            "key_norm": np.argsort(norms, kind="stable")[:s],
            "value_weighted": np.argsort(-p * np.linalg.norm(v, axis=1), kind="stable")[:s],
        }
        # The same token twice has the same norm in the first layer, but for rounding.
        tied = line.rule == "key_norm" and np.sort(norms)[s] < np.sort(norms)[s - 1] * (1 + 1e-5)
        n_compared[line.rule] += not tied
        if line.rule in kept and not tied:
            assert len(kept[line.rule]) == s
            assert line.error == pytest.approx(error(p, v, kept[line.rule], 0.0), rel=2e-3, abs=ATOL)
    assert min(n_compared.values()) > 50
    for line in of_trace["groups"].itertuples():
        heads = [row(line.layer, head, line.query) for head in (line.first_head, line.first_head + 1)]
        shared = np.argsort(-sum(p for p, _, _ in heads), kind="stable")[: line.budget]
        own = [np.argsort(-p, kind="stable")[: line.budget] for p, _, _ in heads]
        errors = [
            np.sqrt(np.mean([error(p, v, kept, 0.0) ** 2 for (p, v, _), kept in zip(heads, sets, strict=True)]))
            for sets in ([shared, shared], own)
        ]
        assert line.n_heads == 2
        assert (line.shared_error, line.top_mass_error) == pytest.approx(tuple(errors), rel=2e-3, abs=ATOL)
        assert line.cost == pytest.approx(line.shared_error / line.top_mass_error)
        assert line.excess == pytest.approx(line.shared_error / line.best_error)
        same = ["trace_id", "layer", "query", "budget"]
        best = run.rows[(run.rows[same] == [getattr(line, name) for name in same]).all(axis=1)]
        best = best[best["head"] // 2 * 2 == line.first_head].best_error
        assert line.best_error == pytest.approx(np.sqrt((best**2).mean()))
    for line in of_trace["statistics"].itertuples():
        p, _, norms = row(line.layer, line.head, line.query)
        dropped = 1 - np.sort(p)[-4:].sum()
        expected = (dropped, -(p * np.log(p)).sum(), p.max(), norms.std() / norms.mean())
        found = (line.dropped_mass, line.entropy, line.max_weight, line.key_norm_spread)
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize("family", tiny.ATTENTION_FAMILIES)
def test_every_family_is_recomputed(family: str, tmp_path: Path) -> None:
    changes = {"vocab_size": len(tiny_tokenizers.byte_level()), "bos_token_id": 0, "eos_token_id": 2}

    def build() -> Any:
        return tiny.ATTENTION_FAMILIES[family](**changes)  # type: ignore[call-arg]

    model = wrap(build(), tiny_tokenizers.byte_level(), name=family)
    found = measure(tmp_path / "out", TRACES[1:], model, budgets=(2, 3), rows_per_head=2, nulls="none")
    ids = torch.from_numpy(TOKENS["sum"].ids)
    compare(found.rows, build, ids, family == "gpt_oss", model.sliding)
    assert (found.rows.n_keys <= found.rows["query"]).any() == (family in ("gemma3", "mistral", "gemma2", "gpt_oss"))
    shared = found.groups.n_heads.unique().tolist()
    assert shared == [model.n_heads // model.n_kv_heads]
    assert (found.documents["summary"]["shared_sets"] == {}) == (shared == [1])
    if shared == [1]:
        assert (found.groups.cost == 1).all()
    assert found.documents["summary"]["check"]["n_off"] == 0


def test_a_half_precision_model_is_measured_in_its_own_numbers(tmp_path: Path, run: kvlens.Run) -> None:
    half = wrap(tiny_runs.hf_model(max_position_embeddings=64).to(torch.bfloat16), tiny_tokenizers.byte_level())
    found = measure(tmp_path / "half", model=half)
    assert found.meta["dtype"] == "bfloat16"
    assert found.documents["summary"]["check"]["n_off"] == 0
    assert found.rows[[*AT, "budget"]].equals(run.rows[[*AT, "budget"]])
    apart = np.abs(found.rows.dropped_mass - run.rows.dropped_mass)
    assert 0 < np.median(apart) < 0.02


# Traces that are too short, alone, or many


def test_short_traces_are_left_out_with_the_reason(tmp_path: Path, run: kvlens.Run) -> None:
    found = measure(tmp_path / "out", [TRACES[0], SHORT, TRACES[1]], cross_entropy=True)
    (skipped,) = found.meta["counts"]["skipped"]
    assert skipped["id"] == "short"
    assert "3 rows a head were asked for, and 0 of its 3 tokens see 5 keys" in skipped["reason"]
    pd.testing.assert_frame_equal(found.rows, run.rows)
    assert found.documents["summary"]["n_documents"] == 2


@pytest.mark.parametrize(
    ("traces", "asked", "message"),
    [
        ([SHORT], {}, "0 of its 3 tokens see 5 keys"),
        (TRACES, {"budgets": (60,)}, "tokens see 61 keys"),
        (TRACES, {"rows_per_head": 47}, "47 rows a head"),
        (TRACES[:1], {"cross_entropy": True}, "two traces or more, and there is 1"),
        ([TRACES[0], SHORT], {"cross_entropy": True}, "two traces or more, and there is 1"),
        ([], {}, "no traces"),
        ([TRACES[0], TRACES[0]], {}, "the id 'box' stands for 2 traces"),
        (TRACES, {"limit": 0}, "cannot take 0 traces"),
        (TRACES, {"budgets": ()}, "no numbers of keys"),
        (TRACES, {"budgets": (0, 4)}, "no numbers of keys"),
        (TRACES, {"budgets": (4, 4097)}, "no numbers of keys"),
        (TRACES, {"rows_per_head": 0}, "0 rows a head"),
        (TRACES, {"nulls": "some"}, "nulls 'some' do not exist"),
        (TRACES, {"seed": -1}, "seed -1 is outside 0"),
        ([Trace("whole", text="a " * 20)], {"chat": True}, "no prompt to render"),
        ([Trace("long", prompt="a " * 90, target="b")], {}, "more than the model's context of 64"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: list[Trace], asked: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(studying, "read_rows", lambda *_: pytest.fail("measured"))
    with pytest.raises(InputError, match=message):
        measure(tmp_path / "out", traces, **asked)
    assert not (tmp_path / "out").exists()


def test_a_window_narrower_than_the_budget_is_refused_in_words(tmp_path: Path) -> None:
    hf = tiny.mistral(vocab_size=len(tiny_tokenizers.byte_level()))
    model = wrap(hf, tiny_tokenizers.byte_level(), name="narrow")
    with pytest.raises(InputError, match="a sliding window of narrow shows no query more than 8"):
        measure(tmp_path / "out", model=model, budgets=(2, 8))


def test_one_trace_has_numbers_without_intervals(tmp_path: Path, run: kvlens.Run) -> None:
    found = measure(tmp_path / "out", limit=1)
    pd.testing.assert_frame_equal(found.rows, run.rows[run.rows.trace_id == "box"])
    text = (tmp_path / "out" / "summary.json").read_text()
    summary = json.loads(text, parse_constant=pytest.fail)
    for line in summary["budgets"]:
        for facts in (line["real"], *line["nulls"].values()):
            for name, middle in (("ceiling", "median"), ("kappa", "median"), ("auc", "mean")):
                assert isinstance(facts[name][middle], float)
                assert facts[name]["low"] is facts[name]["high"] is None
    assert all(line["low"] is None and line["auc"] is not None for line in summary["predictors"])


def test_a_chat_is_read_in_its_template(tmp_path: Path) -> None:
    model = tiny_runs.model()
    found = measure(tmp_path / "out", TRACES[1:], model, chat=True, nulls="none")
    tokens = tokenize(TRACES[1], model.tokenizer, chat=True)
    assert tokens.n_tokens > TOKENS["sum"].n_tokens
    ids = torch.from_numpy(tokens.ids)
    compare(found.rows, tiny_runs.hf_model, ids, False, [None] * 3)
    notes: list[str] = []
    made = Trace("made", prompt="Where is the box? ", target="under the table", meta={"made_by": {"chat": True}})
    measure(tmp_path / "plain", [made], model, nulls="none", note=notes.append)
    assert notes[0].startswith("warning: 1 trace were made in the model's chat format")


# The same again, otherwise, and cut short


class Interrupted(Exception):
    """The run stops here."""


def interrupted_at(tick: int) -> Callable[[int, int], None]:
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == tick:
            raise Interrupted

    return progress


def content(run: Path) -> dict[str, Any]:
    return tiny_runs.hashes(run) | {"summary": (run / "summary.json").read_text()}


def test_ticks_and_notes_tell_what_lies_ahead(tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    notes: list[str] = []
    measure(tmp_path / "out", cross_entropy=True, progress=lambda *tick: ticks.append(tick), note=notes.append)
    assert ticks == [(0, 6), (1, 6), (2, 6), (3, 6), (3, 6), (4, 6), (5, 6), (6, 6), (6, 6)]
    assert notes[0] == "72 rows of 2 traces at 2 budgets, each real and under 3 nulls"
    assert notes[1].startswith("cross-entropy of 1 held-out trace, 4 keys kept in ")
    notes.clear()
    measure(tmp_path / "out", cross_entropy=True, note=notes.append)
    assert len(notes) == 1
    assert notes[0].startswith(f"'{tmp_path / 'out'}' holds this run already, finished: nothing to measure")
    notes.clear()
    measure(tmp_path / "bare", limit=1, budgets=(2,), nulls="none", note=notes.append)
    assert notes == ["36 rows of 1 trace at 1 budget"]


def test_the_same_run_twice_is_the_same_bytes_and_no_second_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: kvlens.Run
) -> None:
    measure(tmp_path / "out", cross_entropy=True)
    assert content(tmp_path / "out") == content(Path(run.path))
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(studying, "read_rows", lambda *_: pytest.fail("measured again"))
    again = measure(tmp_path / "out", budgets=[4, 2, 2], cross_entropy=True)  # a set, in rising order
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before
    pd.testing.assert_frame_equal(again.rows, run.rows)


@pytest.mark.parametrize(("tick", "measured"), [(1, ["box", "sum"]), (3, ["box", "sum"]), (5, ["sum"]), (9, [])])
def test_a_run_cut_short_ends_in_the_same_bytes_and_measures_no_trace_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: kvlens.Run, tick: int, measured: list[str]
) -> None:
    out = tmp_path / "cut"
    with pytest.raises(Interrupted):
        measure(out, cross_entropy=True, progress=interrupted_at(tick))
    with pytest.raises(InputError, match="not finished"):
        kvlens.load(out)
    read, seen, notes = studying.read_rows, [], []

    def watched(model: Model, tokens: Any, *rest: Any) -> Any:
        seen.append(tokens.trace.id)
        return read(model, tokens, *rest)

    monkeypatch.setattr(studying, "read_rows", watched)
    found = measure(out, cross_entropy=True, note=notes.append)
    assert seen == measured
    assert notes[0].endswith(", 1 done before") == (measured == ["sum"])
    assert content(out) == content(Path(run.path))
    assert found.meta["counts"] == run.meta["counts"]
    assert not (out / ".parts").exists()


@pytest.mark.parametrize("table", ["rows", "nulls"])
def test_a_damaged_part_is_measured_again(tmp_path: Path, run: kvlens.Run, table: str) -> None:
    out = tmp_path / "cut"
    with pytest.raises(Interrupted):
        measure(out, cross_entropy=True, progress=interrupted_at(9))
    damaged = sorted(out.glob(f".parts/*/{table}-*.part"))[0]
    broken = bytearray(damaged.read_bytes())
    broken[len(broken) // 2] ^= 1
    damaged.write_bytes(broken)
    found = measure(out, cross_entropy=True)
    assert [event["table"] for event in found.meta["events"] if event["kind"] == "damaged part"] == [table]
    assert content(out) == content(Path(run.path))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"budgets": (2,)}, "budgets is [2, 4] there and [2] here"),
        ({"rows_per_head": 2}, "rows_per_head is 3 there and 2 here"),
        ({"nulls": "none"}, "nulls is"),
        ({"cross_entropy": False}, "cross_entropy is True there and False here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"traces": [TRACES[1], TRACES[0]]}, "input_hash"),
        ({"model": tiny_runs.model(num_hidden_layers=2)}, "fingerprint"),
    ],
)
def test_another_run_is_never_overwritten_unasked(run: kvlens.Run, asked: dict[str, Any], message: str) -> None:
    before = content(Path(run.path))
    with pytest.raises(InputError, match="different configuration") as caught:
        measure(Path(run.path), **{"cross_entropy": True} | asked)
    assert message in caught.value.message
    assert content(Path(run.path)) == before


def test_seeds_draw_other_rows_and_force_replaces_a_run(tmp_path: Path, run: kvlens.Run) -> None:
    out = tmp_path / "out"
    one = measure(out, seed=5)
    assert not one.rows["query"].equals(run.rows["query"])
    assert one.rows.groupby(AT).size().shape == run.rows.groupby(AT).size().shape
    bare = measure(out, nulls="none", force=True)
    pd.testing.assert_frame_equal(bare.rows, run.rows)  # the nulls have no part in the real rows
    assert sorted(bare.tables) == ["cells", "excess", "groups", "rows", "statistics"]
    assert all(line["nulls"] == {} for line in bare.documents["summary"]["budgets"])
    assert not (out / "nulls.parquet").exists()


def test_a_model_whose_rows_are_not_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = studying.read_rows

    def off(*given: Any) -> Any:
        return real(*given) + studying.RowCheck(1, 1, 50.0, 2)

    monkeypatch.setattr(studying, "read_rows", off)
    with pytest.raises(ModelRefused, match="the worst in layer 2, 50 times the allowed error"):
        measure(tmp_path / "out")


@pytest.mark.parametrize("budgets", [(1,), (1, 2, 20)])
def test_budgets_of_one_key_and_of_many(tmp_path: Path, budgets: tuple[int, ...]) -> None:
    found = measure(tmp_path / "out", budgets=budgets, rows_per_head=2, nulls="none")
    assert set(found.rows.budget) == set(budgets)
    one = found.rows[found.rows.budget == 1]
    assert (one.n_subsets == np.minimum(one.n_keys, 25)).all()
    assert found.documents["summary"]["predictor_budget"] == min(budgets, key=lambda budget: abs(budget - 8))
    json.loads((tmp_path / "out" / "summary.json").read_text(), parse_constant=pytest.fail)


def test_a_missing_numba_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "kvlens.discover.kernel", raising=False)
    monkeypatch.delattr("kvlens.discover.kernel", raising=False)
    with pytest.raises(EnvironmentLacks, match="numba"):
        kvlens.ceilings([], "no such model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
