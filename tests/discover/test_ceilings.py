"""Are the columns of a ceilings run what their definitions say, row by row?"""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
import subset_oracles as oracle

from kvlens.discover.ceilings import ceilings, cells, effective_rank, summary
from kvlens.discover.instances import Instances, extra_keys, instances
from kvlens.errors import InputError


def some_rows(seed: int = 0, n_rows: int = 10, n_keys: int = 30, d_head: int = 6) -> Instances:
    """Rows of every length from 2 keys up, as causal attention has them."""
    random = np.random.default_rng(seed)
    visible = np.arange(n_keys) < np.linspace(2, n_keys, n_rows).astype(int)[:, None]
    weights = np.where(visible, oracle.softmax_rows(random, n_rows, n_keys), 0)
    weights /= weights.sum(1, keepdims=True)
    return instances(weights, random.normal(size=(n_keys, d_head)), visible=visible)


def test_each_line_is_its_rows_at_its_budget() -> None:
    rows, budgets = some_rows(), (3, 2, 8)
    found = ceilings(rows, budgets, all_keys=True)
    assert found["row"].tolist() == np.repeat(np.arange(10), 3).tolist()
    assert found["budget"].tolist() == [3, 2, 8] * 10
    for line in range(30):
        row, budget = int(found["row"][line]), int(found["budget"][line])
        n, own = int(rows.n_keys[row]), rows.weights[row]
        get = {name: column[line] for name, column in found.items()}
        top = sorted(range(n), key=lambda j: (-own[j], j))[:budget]
        expected = oracle.error(own, rows.values, tuple(top))
        assert get["top_mass_error"] == pytest.approx(expected, rel=1e-9, abs=1e-13)
        assert get["n_keys"] == n
        size = min(n, budget + extra_keys(budget))
        assert get["n_subsets"] == (comb(size, budget) if n > budget else 1)
        assert get["scope"] == ("all" if size == n else "pool")
        assert get["exact"]
        assert get["dropped_mass"] == pytest.approx(1 - own[top].sum(), abs=1e-12)
        if size == n and budget < 8:
            best = oracle.best(own, rows.values, np.arange(n), min(budget, n))
            assert get["best_error"] == pytest.approx(best, rel=1e-9, abs=1e-13)
        assert get["best_error"] <= get["balanced_error"] <= get["top_mass_error"]
        assert get["balanced_all_error"] <= get["top_mass_error"]
        assert get["free_error"] <= get["best_error"]
        assert get["free_top_error"] <= get["top_mass_error"]
        if n <= budget:
            nothing = ("top_mass_error", "best_error", "balanced_error", "free_error", "free_top_error")
            assert [get[name] for name in (*nothing, "balanced_all_error", "dropped_mass", "ceiling")] == [0] * 8
            assert get["kappa"] == 1
            assert not get["closable"]
        else:
            assert get["kappa"] == pytest.approx(get["top_mass_error"] / get["best_error"])
            assert get["ceiling"] == pytest.approx(1 - get["best_error"] / get["top_mass_error"])
            assert get["closable"] == (get["kappa"] > 1.11)
    assert found["closable"].any()
    assert (found["free_error"] < found["best_error"]).any()


def test_ends_of_the_scale_are_kept() -> None:
    """A row without error, one that only another set balances, and one where A* is best."""
    weights = np.array([[0.25] * 4, [0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
    values = np.array([[[1.0]] * 4, [[1.0], [1], [-1], [-1]], [[0.0], [1], [2], [5]]])
    found = ceilings(instances(weights, values), (2,))
    assert found["kappa"][:2].tolist() == [1.0, np.inf]
    assert found["closable"][:2].tolist() == [False, True]
    assert found["ceiling"][:2].tolist() == [0.0, 1.0]
    one = ceilings(instances(weights[2:], values[2] * 0 + np.array([[0.0], [0], [1], [1]])), (2,))
    assert one["top_mass_error"][0] > 0


def test_rows_do_not_depend_on_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(1)
    together = ceilings(rows, (2, 5))
    monkeypatch.setattr("kvlens.discover.ceilings.ROWS_AT_ONCE", 3)
    apart = ceilings(rows, (2, 5))
    assert together.keys() == apart.keys()
    for name, column in together.items():
        if column.dtype == object:
            assert column.tolist() == apart[name].tolist()
        else:
            np.testing.assert_allclose(apart[name], column, rtol=1e-9, atol=1e-12, err_msg=name)


def test_free_weights_can_be_left_out() -> None:
    found = ceilings(some_rows(2), (3,), free_weights=False)
    assert np.isnan(found["free_error"]).all()
    assert np.isfinite(found["best_error"]).all()
    with pytest.raises(InputError, match="0 budgets"):
        ceilings(some_rows(2), ())


def test_effective_rank_counts_directions() -> None:
    """Uniform weights on +-e_i: every direction carries the same, so the rank is their number."""
    for n in (1, 3, 5):
        values = np.concatenate([np.eye(6)[:n], -np.eye(6)[:n]])
        assert effective_rank(instances(np.full((1, 2 * n), 1 / (2 * n)), values))[0] == pytest.approx(n)
    assert effective_rank(instances(np.full((1, 3), 1 / 3), np.zeros((3, 2)))).tolist() == [0.0]


def test_cells_are_counted_apart() -> None:
    layer, head = np.array([1, 0, 1, 1, 0, 1]), np.array([0, 2, 0, 0, 2, 1])
    dropped = np.array([0.1, 0.3, 0.5, 0.2, 0.2, 0.4])
    closable = np.array([False, True, True, True, True, False])
    found = cells(layer, head, dropped, closable)
    assert found["layer"].tolist() == [0, 1, 1]
    assert found["head"].tolist() == [2, 0, 1]
    assert found["median_dropped_mass"].tolist() == [0.25, 0.2, 0.4]
    assert found["flat"].tolist() == [False, False, True]
    assert found["n_rows"].tolist() == [2, 3, 1]
    assert np.isnan(found["auc"][[0, 2]]).all()
    assert found["auc"][1] == 1.0


def test_a_summary_is_of_each_budget_apart() -> None:
    columns = ceilings(some_rows(3, n_rows=24), (3, 6))
    document = columns["row"] % 4
    found = summary(columns, document, seed=0)
    assert [line["budget"] for line in found] == [3, 6]
    for line in found:
        own = {name: column[columns["budget"] == line["budget"]] for name, column in columns.items()}
        assert (line["n_rows"], line["n_documents"]) == (24, 4)
        middle = np.sort(own["ceiling"])[11:13]
        assert middle[0] == line["ceiling_median"] <= line["ceiling_high"]
        assert line["ceiling_low"] <= middle[0]
        assert line["closable"] == own["closable"].mean()
        assert line["top_mass_optimal"] == (own["kappa"] == 1).mean() < 1
        assert line["balanced_optimal"] >= line["top_mass_optimal"]
        assert line["pi_median"] > 1
        free = np.minimum(own["free_error"], own["free_search_error"])
        assert line["free_below_sigma"] == (free <= own["sigma"] / np.sqrt(line["budget"])).mean() > 0
        assert line["auc_low"] <= line["auc"] <= line["auc_high"]
    without = summary(ceilings(some_rows(3, n_rows=24), (3,), free_weights=False), document[::2], seed=0)
    assert "pi_median" not in without[0]
