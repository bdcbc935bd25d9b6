"""Do two label runs agree as far as they should, and are others refused?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_runs
import made_signals
import numpy as np
import pytest
import scipy.stats
from made_signals import trace_id

import kvlens
from kvlens.errors import InputError
from kvlens.loading import Run

N = 80


def effects(seed: int, n_traces: int = 14, n: int = N) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_t(3, size=n) for _ in range(n_traces)]


def compare(a: Path, b: Path, out: Path, **options: Any) -> tuple[Run, dict[str, Any]]:
    run = kvlens.compare_labels(a, b, out, **options)
    return run, run.documents["agreement"]


def test_the_measures_are_those_of_the_common_tokens(tmp_path: Path) -> None:
    one, noise = effects(0), effects(1)
    other = [x + 0.7 * y for x, y in zip(one, noise, strict=True)]
    other[0][:5] = np.nan  # not labelled there
    one[0][20] = np.nan
    a = made_signals.labels(tmp_path / "a", one)
    b = made_signals.labels(tmp_path / "b", other, config={"intervention": "evict", "window": 8, "stride": 1})
    run, found = compare(a, b, tmp_path / "out")
    prompt = np.full(made_signals.N_PROMPT - 1, 0.01)  # the sink is left out
    for number, row in enumerate(run.agreement.itertuples()):
        x, y = (np.r_[prompt, values[number][:-1]] for values in (one, other))
        both = np.isfinite(x) & np.isfinite(y)
        x, y = x[both], y[both]
        assert row.trace_id == trace_id(number)
        assert row.n_tokens == len(x) == N + 4 - 6 * (number == 0)
        assert row.spearman == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
        k = round(len(x) / 10)
        top_x, top_y = (set(np.argsort(-np.abs(v), kind="stable")[:k]) for v in (x, y))
        assert row.top_tenth_overlap == pytest.approx(len(top_x & top_y) / k)
        assert row.sign_agreement == pytest.approx(np.mean(np.sign(x) == np.sign(y)))
        assert row.n_above_noise == len(x)
    assert found["spearman"]["mean"] == pytest.approx(run.agreement.spearman.mean())
    assert 0.5 < found["spearman"]["low"] < found["spearman"]["mean"] < found["spearman"]["high"] < 1
    assert (found["n_traces"], found["n_tokens"]) == (14, run.agreement.n_tokens.sum())
    assert found["differences"] == {"window": {"a": 1, "b": 8}}


def test_strangers_agree_by_chance(tmp_path: Path) -> None:
    a, b = (made_signals.labels(tmp_path / f"{seed}", effects(seed, 40)) for seed in (0, 1))
    _, found = compare(a, b, tmp_path / "out")
    for name, chance in (("spearman", 0), ("top_tenth_overlap", 0.1), ("sign_agreement", 0.5)):
        assert found[name]["mean"] == pytest.approx(chance, abs=0.06)


def test_a_scaled_run_agrees_wholly(tmp_path: Path) -> None:
    one = effects(0)
    a = made_signals.labels(tmp_path / "a", one)
    b = made_signals.labels(tmp_path / "b", [3 * x for x in one], dtype="bfloat16")
    run, found = compare(a, b, tmp_path / "out")
    assert (run.agreement[["spearman", "top_tenth_overlap", "sign_agreement"]] == 1.0).all(axis=None)
    assert found["spearman"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n_traces": 14}
    assert found["differences"] == {"dtype": {"a": "float32", "b": "bfloat16"}}


def test_signs_count_above_both_noise_floors(tmp_path: Path) -> None:
    key = trace_id(0)
    values = np.r_[23.5, np.full(N, 1.0) * np.where(np.arange(N) % 2, 1, -1) * np.linspace(0.1, 2, N)]

    def run(name: str, effect: np.ndarray, noise: float | None) -> Path:
        with made_runs.start(tmp_path / name, config={"name": name}) as folder:
            tokens = made_signals.tokens(key, np.r_[effect, np.full(3, np.nan)])
            row = {"trace_id": [key], "n_tokens": N + 4, "n_target": 3, "noise_nats": noise}
            for table, rows in (("windows", made_signals.windows(key, effect)), ("tokens", tokens), ("traces", row)):
                folder.write_part(table, key, rows)
            folder.finish({table: [key] for table in ("windows", "tokens", "traces")})
        return tmp_path / name

    a = run("a", values, 0.5)
    turned = np.where(np.abs(values) > 1, values, -values)
    b, c = run("b", turned, 1.0), run("c", turned, None)
    found, _ = compare(a, b, tmp_path / "ab")
    assert found.agreement.n_above_noise.tolist() == [int((np.abs(values[1:]) > 1).sum())]
    assert found.agreement.sign_agreement.tolist() == [1.0]
    found, document = compare(a, c, tmp_path / "ac")
    assert found.agreement.n_above_noise.tolist() == [int((np.abs(values[1:]) > 0.5).sum())]
    assert 0.5 < found.agreement.sign_agreement[0] < 1
    assert document["few_traces"]
    assert document["spearman"]["low"] is None


def test_traces_of_one_run_alone_are_counted(tmp_path: Path) -> None:
    one = effects(0, 6)
    one[4] = np.full(N, np.nan)
    a = made_signals.labels(tmp_path / "a", one)
    b = made_signals.labels(tmp_path / "b", effects(1, 5))
    run, found = compare(a, b, tmp_path / "out")
    assert (found["n_traces"], found["n_skipped"]) == (4, 2)
    reasons = {entry["id"]: entry["reason"] for entry in run.meta["counts"]["skipped"]}
    assert reasons[trace_id(5)] == "in one of the runs only"
    assert reasons[trace_id(4)].startswith("5 tokens are labelled in both")


def test_constant_effects_are_left_out_of_the_mean(tmp_path: Path) -> None:
    one = effects(0, 3)
    one[1][:] = 0.01
    a = made_signals.labels(tmp_path / "a", one)
    b = made_signals.labels(tmp_path / "other", effects(1, 3))
    run, found = compare(a, b, tmp_path / "out")
    assert np.isnan(run.agreement.spearman).tolist() == [False, True, False]
    assert found["spearman"]["n_traces"] == 2
    assert np.isfinite(found["spearman"]["mean"])


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = made_signals.labels(tmp_path / "a", effects(0, 3))
    with pytest.raises(InputError, match="the same run"):
        compare(a, a, tmp_path / "out")
    with pytest.raises(InputError, match="so there is no audit set"):
        compare(a, made_signals.labels(tmp_path / "b", effects(1, 3)), tmp_path / "out", audit_only=True)
    longer = made_signals.labels(tmp_path / "longer", effects(1, 3, n=N + 1))
    with pytest.raises(InputError, match=r"trace 'trace-000' has 89 tokens in .* and 90 in"):
        compare(a, longer, tmp_path / "out")
    strangers = made_runs.write(tmp_path / "strangers", {"apples": made_runs.APPLES})
    with pytest.raises(InputError, match="no trace in common"):
        compare(a, strangers, tmp_path / "out")
    _, signals = made_signals.planted(tmp_path / "pair", n_traces=2)
    with pytest.raises(InputError, match="is given as B, but its schema is"):
        compare(a, signals, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_tokens_are_refused_at_the_first_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = made_signals.labels(tmp_path / "a", effects(0, 3))
    ids = made_signals.token_ids(N + made_signals.N_PROMPT + 3)
    ids[[11, 30]] = 999
    monkeypatch.setattr(made_signals, "token_ids", lambda n: ids)
    b = made_signals.labels(tmp_path / "b", effects(1, 3))
    with pytest.raises(InputError, match=r"trace 'trace-000', position 11: token_id 77 in .* and 999 in"):
        compare(a, b, tmp_path / "out")


def test_a_screened_run_is_compared_by_its_audit_set(tmp_path: Path) -> None:
    key, values = trace_id(0), np.random.default_rng(0).normal(size=N)
    values[0] = 23.5
    a = made_signals.labels(tmp_path / "a", [np.random.default_rng(1).normal(size=N - made_signals.N_PROMPT)])
    with made_runs.start(tmp_path / "b", config={"screen": 0.5}) as run:
        chosen = np.where(np.arange(N) % 2, "audit", "screen")
        rows = {"windows": made_signals.windows(key, values, chosen)}
        rows["tokens"] = made_signals.tokens(key, np.r_[values, np.full(3, np.nan)])
        rows["traces"] = {"trace_id": [key], "n_tokens": N + 3, "n_target": 3}
        for table, columns in rows.items():
            run.write_part(table, key, columns)
        run.finish({table: [key] for table in rows})
    with pytest.raises(InputError, match="made with a screen"):
        compare(a, tmp_path / "b", tmp_path / "out")
    found, _ = compare(a, tmp_path / "b", tmp_path / "out", audit_only=True)
    assert found.agreement.n_tokens.tolist() == [N // 2 - 1]  # odd positions, the last of them is never hidden


def test_ties_are_broken_at_random_and_not_by_position(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sparse = [[np.where(random.random(N) < 0.04, random.normal(size=N), 1e-9) for _ in range(12)] for _ in range(2)]
    a, b = (made_signals.labels(tmp_path / f"{i}", values) for i, values in enumerate(sparse))
    run, _ = compare(a, b, tmp_path / "out")
    prompt = np.full(made_signals.N_PROMPT - 1, 0.01)
    for number, row in enumerate(run.agreement.itertuples()):
        x, y = (np.abs(np.r_[prompt, values[number][:-1]]) for values in sparse)
        k, shared = round(len(x) / 10), []
        for _ in range(400):
            tops = [set(np.lexsort((random.random(len(v)), -v))[:k].tolist()) for v in (x, y)]
            shared.append(len(tops[0] & tops[1]) / k)
        assert row.top_tenth_overlap == pytest.approx(np.mean(shared), abs=5 * np.std(shared) / 20 + 1e-9)


def test_another_target_is_refused(tmp_path: Path) -> None:
    runs = [kvlens.load(made_signals.labels(tmp_path / name, effects(0))) for name in "ab"]
    tokens = runs[1].tables["tokens"]
    first = tokens[tokens.segment == "target"].pos.min()
    tokens.loc[tokens.pos == first - 1, "segment"] = "target"
    with pytest.raises(InputError, match="the target starts at position"):
        kvlens.compare_labels(runs[0], runs[1], tmp_path / "out")


@pytest.mark.parametrize("verb", ["bands", "signals", "compare_labels"])
def test_an_input_is_never_written_over(tmp_path: Path, verb: str) -> None:
    labels, signals = made_signals.planted(tmp_path)
    if verb == "compare_labels":
        labels, signals = (made_signals.labels(tmp_path / name, effects(seed)) for seed, name in enumerate("ab"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for out in (labels, signals, tmp_path / "." / Path(labels).name):
        with pytest.raises(InputError, match="is to be written, but it holds"):
            getattr(kvlens, verb)(labels, signals, out, force=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
