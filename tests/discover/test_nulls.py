"""Do the null controls keep what they should keep and destroy the rest; is their verdict the known one?"""

from __future__ import annotations

import numpy as np
import pytest
import subset_oracles as oracle

from kvlens.discover.ceilings import ceilings
from kvlens.discover.instances import Instances, instances
from kvlens.discover.nulls import null_rows
from kvlens.errors import InputError
from kvlens.stats import auc


def some_rows(n_keys: int = 400) -> Instances:
    random = np.random.default_rng(0)
    visible = np.arange(n_keys) < np.array([[n_keys // 2], [n_keys]])
    weights = np.where(visible, oracle.softmax_rows(random, 2, n_keys), 0)
    values = random.normal(size=(n_keys, 5)) @ random.normal(size=(5, 5)) + 7
    return instances(weights / weights.sum(1, keepdims=True), values, visible=visible)


def test_permuted_values_are_the_rows_own_in_another_order() -> None:
    rows = some_rows()
    found = null_rows(rows, "permuted", 0)
    np.testing.assert_array_equal(found.weights, rows.weights)
    for row in range(2):
        seen = rows.visible[row]
        here, there = rows.values_of(row)[seen], found.values_of(row)[seen]
        assert not np.array_equal(here, there)
        np.testing.assert_array_equal(np.sort(there[:, 0]), np.sort(here[:, 0]))
        assert {tuple(v) for v in here} == {tuple(v) for v in there}
        np.testing.assert_allclose(found.mean[row], found.weights[row] @ found.values_of(row))


@pytest.mark.parametrize(("name", "rank"), [("gaussian", 5), ("rank 2", 2)])
def test_gaussian_values_have_the_moments_of_what_the_row_sees(name: str, rank: int) -> None:
    rows = some_rows(20_000)
    found = null_rows(rows, name, 0)
    for row in range(2):
        seen = rows.visible[row]
        here, there = rows.values_of(row)[seen], found.values_of(row)[seen]
        np.testing.assert_allclose(there.mean(0), here.mean(0), atol=0.15)
        variances, directions = np.linalg.eigh(np.cov(here.T))
        kept = (directions[:, -rank:] * variances[-rank:]) @ directions[:, -rank:].T
        np.testing.assert_allclose(np.cov(there.T), kept, atol=0.05 * variances[-1])
        assert np.linalg.matrix_rank(np.cov(there.T), tol=1e-8) == rank


@pytest.mark.parametrize("name", ["permuted", "gaussian", "rank 4"])
def test_a_seed_decides_them(name: str) -> None:
    rows = some_rows()
    np.testing.assert_array_equal(null_rows(rows, name, (1, 2)).values, null_rows(rows, name, (1, 2)).values)
    assert not np.array_equal(null_rows(rows, name, (1, 2)).values, null_rows(rows, name, (1, 3)).values)


@pytest.mark.parametrize("name", ["shuffled", "rank", "rank x", "rank 0", "permuted 3"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        null_rows(some_rows(), name, 0)


def test_independent_gaussian_values_alone_give_the_papers_auc_and_low_rank_its_own_ceiling() -> None:
    """The point of the controls: dropped mass predicts `closable` where values know nothing of weights."""
    random = np.random.default_rng(1)
    n_rows = 300
    weights = np.concatenate([oracle.softmax_rows(random, 1, 300, spread) for spread in np.linspace(0.5, 4, n_rows)])
    rows = instances(weights, random.normal(size=(300, 64)))
    real = ceilings(rows, (8,), free_weights=False)
    assert auc(real["dropped_mass"][:, None], real["closable"])[0] > 0.9
    low = ceilings(null_rows(rows, "rank 4", 0), (8,), free_weights=False)
    assert np.median(real["ceiling"]) < 0.15
    assert 0.5 < np.median(low["ceiling"]) < 0.98
