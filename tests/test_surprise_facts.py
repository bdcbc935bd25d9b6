"""What is read off a run of surprise, against tables solved by hand and rank correlations of scipy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_runs
import made_surprise
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from made_surprise import APPLES, HOSTILE, NAN, Made, long

from kvlens import surprise_facts as facts
from kvlens.errors import InputError
from kvlens.loading import Run, load


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load(made_surprise.write(tmp_path / "run", {"apples": APPLES, "<b>": HOSTILE}))


@pytest.fixture
def bare(tmp_path: Path) -> Run:
    """Without refreshes."""
    return load(made_surprise.write(tmp_path / "bare", {"apples": APPLES}, cycle=None))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Run:
    traces = {"a": long(0), "short": APPLES, "b": long(1, n=90)}
    return load(made_surprise.write(tmp_path_factory.mktemp("runs") / "several", traces))


# The run and its names


def test_a_run_is_taken_as_it_is_or_by_its_folder(run: Run) -> None:
    assert facts.surprise_run(run) is run
    for path in (Path(run.path), run.path):
        assert facts.surprise_run(path).schema == run.schema
    assert facts.variants(run) == ["full", "fast"]
    assert facts.chosen_variant(run, None) == "full"
    assert facts.chosen_variant(run, "fast") == "fast"
    assert facts.chosen_traces(run, None) == ["apples", "<b>"]
    assert facts.chosen_traces(run, "<b>") == ["<b>"]


def test_what_is_no_single_run_of_surprise_is_refused(run: Run, bare: Run, tmp_path: Path) -> None:
    labels = made_runs.write(tmp_path / "labels", {"apples": made_runs.APPLES})
    for other in (labels, load(labels), load([run.path, bare.path])):
        with pytest.raises(InputError, match="no single run of surprise") as caught:
            facts.surprise_run(other)
        assert caught.value.hint
    with pytest.raises(InputError, match="nowhere"):
        facts.surprise_run(tmp_path / "nowhere")


def test_names_that_are_none_are_answered_with_those_there_are(run: Run) -> None:
    with pytest.raises(InputError, match="no variant 'fats'") as caught:
        facts.chosen_variant(run, "fats")
    assert "full; fast" in caught.value.hint
    with pytest.raises(InputError, match="no trace 'aples'") as caught:
        facts.chosen_traces(run, "aples")
    assert "apples" in caught.value.hint
    with pytest.raises(InputError) as caught:
        facts.chosen_traces(run, "~~~~")
    assert "apples, <b>" in caught.value.hint
    for call in (
        lambda: facts.by_variant(run, "aples"),
        lambda: facts.top_tokens(run, "aples", None, 3),
        lambda: facts.top_tokens(run, None, "fats", 3),
    ):
        with pytest.raises(InputError):
            call()


def test_what_a_reader_must_know(run: Run, bare: Run) -> None:
    said = facts.about(run)
    assert said["model"] == "made-up (Q4_1, dequantised)"
    assert said["precision"] == "float32 on cpu, attention sdpa"
    assert said["traces"] == "2 traces, 22 tokens of prompt and reasoning"
    assert said["refreshed"] == "every 4 tokens to 4 (0 recent among them) and the first 1"
    assert said["made"].endswith("seed 0")
    assert "refreshed" not in facts.about(bare)
    assert facts.about(bare)["traces"].startswith("1 trace, 12 ")


# Fates


def test_the_fate_of_each_token(run: Run) -> None:
    found = facts.fates(run, "apples", "full")
    assert list(found.pos) == list(range(12))
    assert list(found.token) == APPLES.tokens
    assert list(found.segment) == ["prompt"] * 6 + ["reasoning"] * 6
    np.testing.assert_array_equal(found.score, np.float32(APPLES.scores["full"]))
    assert found.refresh.dtype == pd.Int32Dtype()
    left = [None if pd.isna(value) else int(value) for value in found.refresh]
    assert left == [None, 1, 0, None, 1, 0, 0, 1, None, None, 1, None]
    last = [-2, 0.5, 2, 5, 1, 0, -2, 3, 7, 6, -3, NAN]
    np.testing.assert_array_equal(found.last_score, np.float32(last))
    other = facts.fates(run, "apples", "fast")
    assert [pos for pos in range(12) if pd.isna(other.refresh[pos])] == [0, 8, 9, 10, 11]


def test_a_token_that_no_refresh_has_seen_stays(run: Run) -> None:
    """The text ends after a refresh: its last two tokens never were held when one came."""
    found = facts.fates(run, "<b>", "full")
    assert found.refresh.isna().tolist() == [True, False, True, False, False, True, True, True, True, True]
    assert found.last_score.isna().tolist() == [False] * 7 + [True] * 3


def test_without_refreshes_there_are_no_fates(bare: Run) -> None:
    found = facts.fates(bare, "apples", "fast")
    assert list(found.columns) == ["pos", "token", "segment", "score"]


def test_rows_may_stand_in_any_order(run: Run) -> None:
    mixed = {name: table.sample(frac=1, random_state=3) for name, table in run.tables.items()}
    other = Run(run.path, run.meta, mixed)
    pd.testing.assert_frame_equal(facts.fates(other, "apples", "full"), facts.fates(run, "apples", "full"))
    pd.testing.assert_frame_equal(facts.steps_of(other, "apples", "full"), facts.steps_of(run, "apples", "full"))
    one, two = (facts.staleness(given, "full", ["apples"]) for given in (other, run))
    pd.testing.assert_frame_equal(one, two)


# Steps


def test_each_refresh_with_the_text_that_left(run: Run) -> None:
    assert facts.steps_of(run, "apples", "full").to_dict("records") == [
        {"refresh": 0, "n_seen": 8, "n_held": 8, "n_left": 3, "left": " has … .\nShe"},
        {"refresh": 1, "n_seen": 12, "n_held": 9, "n_left": 4, "left": "Ann …  apples …  eats …  so"},
    ]
    fast = facts.steps_of(run, "apples", "fast")
    assert list(fast.left) == ["Ann has two", " apples.\nShe eats"]
    with pytest.raises(InputError, match="no variant 'no such'"):
        facts.steps_of(run, "apples", "no such")


def test_what_a_run_does_not_hold_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    bare = facts.surprise_run(made_surprise.write(tmp_path / "bare", {"apples": APPLES}, cycle=None))
    for call in (facts.steps_of, lambda run, _, variant: facts.staleness(run, variant)):
        with pytest.raises(InputError, match="no refreshes"):
            call(bare, "apples", "full")
    for call in (facts.fates, facts.steps_of):
        with pytest.raises(InputError, match="no trace 'pears'"):
            call(run, "pears", "full")
    with pytest.raises(InputError, match="no variant 'zzz'"):
        facts.fates(run, "apples", "zzz")
    with pytest.raises(InputError, match="no variant 'zzz'"):
        facts.agreement(run, "apples", "full", "zzz")


# Staleness


def rho(one: np.ndarray, other: np.ndarray) -> float:
    known = np.isfinite(one) & np.isfinite(other)
    return float(scipy.stats.spearmanr(one[known], other[known]).statistic) if known.sum() >= 8 else NAN


def by_refresh(made: Made, variant: str, n: int) -> list[np.ndarray]:
    """For each refresh the score of every position, NaN where it is not held."""
    found = []
    for _, positions, scores, _ in made.steps[variant]:
        row = np.full(n, np.nan)
        row[list(positions)] = scores
        found.append(row.astype(np.float32).astype(float))
    return found


@pytest.mark.parametrize("variant", ["full", "fast"])
def test_staleness_is_spearmans_over_tokens_held_at_both(several: Run, variant: str) -> None:
    wanted = []
    for trace_id, made in (("a", long(0)), ("b", long(1, n=90))):
        table = by_refresh(made, variant, 90)
        assert len(table) > 3
        for apart in range(1, len(table)):
            values = [rho(table[k], table[k + apart]) for k in range(len(table) - apart)]
            known = [value for value in values if not math.isnan(value)]
            if known:
                wanted.append((trace_id, apart, np.mean(known), len(known)))
    found = facts.staleness(several, variant)
    assert list(found.columns) == ["trace_id", "apart", "rho", "n_pairs"]
    assert [(row.trace_id, row.apart, row.n_pairs) for row in found.itertuples()] == [
        (trace_id, apart, n) for trace_id, apart, _, n in wanted
    ]
    np.testing.assert_allclose(found.rho, [value for *_, value, _ in wanted], atol=1e-12)
    alone = facts.staleness(several, variant, ["b"])
    pd.testing.assert_frame_equal(alone, found[found.trace_id == "b"].reset_index(drop=True))


def test_staleness_of_few_tokens_has_no_rows(run: Run) -> None:
    assert facts.staleness(run, "full").empty  # five tokens are held at both refreshes


# By variant


def test_each_variant_in_a_row(run: Run) -> None:
    found = facts.by_variant(run).set_index("variant")
    assert list(found.index) == ["full", "fast"]
    assert list(found.n_tokens) == [20, 20]
    both = [*APPLES.scores["full"], *HOSTILE.scores["full"]]
    assert found["median"]["full"] == np.nanmedian(both)
    one = scipy.stats.spearmanr(APPLES.scores["full"][:-1], APPLES.scores["fast"][:-1]).statistic
    assert found.rho_with_first["full"] == pytest.approx(1)
    assert found.rho_with_first["fast"] == pytest.approx((one + 1) / 2)  # the other trace has the same scores twice
    assert list(found.n_refreshes) == [3, 3]
    assert found.evicted["full"] == pytest.approx(1 - (5 + 5) / (12 + 8))
    assert found.rho_with_next.isna().all()
    alone = facts.by_variant(run, "apples").set_index("variant")
    assert list(alone.n_tokens) == [11, 11]
    assert alone.rho_with_first["fast"] == pytest.approx(one)
    assert list(alone.n_refreshes) == [2, 2]
    assert alone.evicted["fast"] == pytest.approx(1 - 5 / 12)


def test_the_staleness_of_a_variant_is_the_mean_of_its_traces(several: Run) -> None:
    rows = facts.staleness(several, "fast")
    found = facts.by_variant(several).set_index("variant")
    assert found.rho_with_next["fast"] == pytest.approx(rows.rho[rows.apart == 1].mean())
    assert (rows.apart == 1).sum() == 2  # the third trace is too short to tell


def test_without_refreshes_nothing_is_said_of_them(bare: Run) -> None:
    assert list(facts.by_variant(bare).columns) == ["variant", "n_tokens", "median", "rho_with_first"]


def test_a_run_of_traces_that_never_were_refreshed(tmp_path: Path) -> None:
    still = Made(APPLES.tokens, 6, APPLES.scores, {"full": [], "fast": []})
    run = load(made_surprise.write(tmp_path / "still", {"apples": still}))
    found = facts.by_variant(run)
    assert list(found.n_refreshes) == [0, 0]
    assert list(found.evicted) == [0.0, 0.0]
    assert facts.steps_of(run, "apples", "full").empty
    assert facts.fates(run, "apples", "full").refresh.isna().all()
    assert facts.staleness(run, "full").empty


def test_scores_that_are_all_null_have_no_median(tmp_path: Path) -> None:
    nothing = Made(["a", "b"], 1, {"full": [NAN, NAN], "full,gap=5": [NAN, NAN]})
    run = load(made_surprise.write(tmp_path / "run", {"t": nothing}, cycle=None))
    found = facts.by_variant(run)
    assert list(found.n_tokens) == [0, 0]
    assert found["median"].isna().all()
    assert found.rho_with_first.isna().all()
    assert facts.top_tokens(run, None, None, 5).empty


def test_agreement_needs_eight_tokens_that_both_score(tmp_path: Path) -> None:
    for n, known in ((8, True), (7, False)):
        up = [float(value) for value in range(n)]
        made = Made(["t"] * (n + 1), 1, {"full": [*up, NAN], "fast": [*up[::-1], 3.0]})
        run = load(made_surprise.write(tmp_path / str(n), {"t": made}, cycle=None))
        found = facts.agreement(run, "t", "full", "fast")
        assert found == pytest.approx(-1) if known else math.isnan(found)


# Top tokens


def test_the_top_tokens_are_those_of_the_highest_score(run: Run) -> None:
    top = facts.top_tokens(run, "apples", None, 4)
    assert list(top.pos) == [8, 9, 3, 4]
    assert list(top.score) == [7, 6, 5, 4]
    assert list(top.token) == [" one", ",", " two", " apples"]
    assert list(top.trace_id) == ["apples"] * 4
    every = facts.top_tokens(run, None, "fast", 1000)
    assert len(every) == 20  # tokens without a score are not among them
    assert list(every.score) == sorted(every.score, reverse=True)
    assert list(zip(every.score, every.trace_id, strict=True))[:4] == [
        (10, "apples"), (9, "apples"), (9, "<b>"), (8, "apples"),
    ]  # fmt: skip


@pytest.mark.parametrize("n", [0, -3, True, 2.0, "3"])
def test_a_number_of_tokens_that_is_none_is_refused(run: Run, n: Any) -> None:
    call: Callable[..., Any] = getattr(facts.top_tokens, "__wrapped__", facts.top_tokens)  # behind the check of types
    with pytest.raises(InputError, match="cannot list"):
        call(run, None, None, n)
