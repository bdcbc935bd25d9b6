"""Does `bands` find what was planted, by the numbers it says, and say no when it cannot know?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_signals
import numpy as np
import pytest
import scipy.stats
from made_signals import trace_id

import kvlens
from kvlens.discover.simulate import Simulated, simulate
from kvlens.errors import InputError

N_LAYERS = 10


def document(labels: Path, signals: Path, out: Path, **options: Any) -> dict[str, Any]:
    return kvlens.bands(labels, signals, out, **options).documents["bands"]


def column(found: dict[str, Any], name: str) -> np.ndarray:
    return np.array([layer[name] for layer in found["layers"]], dtype=float)


@pytest.fixture(scope="module")
def worlds() -> list[Simulated]:
    return simulate(0, n_traces=24, n_layers=N_LAYERS, band=(3, 6), rho=0.3, n_tokens=(120, 200))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, worlds: list[Simulated]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planted")
    return document(*made_signals.pair(folder, worlds), folder / "out")


def test_a_planted_band_is_found_and_confirmed(found: dict[str, Any]) -> None:
    (band,) = found["bands"]
    assert (band["sign"], band["start"], band["stop"]) == (1, 3, 6)
    assert (band["depth_start"], band["depth_stop"]) == (0.3, 0.6)
    assert band["confirmed"]
    assert 0 < band["confirm_low"] < band["confirm_rho"] < band["confirm_high"]
    assert band["p_value"] <= 0.05
    assert band["stability"]["found"] == 1.0
    assert found["verdict"] == "bands"
    assert found["reason"] == "1 found in 12 traces, 1 confirmed in 12 others"
    assert (found["n_traces"], found["n_discover"], found["n_confirm"]) == (24, 12, 12)
    assert (found["signal"], found["intervention"]) == ("hidden_change_rolling", "evict")
    assert found["model"]["n_layers"] == N_LAYERS


def test_a_negative_band_has_its_sign(tmp_path: Path, worlds: list[Simulated]) -> None:
    turned = [Simulated(-signal, label) for signal, label in worlds]
    (band,) = document(*made_signals.pair(tmp_path, turned), tmp_path / "out")["bands"]
    assert (band["sign"], band["start"], band["stop"], band["confirmed"]) == (-1, 3, 6, True)
    assert band["confirm_low"] < band["confirm_rho"] < band["confirm_high"] < 0
    assert band["discover_rho"] < 0


def slow_rho(signal: np.ndarray, label: np.ndarray) -> float:
    """The rank correlation of one layer without a quartic in the position's rank, the plain way."""
    powers = np.stack([np.linspace(-1, 1, len(label)) ** power for power in range(5)], 1)
    left = [
        ranked - powers @ np.linalg.lstsq(powers, ranked, rcond=None)[0]
        for ranked in map(scipy.stats.rankdata, (signal, label))
    ]
    return float(np.corrcoef(*left)[0, 1])


def test_every_number_is_that_of_the_traces(found: dict[str, Any], worlds: list[Simulated]) -> None:
    kept = [Simulated(signal[:-1].astype(np.float32), label[:-1]) for signal, label in worlds]  # the last has no label
    rho = np.array([[slow_rho(signal[:, layer], label) for layer in range(N_LAYERS)] for signal, label in kept])
    assert np.array([trace["rho"] for trace in found["traces"]]) == pytest.approx(rho, abs=1e-6)
    assert column(found, "mean_rho") == pytest.approx(rho.mean(0), abs=1e-6)
    error = rho.std(0, ddof=1) / np.sqrt(24)
    assert column(found, "low") == pytest.approx(rho.mean(0) - 1.96 * error, abs=0.02)
    assert column(found, "high") == pytest.approx(rho.mean(0) + 1.96 * error, abs=0.02)
    p = scipy.stats.ttest_1samp(rho, 0).pvalue
    assert column(found, "p_value") == pytest.approx(p, abs=0.03)
    label = np.concatenate([world.label for world in kept])
    signal = np.concatenate([world.signal for world in kept])
    pooled = [scipy.stats.spearmanr(signal[:, layer], label).statistic for layer in range(N_LAYERS)]
    assert column(found, "pooled_rho") == pytest.approx(pooled)
    trend = np.mean(
        [
            [scipy.stats.spearmanr(s[:, layer], np.arange(len(s))).statistic for layer in range(N_LAYERS)]
            for s, _ in kept
        ],
        axis=0,
    )
    rows = found["position_trend"]["hidden_change_rolling"]
    assert [row["mean_rho"] for row in rows] == pytest.approx(trend)
    half = np.array([trace["half"] == "discover" for trace in found["traces"]])
    (band,) = found["bands"]
    assert band["discover_rho"] == pytest.approx(rho[half, 3:6].mean(), abs=1e-6)
    assert band["confirm_rho"] == pytest.approx(rho[~half, 3:6].mean(), abs=1e-6)
    assert found["n_tokens"] == len(label)


def test_noise_has_no_band(tmp_path: Path) -> None:
    noise = simulate(1, n_traces=16, n_layers=N_LAYERS, rho=0.0, n_tokens=(100, 140))
    found = document(*made_signals.pair(tmp_path, noise), tmp_path / "out")
    assert (found["verdict"], found["bands"], found["reason"]) == ("no band", [], "none found in 8 traces")


def test_a_band_of_one_half_alone_is_not_confirmed(tmp_path: Path, found: dict[str, Any]) -> None:
    noise = simulate(2, n_traces=24, n_layers=N_LAYERS, rho=0.0, n_tokens=(120, 200))
    planted = simulate(0, n_traces=24, n_layers=N_LAYERS, band=(3, 6), rho=0.3, n_tokens=(120, 200))
    halves = [trace["half"] for trace in found["traces"]]
    mixed = [one if half == "discover" else other for half, one, other in zip(halves, planted, noise, strict=True)]
    found = document(*made_signals.pair(tmp_path, mixed), tmp_path / "out")
    (band,) = found["bands"]
    assert not band["confirmed"]
    assert band["confirm_low"] < 0 < band["confirm_high"]
    assert found["verdict"] == "no band"
    assert found["reason"] == "1 found in 12 traces, 0 confirmed in 12 others"


def test_under_twelve_traces_the_verdict_says_that_it_cannot_confirm(tmp_path: Path, worlds: list[Simulated]) -> None:
    found = document(*made_signals.pair(tmp_path, worlds[:11]), tmp_path / "out")
    assert found["verdict"] == "no band"
    assert found["reason"].startswith("cannot confirm with 11 traces: 12 are needed")
    assert (found["n_discover"], found["n_confirm"]) == (11, 0)
    (band,) = found["bands"]
    assert (band["start"], band["stop"], band["confirmed"]) == (3, 6, False)
    assert band["confirm_rho"] is band["confirm_low"] is band["confirm_high"] is None


@pytest.mark.parametrize("n_traces", [1, 2])
def test_one_or_two_traces_run(tmp_path: Path, worlds: list[Simulated], n_traces: int) -> None:
    found = document(*made_signals.pair(tmp_path, worlds[:n_traces]), tmp_path / "out")
    assert (found["n_traces"], found["bands"]) == (n_traces, [])
    assert [layer["low"] is None for layer in found["layers"]] == [n_traces == 1] * N_LAYERS


def test_constant_and_missing_values_are_counted_and_never_spread(tmp_path: Path, worlds: list[Simulated]) -> None:
    changed = [Simulated(signal.copy(), label) for signal, label in worlds]
    changed[0].signal[:] = 1.0  # says nothing in any layer
    changed[1].signal[:, 8] = 2.0  # nothing in one
    changed[2].signal[10:15, 4] = np.nan
    changed[3].signal[:] = np.nan
    changed[4].signal[:] = np.arange(len(changed[4].label))[:, None]  # all position
    found = document(*made_signals.pair(tmp_path, changed), tmp_path / "out")
    assert found["n_traces"] == 21
    assert found["n_skipped"] == 3
    assert [layer["n_traces"] for layer in found["layers"]] == [21] * 8 + [20, 21]
    assert found["n_tokens_without_signal"] == 5
    assert found["n_tokens"] == sum(len(w.label) - 1 for i, w in enumerate(worlds) if i not in (0, 3, 4)) - 5
    assert [band["start"] for band in found["bands"]] == [3]
    assert np.isfinite(np.array([column(found, name) for name in ("mean_rho", "low", "high", "pooled_rho")])).all()
    run = kvlens.load(tmp_path / "out")
    reasons = {entry["id"]: entry["reason"] for entry in run.meta["counts"]["skipped"]}
    assert sorted(reasons) == [trace_id(i) for i in (0, 3, 4)]
    assert "constant, missing or explained by position" in reasons[trace_id(0)]


def test_a_signal_that_says_nothing_anywhere_is_refused_before_any_folder(
    tmp_path: Path, worlds: list[Simulated]
) -> None:
    flat = [Simulated(np.ones_like(signal), label) for signal, label in worlds[:3]]
    with pytest.raises(InputError, match="has no rank correlation"):
        document(*made_signals.pair(tmp_path, flat), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_signals_that_do_not_exist_or_have_no_layers_are_refused(tmp_path: Path, worlds: list[Simulated]) -> None:
    more = [{"surprisal": np.zeros(len(world.label))} for world in worlds[:2]]
    pair = made_signals.pair(tmp_path, worlds[:2], more)
    for name, message in (("surprisal", "is no signal with layers"), ("hidden", "is not there")):
        with pytest.raises(InputError, match=message) as caught:
            document(*pair, tmp_path / "out", signal=name)
        assert "hidden_change_rolling" in caught.value.hint


def test_the_trend_over_positions_before_and_after_the_z_score(tmp_path: Path, worlds: list[Simulated]) -> None:
    random = np.random.default_rng(0)
    more = [
        {"hidden_change": s + np.linspace(0, 8, len(s))[:, None], "hidden_change_z": random.normal(size=s.shape)}
        for s, _ in worlds[:6]
    ]
    found = document(*made_signals.pair(tmp_path, worlds[:6], more), tmp_path / "out")
    trend = found["position_trend"]
    assert list(trend) == ["hidden_change", "hidden_change_z", "hidden_change_rolling"]
    assert min(row["low"] for row in trend["hidden_change"]) > 0.7
    assert max(abs(row["mean_rho"]) for row in trend["hidden_change_z"]) < 0.15
    assert [row["layer"] for row in trend["hidden_change"]] == list(range(N_LAYERS))


def test_the_same_command_writes_the_same_bytes_in_any_order_of_traces(
    tmp_path: Path, worlds: list[Simulated], found: dict[str, Any]
) -> None:
    labels, signals = made_signals.pair(tmp_path, worlds)
    for name in ("one", "two"):
        kvlens.bands(labels, signals, tmp_path / name)
    one, two = ((tmp_path / name / "bands.json").read_bytes() for name in ("one", "two"))
    assert one == two
    json.loads(one, parse_constant=pytest.fail)
    other = document(labels, signals, tmp_path / "three", seed=1)
    assert [t["half"] for t in other["traces"]] != [t["half"] for t in found["traces"]]


def test_a_finished_run_is_kept_and_another_needs_force(tmp_path: Path, worlds: list[Simulated]) -> None:
    labels, signals = made_signals.pair(tmp_path, worlds[:4])
    run = kvlens.bands(labels, signals, tmp_path / "out")
    meta = run.meta
    assert (meta["model"]["fingerprint"], meta["seed"], meta["dtype"]) == ("c0ffee-f00d", 0, "float32")
    assert meta["counts"]["traces"] == 4
    assert meta["results"]["labels"]["path"] == str(labels)
    assert meta["results"]["signals"]["schema"] == "kvlens.signals/1"
    assert kvlens.bands(labels, signals, tmp_path / "out").meta == meta
    with pytest.raises(InputError, match="different configuration"):
        kvlens.bands(labels, signals, tmp_path / "out", seed=3)
    assert kvlens.bands(labels, signals, tmp_path / "out", seed=3, force=True).meta["seed"] == 3
    changed = made_signals.edit(signals, lambda table: table.set_column(
        3, table.schema.field("hidden_change_rolling"), table.column("hidden_change_rolling").combine_chunks()[::-1]
    ))  # fmt: skip
    with pytest.raises(InputError, match="input_hash"):
        kvlens.bands(labels, changed, tmp_path / "out", seed=3)
