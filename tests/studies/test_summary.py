"""`summary.json`: is every number in it what pandas and numpy make of the run's own tables?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny_runs
import torch
from sklearn.metrics import roc_auc_score

import kvlens
from kvlens import stats
from kvlens.discover.inputs import halves
from kvlens.discover.nulls import NULLS
from kvlens.schemas import CEILINGS
from kvlens.studies.summary import ceiling_facts, cell_table, summarise
from kvlens.texts import tokenize

MODEL = tiny_runs.model(max_position_embeddings=64)
BOX, SUM = (tiny_runs.as_trace(row) for row in tiny_runs.ROWS)
TRACES = [
    BOX,
    SUM,
    dataclasses.replace(BOX, id="again", prompt=SUM.prompt, spans=()),
    dataclasses.replace(SUM, id="\u00e9", reasoning=SUM.reasoning * 2),
]
BUDGETS, AT, SEED = (2, 4), 4, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> kvlens.Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    return kvlens.ceilings(TRACES, MODEL, out, budgets=BUDGETS, rows_per_head=3, cross_entropy=True, seed=SEED)


@pytest.fixture(scope="module")
def summary(run: kvlens.Run) -> dict[str, Any]:
    return run.documents["summary"]


def median(values: Any) -> float:
    """The lower of the two middle values."""
    ranked = np.sort(np.asarray(values))
    return float(ranked[(len(ranked) - 1) // 2])


def drawn(table: pd.DataFrame, number: Any) -> tuple[float, float]:
    """The interval of a number by repeating the rows of every drawn trace, one draw after the other."""
    names = sorted(table.trace_id.unique())
    found = []
    for counts in stats.resampled(len(names), 1024, SEED)[1:].astype(int):
        parts = [table[table.trace_id == name] for name, n in zip(names, counts, strict=True) for _ in range(n)]
        found.append(number(pd.concat(parts)))
    return tuple(np.quantile(found, [0.025, 0.975], method="inverted_cdf"))


def check_median(found: dict[str, Any], values: Any) -> None:
    assert found["median"] == pytest.approx(median(values))
    assert found["low"] <= found["high"]
    assert {found["low"], found["high"]} <= set(np.asarray(values, dtype=float))


def test_the_document_is_json_without_nan_and_says_what_it_is_of(run: kvlens.Run, summary: dict[str, Any]) -> None:
    text = (Path(run.path) / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == summary
    assert (summary["schema"], summary["model"]) == (CEILINGS, run.meta["model"])
    assert (summary["n_rows"], summary["n_instances"], summary["n_documents"]) == (144, 288, 4)
    assert summary["share_exact"] == 1.0
    assert summary["predictor_budget"] == AT
    assert [line["budget"] for line in summary["budgets"]] == [*BUDGETS]


def test_real_rows_and_nulls_stand_side_by_side_with_numbers_of_their_tables(
    run: kvlens.Run, summary: dict[str, Any]
) -> None:
    for line in summary["budgets"]:
        rows = run.rows[run.rows.budget == line["budget"]]
        nulls = run.nulls[run.nulls.budget == line["budget"]]
        assert list(line["nulls"]) == list(NULLS)
        for facts, table in [
            (line["real"], rows),
            *((line["nulls"][name], nulls[nulls["null"] == name]) for name in NULLS),
        ]:
            check_median(facts["ceiling"], table.ceiling)
            check_median(facts["kappa"], table.kappa)
            ranked = np.sort(table.ceiling)
            places = [int(np.ceil(share * len(ranked))) - 1 for share in (0.05, 0.25, 0.5, 0.75, 0.95)]
            assert facts["ceiling"]["quantiles"] == pytest.approx(ranked[places], abs=1e-6)
            assert facts["share_kappa_close"] == (table.kappa <= 1.5).mean()
            assert facts["share_closable"] == table.closable.mean()
            assert facts["auc"]["mean"] == pytest.approx(roc_auc_score(table.closable, table.dropped_mass))
            assert facts["auc"]["low"] < facts["auc"]["high"]
        real = line["real"]
        assert real["share_top_mass_optimal"] == (rows.top_mass_error <= rows.best_error * (1 + 1e-9)).mean()
        assert real["share_balanced_optimal"] == (rows.balanced_error <= rows.best_error * (1 + 1e-9)).mean()
        assert real["share_top_mass_optimal"] < real["share_balanced_optimal"] < 1
        assert real["share_whole_scope"] == (rows.scope == "all").mean()
        beaten = rows.balanced_all_error * (1 + 1e-9) < rows.best_error
        assert real["share_beaten_outside_pool"] == beaten.mean()
        assert not beaten[rows.scope == "all"].any()
        below = rows.free_search_error <= rows.sigma / np.sqrt(line["budget"]) * (1 + 1e-9)
        assert real["share_free_below_sigma"] == below.mean()
        check_median(real["pi"], rows.best_error / rows.free_error)
        check_median(real["pi_search"], rows.best_error / rows.free_search_error)


def test_rows_where_swaps_over_all_keys_beat_the_pool_are_counted(run: kvlens.Run) -> None:
    every_third = np.arange(len(run.rows)) % 3 == 0
    rows = run.rows.assign(balanced_all_error=run.rows.best_error * np.where(every_third, 0.9, 1.0))
    found = summarise(run.tables | {"rows": rows}, BUDGETS, AT, SEED)
    for line in found["budgets"]:
        assert line["real"]["share_beaten_outside_pool"] == every_third[rows.budget == line["budget"]].mean()


def test_intervals_are_of_resampled_documents(run: kvlens.Run, summary: dict[str, Any]) -> None:
    rows = run.rows[run.rows.budget == AT]
    facts = summary["budgets"][1]["real"]
    low, high = drawn(rows, lambda table: median(table.ceiling))
    assert (facts["ceiling"]["low"], facts["ceiling"]["high"]) == (low, high)
    assert low < facts["ceiling"]["median"] < high
    low, high = drawn(rows, lambda table: roc_auc_score(table.closable, table.dropped_mass))
    assert (facts["auc"]["low"], facts["auc"]["high"]) == pytest.approx((low, high), abs=0.01)  # of 4,096 draws


def test_what_rules_and_shared_sets_cost(run: kvlens.Run, summary: dict[str, Any]) -> None:
    rules = summary["rules"]
    assert list(rules) == ["top_mass", "streaming", "key_norm", "value_weighted", "random"]
    for budget in BUDGETS:
        check_median(rules["top_mass"][str(budget)], run.rows[run.rows.budget == budget].kappa)
        for rule in list(rules)[1:]:
            chosen = (run.excess.budget == budget) & (run.excess.rule == rule)
            check_median(rules[rule][str(budget)], run.excess[chosen].excess)
        for name in ("cost", "excess"):
            check_median(summary["shared_sets"][str(budget)][name], run.groups[run.groups.budget == budget][name])
    assert rules["top_mass"]["4"]["median"] < rules["random"]["4"]["median"]


def test_predictors_are_ranked_by_their_auc_over_rows_and_within_cells(
    run: kvlens.Run, summary: dict[str, Any]
) -> None:
    rows = run.rows[run.rows.budget == AT].reset_index(drop=True)
    keys = ["trace_id", "layer", "head", "query"]
    assert rows[keys].equals(run.statistics[keys])
    names = [name for name in run.statistics if name not in keys]
    assert sorted(line["statistic"] for line in summary["predictors"]) == sorted(names)
    away = [abs(line["auc"] - 0.5) for line in summary["predictors"]]
    assert away == sorted(away, reverse=True)
    cell, closable = (rows["layer"] * 4 + rows["head"]).to_numpy(), rows.closable.to_numpy()
    for line in summary["predictors"]:
        scores = run.statistics[line["statistic"]].to_numpy()
        assert line["auc"] == pytest.approx(roc_auc_score(closable, scores))
        above = (scores[:, None] > scores) + (scores[:, None] == scores) / 2
        pairs = closable[:, None] & ~closable & (cell[:, None] == cell)
        assert line["within_cells_auc"] == pytest.approx(above[pairs].mean())
        assert (line["n_rows"], line["n_documents"]) == (144, 4)


def test_cells_are_flat_by_their_median_dropped_mass(run: kvlens.Run, summary: dict[str, Any]) -> None:
    rows = run.rows[run.rows.budget == AT]
    assert run.cells[["layer", "head"]].to_numpy().tolist() == [
        [layer, head] for layer in range(3) for head in range(4)
    ]
    for cell in run.cells.itertuples():
        inside = rows[(rows["layer"] == cell.layer) & (rows["head"] == cell.head)]
        assert cell.n_rows == len(inside) == 12
        assert cell.median_dropped_mass == pytest.approx(inside.dropped_mass.median())
        assert cell.flat == (cell.median_dropped_mass > 0.25)
        if inside.closable.nunique() == 2:
            assert cell.auc == pytest.approx(roc_auc_score(inside.closable, inside.dropped_mass))
        else:
            assert np.isnan(cell.auc)
    found = summary["cells"]
    assert (found["n"], found["n_flat"]) == (12, run.cells.flat.sum())
    assert 0 < found["n_flat"] < 12
    assert found["median_auc"] == pytest.approx(run.cells.auc.median())
    stored = pd.DataFrame(found["table"])
    for name in stored:
        np.testing.assert_allclose(stored[name].astype(float), run.cells[name].astype(float))


def test_every_row_was_held_against_the_models_own_output(summary: dict[str, Any]) -> None:
    check = summary["check"]
    assert (check["n_rows"], check["n_off"]) == (144, 0)
    assert 0 < check["worst"] < 1
    assert check["worst_layer"] in range(3)


@torch.no_grad()
def test_cross_entropy_is_of_the_other_half_in_cells_that_one_half_chose(
    run: kvlens.Run, summary: dict[str, Any]
) -> None:
    table, found = run.cross_entropy, summary["cross_entropy"]
    ids = [trace.id for trace in TRACES]
    choosing = {name for name, first in zip(ids, halves(ids, SEED), strict=True) if first}
    held_out = [trace for trace in TRACES if trace.id not in choosing]
    assert len(choosing) == len(held_out) == 2
    rows = run.rows[(run.rows.budget == AT) & run.rows.trace_id.isin(choosing)]
    n_flat = int((rows.groupby(["layer", "head"]).dropped_mass.median() > 0.25).sum())
    assert list(table.arm) == ["flat", "random", "all"] * 2
    assert list(table.n_cells) == [n_flat, n_flat, 12] * 2
    assert list(table.trace_id) == [trace.id for trace in held_out for _ in range(3)]
    for trace in held_out:
        tokens = torch.from_numpy(tokenize(trace, MODEL.tokenizer).ids)[None]
        mine = table[table.trace_id == trace.id]
        assert (mine.n_tokens == tokens.shape[1] - 1).all()
        own = float(MODEL.hf(tokens, labels=tokens).loss)
        assert mine.unchanged_nats.to_numpy() == pytest.approx([own] * 3, rel=1e-4)
        assert (np.abs(mine.nats - own) > 1e-4).all()
    assert (found["budget"], found["n_documents"]) == (AT, 2)
    for arm, facts in found["arms"].items():
        added = (table.nats - table.unchanged_nats)[table.arm == arm]
        assert facts["added_nats"] == pytest.approx(added.mean())
        assert (facts["low"], facts["high"]) == pytest.approx((added.min(), added.max()))
        assert facts["n_cells"] == table.n_cells[table.arm == arm].iloc[0]


def test_rows_that_are_closable_all_or_never_have_no_auc() -> None:
    facts = {"trace_id": ["a", "a", "b", "b"], "layer": 0, "head": [0, 1, 0, 1], "dropped_mass": [0.1, 0.2, 0.3, 0.4]}
    rows = pd.DataFrame(facts | {"kappa": [np.inf, np.inf, 3, np.inf], "ceiling": [1, 1, 2 / 3, 1], "closable": True})
    found = ceiling_facts(rows, 0)
    assert np.isnan([found["auc"][name] for name in ("mean", "low", "high")]).all()
    assert found["kappa"] == {"median": np.inf, "low": 3.0, "high": np.inf}
    assert (found["share_kappa_close"], found["share_closable"]) == (0.0, 1.0)
    assert cell_table(rows).auc.isna().all()


def test_documents_are_told_apart_by_their_whole_id_and_in_no_order() -> None:
    random = np.random.default_rng(0)
    n, ids = 70, ["b", "b\0", "a", "c", "e", "d", "f"]
    table = pd.DataFrame({"trace_id": ids * 10, "kappa": 1 + random.random(n), "ceiling": random.random(n)})
    table = table.assign(dropped_mass=random.random(n), closable=random.random(n) < 0.5)
    found = ceiling_facts(table, 0)
    assert found == ceiling_facts(table.iloc[::-1], 0)
    assert found != ceiling_facts(table.assign(trace_id=["b", "b", *ids[2:]] * 10), 0)
