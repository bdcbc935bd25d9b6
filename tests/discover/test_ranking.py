"""Are signals ranked by what they tell in traces that did not choose them, and is `fitted.json` enough to score by?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import made_signals
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from made_signals import N_PROMPT
from sklearn.metrics import roc_auc_score

import kvlens
from kvlens.discover import combine
from kvlens.discover.inputs import read_pair
from kvlens.discover.simulate import Simulated, simulate
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.loading import Run
from kvlens.observables.table import BY_NAME
from kvlens.scorers.fitted import SIGNALS, parameters_of
from kvlens.scorers.table import make
from kvlens.stats import beyond_position, top_share

N_TRACES, N_LAYERS = 16, 6
NAMES = ("hidden_change_rolling", "lag_causal", "key_norm", "attention_mass", "age")


@pytest.fixture(scope="module")
def worlds() -> list[Simulated]:
    return simulate(0, n_traces=N_TRACES, n_layers=N_LAYERS, band=(2, 4), rho=0.3, n_tokens=(90, 130))


@pytest.fixture(scope="module")
def columns(worlds: list[Simulated]) -> list[dict[str, np.ndarray]]:
    """Of each trace: a scalar that tells something else than the band, noise, a signal of the future, the age."""
    random = np.random.default_rng(1)
    found = []
    for signal, label in worlds:
        n = len(label)
        found.append(
            {
                "lag_causal": 0.4 * label + random.normal(size=n),
                "key_norm": random.normal(size=signal.shape),
                "attention_mass": 2 * label[:, None] + random.normal(size=signal.shape),
                "age": np.arange(n)[::-1].astype(float),
            }
        )
    return found


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, worlds: list[Simulated], columns: list[dict[str, np.ndarray]]
) -> tuple[Path, Path]:
    return made_signals.pair(tmp_path_factory.mktemp("pair"), worlds, columns)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> Run:
    return kvlens.signals(*pair, tmp_path_factory.mktemp("ranking") / "out")


def row(run: Run, signal: str) -> Any:
    """The row that compares this signal with others."""
    (found,) = run.ranking[(run.ranking.signal == signal) & (run.ranking.choice != "each layer")].to_dict("records")
    return found


def test_what_tells_most_stands_first(run: Run) -> None:
    compared = run.ranking[run.ranking.choice != "each layer"]
    assert compared.signal.tolist() == ["attention_mass", "hidden_change_rolling", "lag_causal", "key_norm", "age"]
    assert (run.ranking.choice == "each layer").tolist() == [False] * 5 + [True] * 3 * N_LAYERS
    assert row(run, "hidden_change_rolling")["layer"] in (2, 3)
    assert row(run, "lag_causal")["choice"] == "only value"
    assert pd.isna(row(run, "lag_causal")["layer"])
    for name in ("hidden_change_rolling", "lag_causal", "attention_mass"):
        assert row(run, name)["rho_low"] > 0.05
        assert row(run, name)["adds_rho_low"] > 0
        assert row(run, name)["adds_auc"] > 0.02
    assert row(run, "key_norm")["rho_low"] < 0 < row(run, "key_norm")["rho_high"]
    assert abs(row(run, "key_norm")["adds_rho"]) < 0.05


def test_age_tells_nothing_beyond_position_and_is_counted(run: Run) -> None:
    found = row(run, "age")
    assert (found["n_traces"], found["n_undefined"]) == (0, N_TRACES // 2)
    assert np.isnan([found["rho"], found["auc_size"], found["adds_auc"]]).all()
    assert abs(found["raw_rho"]) < 1
    assert "position" in run.documents["fitted"]["left_out"]["age"]


def test_the_measures_are_those_of_the_traces(
    run: Run, worlds: list[Simulated], columns: list[dict[str, np.ndarray]], pair: tuple[Path, Path]
) -> None:
    half = [t["half"] for t in kvlens.bands(*pair, Path(run.path).parent / "bands").documents["bands"]["traces"]]
    confirm = [i for i, name in enumerate(half) if name == "confirm"]
    expected: dict[str, list[float]] = {"rho": [], "raw_rho": [], "auc_size": [], "auc_signed": []}
    for i in confirm:
        signal, effect = columns[i]["lag_causal"][:-1].astype(np.float32), worlds[i].label[:-1]
        left = [beyond_position(x[:, None].astype(float), np.arange(len(x)))[:, 0] for x in (signal, effect)]
        expected["rho"].append(float(np.corrcoef(*left)[0, 1]))
        expected["raw_rho"].append(float(scipy.stats.spearmanr(signal, effect).statistic))
        expected["auc_size"].append(roc_auc_score(top_share(np.abs(effect), 0.1), left[0]))
        expected["auc_signed"].append(roc_auc_score(top_share(effect, 0.1), left[0]))
    found = row(run, "lag_causal")
    assert found["n_traces"] == len(confirm) == N_TRACES // 2
    for name, values in expected.items():
        assert found[name] == pytest.approx(np.mean(values))
        error = 1.96 * np.std(values, ddof=1) / np.sqrt(len(values))
        assert found[f"{name}_low"] == pytest.approx(np.mean(values) - error, abs=0.025)
        assert found[f"{name}_high"] == pytest.approx(np.mean(values) + error, abs=0.025)


def test_no_layer_is_chosen_on_the_traces_that_judge_it(tmp_path: Path, worlds: list[Simulated]) -> None:
    """Many layers of noise: the best of them looks good where it was chosen, and only there."""
    random = np.random.default_rng(2)
    values, chosen = [], []
    for number in range(4):
        noise = [Simulated(random.normal(size=(len(label), 60)), label) for _, label in worlds]
        run = kvlens.signals(*made_signals.pair(tmp_path / f"{number}", noise), tmp_path / f"out{number}")
        values.append(row(run, "hidden_change_rolling"))
        chosen.append(run.ranking[run.ranking.choice == "each layer"].rho.abs().max())
    assert np.mean(chosen) > 0.045
    assert abs(np.mean([abs(v["rho"]) * np.sign(v["rho"]) for v in values])) < 0.03
    assert np.mean([v["adds_rho"] for v in values]) < 0.03


def test_only_causal_signals_are_fitted(run: Run) -> None:
    fitted = run.documents["fitted"]
    assert [f["signal"] for f in fitted["features"]] == ["hidden_change_rolling", "lag_causal", "key_norm"]
    assert "later" in fitted["left_out"]["attention_mass"]
    assert [row(run, name)["causal"] for name in NAMES] == [True, True, True, False, False]
    assert np.isnan(row(run, "attention_mass")["drops_auc"])
    assert row(run, "lag_causal")["drops_auc_low"] > 0
    assert abs(row(run, "key_norm")["drops_rho"]) < 0.05
    (change, lag_causal, _) = fitted["features"]
    assert change["layer"] in (2, 3)
    assert change["depth"] == change["layer"] / N_LAYERS
    assert lag_causal["layer"] is lag_causal["depth"] is None
    assert min(change["ridge"], lag_causal["ridge"]) > 2 * abs(fitted["features"][2]["ridge"])
    assert min(change["logistic"], lag_causal["logistic"]) > abs(fitted["features"][2]["logistic"])


def test_the_document_is_enough_to_score_with(
    run: Run, worlds: list[Simulated], columns: list[dict[str, np.ndarray]]
) -> None:
    fitted = run.documents["fitted"]
    assert (fitted["schema"], fitted["n_traces"]) == ("kvlens.fitted/1", N_TRACES)
    assert (fitted["intervention"], fitted["model"]["n_layers"]) == ("evict", N_LAYERS)
    assert fitted["signals_config"]["rolling_window"] == 64
    assert "higher = keep" in fitted["score"]
    rho = []
    for world, more in zip(worlds, columns, strict=True):
        values = {"hidden_change_rolling": world.signal, **more}
        score = np.zeros(len(world.label))
        for feature in fitted["features"]:
            found = values[feature["signal"]]
            found = found if feature["layer"] is None else found[:, feature["layer"]]
            score += feature["ridge"] * (found - feature["mean"]) / feature["std"]
        left = beyond_position(np.stack([score, world.label], 1)[:-1], np.arange(len(score) - 1))
        rho.append(np.corrcoef(left.T)[0, 1])
    held_out = fitted["held_out"]["score"]["ridge_rho"]
    assert np.mean(rho) > held_out["mean"] > 0.25  # fitted on these traces, so a little better than held out
    assert held_out["mean"] == pytest.approx(np.mean(rho), abs=0.05)
    assert held_out["low"] < held_out["mean"] < held_out["high"]
    flat = np.concatenate([np.asarray(more["lag_causal"][:-1]) for more in columns])
    assert fitted["features"][1]["mean"] == pytest.approx(flat.mean(), abs=1e-5)
    assert fitted["features"][1]["std"] == pytest.approx(flat.std(), abs=1e-5)


def test_the_combination_beats_each_signal_alone(run: Run) -> None:
    held_out = run.documents["fitted"]["held_out"]
    for name in ("rho", "auc"):
        assert held_out["beyond_position"][name]["low"] > 0
        gain = held_out["position_and_signals"][name]["mean"] - held_out["position"][name]["mean"]
        assert held_out["beyond_position"][name]["mean"] == pytest.approx(gain)
        assert gain > row(run, "hidden_change_rolling")[f"adds_{name}"]
        assert gain > row(run, "lag_causal")[f"adds_{name}"]


def test_what_a_decoder_has_not_at_hand_is_compared_but_not_fitted(tmp_path: Path, worlds: list[Simulated]) -> None:
    random = np.random.default_rng(0)
    telling = [0.4 * world.label + random.normal(size=len(world.label)) for world in worlds]
    run = kvlens.signals(
        *made_signals.pair(tmp_path, worlds, [{"surprisal": one} for one in telling]), tmp_path / "out"
    )
    fitted = run.documents["fitted"]
    assert row(run, "surprisal")["causal"]
    assert row(run, "surprisal")["adds_auc_low"] > 0
    assert np.isnan(row(run, "surprisal")["drops_auc"])
    assert "logits" in fitted["left_out"]["surprisal"]
    make("fitted", parameters_of(fitted))  # a policy can rest on all that was fitted
    causal = {signal.name for signal in BY_NAME.values() if signal.causal}
    assert causal - set(combine.OUT_OF_REACH) == set(SIGNALS)


def test_a_signal_that_only_follows_position_adds_nothing(tmp_path: Path, worlds: list[Simulated]) -> None:
    drift = [Simulated(s, label + np.linspace(0, 6, len(label))) for s, label in worlds]
    random = np.random.default_rng(0)
    more = [{"lag_causal": np.linspace(0, 6, len(label)) + random.normal(size=len(label))} for _, label in worlds]
    run = kvlens.signals(*made_signals.pair(tmp_path, drift, more), tmp_path / "out")
    found = row(run, "lag_causal")
    assert found["raw_rho"] > 0.5
    assert abs(found["rho"]) < 0.1
    assert abs(found["adds_rho"]) < 0.02
    assert run.documents["fitted"]["held_out"]["position"]["rho"]["mean"] > 0.6


def test_a_signal_with_holes_costs_the_others_no_token(tmp_path: Path, worlds: list[Simulated]) -> None:
    more = []
    for number, (_, label) in enumerate(worlds):
        rare = np.where(np.arange(len(label)) % 3 == 0, label, np.nan)
        some = np.where(np.arange(len(label)) < 8, np.nan, label)
        more.append({"lag_causal": rare, "key_norm": some if number else np.full(len(label), np.nan)})
    run = kvlens.signals(*made_signals.pair(tmp_path, worlds, more), tmp_path / "out")
    fitted = run.documents["fitted"]
    assert "34% of the tokens" in fitted["left_out"]["lag_causal"]
    assert [f["signal"] for f in fitted["features"]] == ["hidden_change_rolling", "key_norm"]
    lengths = [len(world.label) - 1 for world in worlds]
    assert fitted["n_tokens"] == sum(lengths[1:]) - 8 * (N_TRACES - 1)
    assert fitted["held_out"]["score"]["ridge_rho"]["n_traces"] == N_TRACES - 1
    assert row(run, "lag_causal")["rho"] > 0.9


def test_signals_that_are_hardly_known_together_lose_the_scarcest() -> None:
    known = [np.arange(100) >= 0, np.arange(100) >= 15, np.arange(100) < 86]
    candidates = [
        combine.Candidate(name, False, True, [0], {0: np.zeros(100)}, mask, "")
        for name, mask in zip("abc", known, strict=True)
    ]
    left_out: dict[str, str] = {}
    kept, together = combine._jointly_known(candidates, 100, left_out)
    assert [one.name for one in kept] == ["a", "c"]
    assert "71%" in left_out["b"]
    assert (together == known[2]).all()


def test_folds_hold_whole_traces_and_do_not_depend_on_their_order() -> None:
    ids = [f"t{number}" for number in range(12)]
    folds = combine.folds_of(ids, 0)
    assert np.bincount(folds).tolist() == [3, 3, 2, 2, 2]
    assert combine.folds_of(ids[::-1], 0).tolist() == folds.tolist()[::-1]
    assert combine.folds_of(ids[:1], 0).tolist() == [0]


@pytest.mark.parametrize("n_traces", [1, 2, 3])
def test_few_traces_run_and_say_so(tmp_path: Path, worlds: list[Simulated], n_traces: int) -> None:
    run = kvlens.signals(*made_signals.pair(tmp_path, worlds[:n_traces]), tmp_path / "out")
    assert run.meta["results"]["few_traces"]
    assert (run.documents["fitted"]["held_out"] is None) == (n_traces == 1)
    assert len(run.documents["fitted"]["features"]) == 1
    json.loads((tmp_path / "out" / "fitted.json").read_text(), parse_constant=pytest.fail)


def test_without_a_causal_signal_there_is_no_score(tmp_path: Path, worlds: list[Simulated]) -> None:
    run = kvlens.signals(*made_signals.pair(tmp_path, worlds[:4], marks=False), tmp_path / "out")
    fitted = run.documents["fitted"]
    assert fitted["features"] == []
    assert fitted["held_out"] is None
    assert "not marked causal" in fitted["left_out"]["hidden_change_rolling"]
    assert pd.isna(row(run, "hidden_change_rolling")["causal"])


def test_a_run_without_signals_or_without_sklearn_is_refused(
    tmp_path: Path, pair: tuple[Path, Path], worlds: list[Simulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, signals = made_signals.pair(tmp_path, worlds[:2])
    made_signals.edit(signals, lambda table: table.drop_columns(["hidden_change_rolling"]))
    with pytest.raises(InputError, match="has no signals"):
        kvlens.signals(labels, signals, tmp_path / "out")
    for name in ("sklearn", "sklearn.linear_model"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentLacks, match="scikit-learn") as caught:
        kvlens.signals(*pair, tmp_path / "out")
    assert ".[lens]" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_the_same_command_writes_the_same_bytes(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    again = kvlens.signals(*pair, tmp_path / "out")
    for name in ("ranking.parquet", "fitted.json"):
        assert (Path(again.path) / name).read_bytes() == (Path(run.path) / name).read_bytes()
    assert N_PROMPT > 0


def test_the_layer_of_a_fold_is_chosen_without_its_traces(pair: tuple[Path, Path]) -> None:
    found = read_pair(*pair)
    values = found.read("key_norm")
    folds = np.arange(N_TRACES) % 2
    rho = np.zeros((N_TRACES, N_LAYERS))
    rho[folds == 0, 1], rho[folds == 1, 4], rho[:, 2] = 0.5, -0.6, 0.2
    one = combine.candidate(found, "key_norm", values, rho, folds)
    assert one.layers == [4, 1, 4]  # without fold 0, without fold 1, over all
    assert set(one.columns) == {1, 4}
    rows = np.concatenate([trace.rows for trace in found.traces])
    assert (one.columns[4] == values[rows, 4]).all()
