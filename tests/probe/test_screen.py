"""The screen's scores against finite differences of hand-masked attention, and its report against known recall."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import COMMON, FAMILIES, WINDOW, as_tokens, build, token_ids
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.model import Model, wrap
from kvlens.probe import screen
from kvlens.probe.occlusion import Intervention, Occluder, windows_of
from kvlens.texts import read_traces
from kvlens.tokenising import tokenize

TRACES = Path(__file__).parents[2] / "data" / "traces" / "traces.jsonl"
TOKENS = as_tokens(token_ids(26), 4)
LAST, N_INPUTS = TOKENS.n_context - 1, TOKENS.n_tokens - 1
WINDOWS = [(0, 1), (0, 4), (3, 4), (7, 12), (13, 14), (18, LAST)]
STEP = 0.01  # norms round to float32: a small step would drown in that, so a large one and a rule of fourth order
TOLERANCE = 1e-3
RECALL_KEYS = ("recall_low", "recall", "recall_high")


def gemma2() -> Any:
    """Soft-capped attention scores."""
    return build(
        Gemma2ForCausalLM,
        Gemma2Config(**COMMON | {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    )


def gpt_oss() -> Any:
    """A learned sink logit in every head."""
    small = {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": WINDOW}
    return build(GptOssForCausalLM, GptOssConfig(**COMMON | small))


MADE = FAMILIES | {"gemma2": gemma2, "gpt_oss": gpt_oss}


@cache
def model_of(family: str) -> Model:
    made = MADE[family]()
    return wrap(made if family == "gpt_oss" else made.double())  # its experts do not multiply in float64


def attention(query: Tensor, key: Tensor, value: Tensor, hidden: tuple[int, int], kw: dict[str, Any]) -> Tensor:
    """Attention [head, query, d_head] over the whole sequence whose rows from LAST on do not see `hidden`."""
    repeat = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query[0])
    for head, row in itertools.product(range(query.shape[1]), range(N_INPUTS)):
        window = kw.get("sliding_window") or N_INPUTS
        seen = [k for k in range(row + 1) if k > row - window and not (row >= LAST and hidden[0] <= k < hidden[1])]
        scores = key[0, head // repeat, seen] @ query[0, head, row] * kw["scaling"]
        if kw.get("softcap") is not None:
            scores = kw["softcap"] * torch.tanh(scores / kw["softcap"])
        if kw.get("s_aux") is not None:
            scores = torch.cat([scores, kw["s_aux"][head, None].to(scores.dtype)])
        out[head, row] = scores.softmax(0)[: len(seen)] @ value[0, head // repeat, seen]
    return out


class Changed:
    """Attention plus `step` times a given change per layer; without one it notes what hiding `window` changes."""

    def __init__(self, window: tuple[int, int], cells: np.ndarray | None) -> None:
        self.window, self.cells, self.step = window, cells, 0.0
        self.change: dict[int, Tensor] = {}

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **kw: Any) -> Any:
        plain = attention(query, key, value, (0, 0), kw)
        layer = module.layer_idx
        if layer not in self.change:
            self.change[layer] = attention(query, key, value, self.window, kw) - plain
            if self.cells is not None:
                self.change[layer][~torch.from_numpy(self.cells[layer])] = 0
        return (plain + self.step * self.change[layer])[None].transpose(1, 2).contiguous(), None


def first_order(model: Model, window: tuple[int, int], cells: np.ndarray | None = None) -> float:
    """How fast log p(target) falls as every attention output moves towards the one without the window, in nats."""
    changed = Changed(window, cells)
    ids, targets = torch.from_numpy(TOKENS.ids), torch.from_numpy(TOKENS.ids[TOKENS.n_context :])

    def loss(step: float) -> float:
        changed.step = step
        with torch.no_grad(), models.attention_override(model, changed):
            log_probs = (
                model.hf(input_ids=ids[None, :N_INPUTS], use_cache=False).logits[0, LAST:].double().log_softmax(-1)
            )
        return -float(log_probs.gather(-1, targets[:, None]).sum())

    loss(0)
    return (8 * (loss(STEP) - loss(-STEP)) - (loss(2 * STEP) - loss(-2 * STEP))) / (12 * STEP)


@pytest.mark.parametrize("family", MADE)
def test_scores_against_finite_differences(family: str) -> None:
    model = model_of(family)
    ours = screen.gradient_scores(Occluder(model, TOKENS, Intervention()), WINDOWS)
    truth = [first_order(model, window) for window in WINDOWS]
    assert np.abs(truth).max() > 0.1
    np.testing.assert_allclose(ours, truth, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scores_of_cells(family: str) -> None:
    model = model_of(family)
    cells = np.random.default_rng(0).random((model.n_layers, model.n_heads)) < 0.5
    cells[1] = False
    by_layer = screen.layer_scores(Occluder(model, TOKENS, Intervention(cells=cells)), WINDOWS)
    truth = [first_order(model, window, cells) for window in WINDOWS]
    np.testing.assert_allclose(by_layer.sum(0), truth, atol=TOLERANCE, rtol=TOLERANCE)
    assert not by_layer[1].any()
    rest = screen.layer_scores(Occluder(model, TOKENS, Intervention(cells=~cells)), WINDOWS)
    every = screen.layer_scores(Occluder(model, TOKENS, Intervention()), WINDOWS)
    np.testing.assert_allclose(by_layer + rest, every, atol=1e-9)


def test_a_window_no_query_sees_scores_nothing() -> None:
    """All layers slide: keys a window back from the first target row are out of sight."""
    unseen = LAST - WINDOW + 1
    scores = screen.gradient_scores(Occluder(model_of("mistral"), TOKENS, Intervention()), windows_of(TOKENS, 1, 1))
    assert not scores[:unseen].any()
    assert scores[unseen:].all()


def test_scores_inside_inference_mode_and_in_bfloat16() -> None:
    exact = screen.gradient_scores(Occluder(model_of("llama"), TOKENS, Intervention()), WINDOWS)
    bfloat16 = wrap(MADE["llama"]().bfloat16())
    with torch.inference_mode():
        within = screen.gradient_scores(Occluder(model_of("llama"), TOKENS, Intervention()), WINDOWS)
        half = screen.gradient_scores(Occluder(bfloat16, TOKENS, Intervention()), WINDOWS)
    np.testing.assert_array_equal(within, exact)
    np.testing.assert_allclose(half, exact, atol=0.15 * np.abs(exact).max())


@pytest.mark.parametrize(
    "how", [Intervention("knockout"), Intervention("substitute", filler_id=3), Intervention(lag=2)]
)
def test_other_interventions_are_refused(how: Intervention) -> None:
    with pytest.raises(InputError, match="predicts evict without a lag"):
        screen.layer_scores(Occluder(model_of("llama"), TOKENS, how), WINDOWS)


@pytest.mark.parametrize("window", [(-1, 2), (3, 3), (5, LAST + 1)])
def test_windows_outside_the_context_are_refused(window: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="is not in"):
        screen.layer_scores(Occluder(model_of("llama"), TOKENS, Intervention()), [(0, 1), window])


def test_cancelling_layers_move_a_window_up() -> None:
    by_layer = np.array([[3.0, 1.0, 0.0], [-3.0, 0.0, 0.0]])
    cancelled, plain, nothing = screen.screening_rank(by_layer)
    assert cancelled > plain > nothing == 0
    assert screen.screening_rank(-by_layer).tolist() == [cancelled, plain, nothing]


# Selection and report, on made-up numbers


N = 240
SINGLES = [(i, i + 1) for i in range(N)]
SELECTED_BY_SIGN = np.where(np.arange(N) % 2, 1.0, -1.0)


def noisy(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and effects whose logarithms differ by `noise`; position 0 drowns everything."""
    generator = np.random.default_rng(seed)
    logs = 2 * generator.standard_normal(N)
    effects = np.exp(logs) * SELECTED_BY_SIGN
    effects[0] = 1e6
    return np.exp(logs + noise * generator.standard_normal(N)) * SELECTED_BY_SIGN, effects


def by_index(effects: np.ndarray, selection: screen.Selection) -> dict[int, float]:
    return {int(i): float(effects[i]) for i in np.concatenate([selection.top, selection.audit])}


def true_recall(effects: np.ndarray, selection: screen.Selection) -> float:
    wanted = 1 + np.argsort(-np.abs(effects[1:]))[: -(-(N - 1) // 10)]
    return float(np.isin(wanted, selection.top).mean())


def test_what_is_chosen() -> None:
    scores, _ = noisy(0.5)
    scores[0] = 0  # position 0 is evaluated all the same
    chosen = screen.choose(scores, 0.25, 7, SINGLES)
    order = 1 + np.argsort(-np.abs(scores[1:]))
    assert set(chosen.top) == {0, *order[:60]}
    assert len(chosen.audit) == 18  # a tenth of the other 179
    assert set(chosen.audit) <= set(order[60:])
    again = screen.choose(scores, 0.25, 7, SINGLES)
    assert again.audit.tolist() == chosen.audit.tolist()
    assert screen.choose(scores, 0.25, 8, SINGLES).audit.tolist() != chosen.audit.tolist()
    assert len(screen.choose(scores, 0.5, 7, SINGLES).audit) == 16
    assert len(screen.choose(scores, 0.99, 7, SINGLES).audit) == 2
    assert screen.choose(scores, 1.0, 7, SINGLES).audit.tolist() == []


def test_every_rest_window_is_audited_equally_often() -> None:
    scores, _ = noisy(0.5)
    counts = np.zeros(N)
    for seed in range(400):
        counts[screen.choose(scores, 0.25, seed, SINGLES).audit] += 1
    seen = counts[counts > 0]
    assert len(seen) == 179
    assert np.abs(seen - 400 * 18 / 179).max() < 5 * np.sqrt(400 * 0.1 * 0.9)


def test_a_wider_choice_keeps_the_audit() -> None:
    scores, _ = noisy(2)
    narrow = screen.choose(scores, 0.1, 3, SINGLES, n_audit=100)
    wide = screen.choose(scores, 0.6, 3, SINGLES, previous=narrow)
    outside = set(narrow.audit) - set(wide.top)
    assert len(outside) > screen.LEAST_AUDIT  # more than a fresh audit would take
    assert outside <= set(wide.audit)
    assert set(narrow.top) <= set(wide.top)


def test_bad_fractions_and_audits_are_refused() -> None:
    scores, _ = noisy(0.5)
    for fraction in (0.0, -0.1, 1.5):
        with pytest.raises(InputError, match="screen fraction"):
            screen.choose(scores, fraction, 0, SINGLES)
    with pytest.raises(InputError, match="audit of 0"):
        screen.choose(scores, 0.5, 0, SINGLES, n_audit=0)


def test_a_whole_audit_gives_the_true_recall() -> None:
    for noise in (0.0, 1.0, 3.0):
        scores, effects = noisy(noise)
        chosen = screen.choose(scores, 0.2, 0, SINGLES, n_audit=N)
        found = screen.report(scores, by_index(effects, chosen), chosen, SINGLES)
        truth = true_recall(effects, chosen)
        assert [found[key] for key in RECALL_KEYS] == pytest.approx([truth] * 3)
        assert found["missed"] == 0
    assert truth < 0.8


def test_no_miss_in_a_small_audit_is_no_certainty() -> None:
    scores, effects = noisy(0.0)
    chosen = screen.choose(scores, 0.25, 0, SINGLES)
    found = screen.report(scores, by_index(effects, chosen), chosen, SINGLES)
    assert found["recall"] == found["recall_high"] == 1
    assert found["recall_low"] < 0.5
    assert found["spearman_audit"] == pytest.approx(1)
    assert found["spearman_evaluated"] == pytest.approx(1)


def test_the_estimate_over_many_audits() -> None:
    scores, effects = noisy(2.0)
    estimates, covered = [], []
    for seed in range(300):
        chosen = screen.choose(scores, 0.2, seed, SINGLES, n_audit=60)
        found = screen.report(scores, by_index(effects, chosen), chosen, SINGLES)
        low, estimate, high = (found[key] for key in RECALL_KEYS)
        truth = true_recall(effects, chosen)
        estimates.append(estimate)
        covered.append(low - 1e-9 <= truth <= high + 1e-9)
        assert low - 1e-9 <= estimate <= high + 1e-9
        assert found["missed"] == pytest.approx((1 - estimate) * 24 * (1 - 60 / 191))
    assert 0.5 < truth < 0.85
    assert np.mean(estimates) == pytest.approx(truth, abs=0.03)
    assert np.mean(covered) >= 0.95


def test_coverage_over_all_audits() -> None:
    """Every one of the audits that can be drawn, so no luck: at least 95 % of the intervals hold the truth."""
    effects = np.random.default_rng(1).permutation(31).astype(np.float64)
    windows, top = SINGLES[1:32], np.arange(18)
    wanted = np.argsort(-effects)[:4]  # a tenth of 31, rounded up
    truth = np.isin(wanted, top).mean()
    assert 0 < truth < 1
    covered = []
    for audit in itertools.combinations(range(18, 31), 6):
        chosen = screen.Selection(top, np.array(audit))
        found = screen.report(effects, by_index(effects, chosen), chosen, windows)
        covered.append(found["recall_low"] - 1e-9 <= truth <= found["recall_high"] + 1e-9)
    assert np.mean(covered) >= 0.95


def test_rank_agreement_averages_ties() -> None:
    scores = np.array([0.0, 1, 1, 2, 3, -4])
    effects = dict(enumerate([9.0, 5, 1, 1, -7, 8]))
    chosen = screen.Selection(np.array([0, 5]), np.array([1, 2, 3, 4]))
    found = screen.report(scores, effects, chosen, SINGLES[:6])
    # ranks 1.5 1.5 3 4 against 3 1.5 1.5 4, by hand
    assert found["spearman_audit"] == pytest.approx(2.25 / 4.5)
    flat = screen.report(np.ones(6), effects, chosen, SINGLES[:6])
    assert flat["spearman_audit"] is None


def test_auto_widens_until_settled() -> None:
    def auto(noise: float) -> tuple[list[float], float, int]:
        scores, effects = noisy(noise)
        fraction: float | None = screen.FRACTIONS[0]
        tried, previous, evaluated = [], None, set()
        while fraction is not None:
            tried.append(fraction)
            chosen = screen.choose(scores, fraction, 0, SINGLES, previous=previous)
            evaluated |= {*chosen.top, *chosen.audit}
            found = screen.report(scores, by_index(effects, chosen), chosen, SINGLES, previous=previous)
            fraction, previous = screen.widen(fraction, found), chosen
        return tried, true_recall(effects, chosen), len(evaluated)

    tried, recall, _ = auto(0.0)
    assert tried == [0.1, 0.15]
    assert recall == 1
    tried, recall, evaluated = auto(0.5)
    assert 0.15 < tried[-1] < 1
    assert recall >= 0.9
    assert evaluated < 0.7 * N
    tried, recall, _ = auto(20.0)
    assert tried == list(screen.FRACTIONS)
    assert recall == 1


def test_widen_needs_recall_and_a_step_that_brought_nothing() -> None:
    assert screen.widen(0.1, {"recall": 1.0, "gained": None}) == 0.15
    assert screen.widen(0.15, {"recall": 0.94, "gained": 0.0}) == 0.25
    assert screen.widen(0.15, {"recall": 0.95, "gained": 0.06}) == 0.25
    assert screen.widen(0.25, {"recall": 0.95, "gained": 0.05}) is None
    assert screen.widen(1.0, {"recall": 1.0, "gained": 0.5}) is None


@pytest.mark.real
@pytest.mark.slow
def test_a_quarter_finds_the_top_tenth_on_a_real_trace(smollm2: Model) -> None:
    trace = next(trace for trace in read_traces(TRACES) if trace.id == "three-players")
    tokens = tokenize(trace, smollm2.tokenizer)
    engine, windows = Occluder(smollm2, tokens, Intervention()), windows_of(tokens, 1, 1)
    by_layer = screen.layer_scores(engine, windows)
    everything = [engine.counterfactual(window) for window in windows]
    log_probs = torch.cat([engine.run(everything[i : i + 64]).log_probs for i in range(0, len(windows), 64)])
    effects = (engine.reference.log_probs - log_probs).sum(-1).numpy()
    chosen = screen.choose(screen.screening_rank(by_layer), 0.25, 0, windows, n_audit=len(windows))
    found = screen.report(by_layer.sum(0), dict(enumerate(effects)), chosen, windows)
    assert found["recall"] >= 0.85
    assert found["spearman_evaluated"] >= 0.85
