"""Are the statistics that compete with dropped mass computed by their definitions, and is a planted one found?"""

from __future__ import annotations

import numpy as np
import pytest
import subset_oracles as oracle

from kvlens.discover.ceilings import ceilings, effective_rank
from kvlens.discover.dropped_mass import predictor_table, row_statistics
from kvlens.discover.instances import instances
from kvlens.errors import InputError


def test_statistics_are_those_of_a_plain_computation() -> None:
    random = np.random.default_rng(0)
    visible = np.arange(12) < np.array([[12], [9], [3]])
    weights = np.where(visible, oracle.softmax_rows(random, 3, 12), 0)
    weights /= weights.sum(1, keepdims=True)
    values, norms = random.normal(size=(12, 4)), random.random(12) + 1
    rows = instances(weights, values, visible=visible)
    found = row_statistics(rows, 4, key_norms=norms)
    for row in range(3):
        n = int(visible[row].sum())
        p, v = weights[row, :n], values[:n]
        mu = p @ v
        top = sorted(range(n), key=lambda j: (-p[j], j))[:4]
        dropped = 1 - p[top].sum()
        away = np.linalg.norm(v - mu, axis=1)
        expected = {
            "dropped_mass": dropped,
            "residual": np.linalg.norm(sum(p[j] * (v[j] - mu) for j in top)),
            "bound": 2 * away.max() * dropped,
            "spread": np.sqrt(max(dropped, 0) / (1 - dropped) * (p * away**2).sum()),
            "entropy": -(p * np.log(p)).sum(),
            "max_weight": p.max(),
            "effective_rank": effective_rank(rows)[row],
            "key_norm_spread": norms[:n].std() / norms[:n].mean(),
        }
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name][row] == pytest.approx(value, abs=1e-12), name
    assert found["dropped_mass"][2] == 0
    with pytest.raises(InputError, match="budget of 0"):
        row_statistics(rows, 0)


def test_a_sink_is_kept_and_counts_as_a_key() -> None:
    random = np.random.default_rng(1)
    weights, values = oracle.softmax_rows(random, 4, 9), random.normal(size=(9, 3))
    values[0] = 0
    weights[:, 0] += 1
    weights /= weights.sum(1, keepdims=True)
    as_key = row_statistics(instances(weights, values), 4)
    as_sink = row_statistics(instances(weights[:, 1:], values[1:], sink=weights[:, 0]), 3)
    for name in ("dropped_mass", "residual", "bound", "spread", "entropy", "max_weight"):
        np.testing.assert_allclose(as_sink[name], as_key[name], rtol=1e-9, err_msg=name)


def test_lines_come_best_first_with_intervals_and_the_level_of_a_cell_gone() -> None:
    """`within` orders rows inside cells only, `level` tells cells apart only, `reverse` is `within` turned round."""
    random = np.random.default_rng(3)
    n = 1200
    cell, document = random.integers(0, 6, n), random.integers(0, 10, n)
    inner, level = random.normal(size=n), cell.astype(float)
    closable = inner + level + random.normal(size=n) > 2.5
    lines = predictor_table(
        {"noise": random.normal(size=n), "level": level, "reverse": -inner - level}, closable, document, cell, seed=0
    )
    assert [line["statistic"] for line in lines] == ["reverse", "level", "noise"]
    by_name = {line["statistic"]: line for line in lines}
    assert by_name["level"]["within_cells_auc"] == 0.5
    assert by_name["level"]["auc"] > 0.8
    assert by_name["reverse"]["within_cells_auc"] < 0.35
    assert by_name["noise"]["low"] < 0.5 < by_name["noise"]["high"]
    assert {(line["n_rows"], line["n_documents"]) for line in lines} == {(n, 10)}


def test_dropped_mass_of_a_row_is_the_column_of_its_ceiling() -> None:
    random = np.random.default_rng(3)
    rows = instances(oracle.softmax_rows(random, 8, 40), random.normal(size=(40, 4)))
    np.testing.assert_allclose(
        row_statistics(rows, 8)["dropped_mass"], ceilings(rows, (8,), free_weights=False)["dropped_mass"], rtol=1e-12
    )
