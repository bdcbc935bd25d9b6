"""One trace inside a label run: what happens when memory runs out, a start is cut short, or a part is damaged?

A kill is stood for here by an interrupt at every tick; tests/cli/test_label.py sends the real signal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_runs
import torch

import kvlens
from kvlens.errors import EnvironmentLacks, InputError, ModelRefused
from kvlens.model import Model
from kvlens.probe import budget, generation, measure, noise, occlusion
from kvlens.probe.occlusion import Engine, Intervention
from kvlens.probe.settings import Settings
from kvlens.probe.windows import first_positions, list_windows
from kvlens.texts import tokenize

MODEL = tiny_runs.model()
SHORT = tiny_runs.model(max_position_embeddings=64)
TRACES = [tiny_runs.as_trace(row) for row in tiny_runs.ROWS]
ATOL = 3e-5
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"window": 2},
    "flips": {"window": 5, "flips": True},
    "subsets": {"window": 6, "random_subsets": 12},
    "screen": {"screen": "auto"},
}


class Interrupted(Exception):
    """The run stops here."""


def label(out: Path, model: Model = SHORT, **asked: Any) -> kvlens.Run:
    return kvlens.label(TRACES, model, out, **asked)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few windows, so that a trace has several parts."""
    monkeypatch.setattr(budget, "choose_rows", lambda model, n_tokens: 40)


def room_for(monkeypatch: pytest.MonkeyPatch, most: Callable[[], int]) -> list[int]:
    """A machine with memory for so many rows at once; the rows of each pass that ran are in the list."""
    ran: list[int] = []
    compute = occlusion.forward_rows

    def forward_rows(model: Model, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if ids.shape[0] > most():
            raise MemoryError
        ran.append(ids.shape[0])
        return compute(model, ids, *rest)

    monkeypatch.setattr(occlusion, "forward_rows", forward_rows)
    monkeypatch.setattr(generation, "forward_rows", forward_rows)
    return ran


def interrupted_at(tick: int) -> Callable[[int, int], None]:
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == tick:
            raise Interrupted

    return progress


# Memory


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_splits_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    asked = KINDS[kind]
    roomy = label(tmp_path / "roomy", **asked)
    assert roomy.meta["plan"]["split"] == 1
    assert roomy.meta["events"] == []
    ran = room_for(monkeypatch, lambda: 3)
    tight = label(tmp_path / "tight", **asked)
    assert 2 <= max(ran) <= 3
    events = [event for event in tight.meta["events"] if event["kind"] == "out of memory"]
    assert events == tight.meta["events"] != []
    assert [event["pieces"] for event in events] == sorted(event["pieces"] for event in events)
    assert events[-1]["pieces"] == tight.meta["plan"]["split"] > 1
    assert np.allclose(tight.windows.effect_nats, roomy.windows.effect_nats, atol=ATOL)
    assert tight.windows.flipped.equals(roomy.windows.flipped)
    assert tight.traces.noise_nats.min() > 0  # still measured at a shape that no batch had
    if kind == "subsets":
        assert np.allclose(tight.subsets.effect_nats, roomy.subsets.effect_nats, atol=ATOL)


def test_a_continued_run_starts_with_the_split_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(monkeypatch, lambda: 4)
    label(tmp_path / "whole", window=2)
    with pytest.raises(Interrupted):
        label(tmp_path / "cut", window=2, progress=interrupted_at(2))
    assert (found := tiny_runs.state(tmp_path / "cut")["plan"]["split"]) > 1
    monkeypatch.setattr(measure.budget, "is_out_of_memory", lambda error: pytest.fail("tried too much again"))
    run = label(tmp_path / "cut", window=2)
    assert run.meta["plan"]["split"] == found
    assert tiny_runs.hashes(tmp_path / "cut") == tiny_runs.hashes(tmp_path / "whole")


@pytest.mark.usefixtures("narrow")
def test_a_window_that_does_not_fit_alone_is_a_lack_and_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label(tmp_path / "whole", window=2)
    room = [10**6]
    with monkeypatch.context() as patch:
        room_for(patch, lambda: room[0])

        def progress(done: int, total: int) -> None:
            room[0] = 0 if done else 10**6  # none is left once the first windows are done

        with pytest.raises(EnvironmentLacks, match="one window at a time") as caught:
            label(tmp_path / "cut", window=2, progress=progress)
    assert "--dtype bfloat16" in caught.value.hint
    label(tmp_path / "cut", window=2)
    one, two = (kvlens.load(tmp_path / name).windows for name in ("cut", "whole"))
    assert np.allclose(one.effect_nats, two.effect_nats, atol=ATOL)


def test_room_for_one_row_still_labels_but_says_that_the_noise_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(monkeypatch, lambda: 1)
    run = label(tmp_path, window=6)
    assert run.traces.noise_nats.isna().all()
    assert run.meta["results"]["noise_nats"] == {"median": None, "max": None, "n_windows": 0}
    assert run.meta["events"][-1]["kind"] == "no memory to measure the noise floor with"


@pytest.mark.parametrize(
    ("usual", "size"), [({1}, 2), ({2}, 1), ({3}, 2), ({9}, 3), ({2, 3}, 1), ({1, 2, 3}, 4), ({9, 3}, 2), (set(), 2)]
)
def test_noise_is_measured_at_a_shape_that_no_batch_had(usual: set[int], size: int) -> None:
    assert noise.other_size(usual) == size


def test_noise_windows_are_spread_over_the_trace() -> None:
    assert noise.spread(range(5)) == [0, 1, 2, 3, 4]
    found = noise.spread(range(100))
    assert (len(found), found[0], found[-1]) == (16, 0, 99)
    assert set(np.diff(found)) <= {6, 7}


# Cut short


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("narrow")
def test_a_run_cut_short_anywhere_ends_in_the_same_bytes(tmp_path: Path, kind: str) -> None:
    asked = KINDS[kind]
    whole = label(tmp_path / "whole", **asked)
    assert whole.meta["plan"]["rows"] == 40
    cut = 0
    for tick in (1, 4, 9):
        out = tmp_path / f"cut{tick}"
        try:
            label(out, **asked, progress=interrupted_at(tick))
        except Interrupted:
            cut += 1
            with pytest.raises(InputError, match="not finished"):
                kvlens.load(out)
            run = label(out, **asked)
            assert run.meta["results"] == whole.meta["results"]
        assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")
        assert not (out / ".parts").exists()
    assert cut >= 2


@pytest.mark.usefixtures("narrow")
def test_what_is_done_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label(tmp_path / "whole", window=2)
    with pytest.raises(Interrupted):
        label(tmp_path / "cut", window=2, progress=interrupted_at(9))
    reports = tiny_runs.state(tmp_path / "cut")["plan"]["reports"]
    assert list(reports) == ["box"]  # the first trace is finished, the second is not
    built: list[str] = []

    class Watched(occlusion.Occluder):
        def __init__(self, model: Model, tokens: Any, *rest: Any, **options: Any) -> None:
            built.append(tokens.trace.id)
            super().__init__(model, tokens, *rest, **options)

    monkeypatch.setattr(measure, "Occluder", Watched)
    label(tmp_path / "cut", window=2)
    assert set(built) == {"sum"}
    assert tiny_runs.hashes(tmp_path / "cut") == tiny_runs.hashes(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["subsets", "screen"])
@pytest.mark.parametrize("table", ["windows", "tokens", "traces", "subsets"])
@pytest.mark.usefixtures("narrow")
def test_a_flipped_bit_in_any_part_is_found_and_made_good(tmp_path: Path, kind: str, table: str) -> None:
    asked = KINDS[kind]
    if table == "subsets" and kind == "screen":
        return
    label(tmp_path / "whole", **asked)
    whole = tiny_runs.state(tmp_path / "whole")
    out = tmp_path / "cut"

    def late(done: int, total: int) -> None:
        if list(tiny_runs.state(out)["plan"].get("reports", {})) == ["box"]:
            raise Interrupted

    with pytest.raises(Interrupted):
        label(out, **asked, progress=late)
    damaged = sorted(out.glob(f".parts/*/{table}-*.part"))
    assert damaged
    for part in damaged:
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    label(out, **asked)
    state = tiny_runs.state(out)
    events = [event for event in state["events"] if event["kind"] == "damaged part"]
    assert {event["table"] for event in events} == {table}
    assert tiny_runs.hashes(out) == tiny_runs.hashes(tmp_path / "whole")
    assert state["results"] == whole["results"]


# Sanity, engines, windows


def test_a_model_that_is_never_the_same_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = occlusion.forward_rows
    monkeypatch.setattr(occlusion, "forward_rows", lambda *given: compute(*given) * (1 + 1e-3 * torch.rand(1)))
    with pytest.raises(ModelRefused, match="hiding nothing changed"):
        label(tmp_path)


def test_a_model_whose_numbers_are_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = occlusion.forward_rows
    monkeypatch.setattr(occlusion, "forward_rows", lambda *given: compute(*given) * torch.nan)
    with pytest.raises(ModelRefused, match="NaN"):
        label(tmp_path)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Intervention("evict"), lambda start, end, last: last),
        (Intervention("evict", lag=3), lambda start, end, last: min(end + 3, last)),
        (Intervention("knockout"), lambda start, end, last: end),
        (Intervention("substitute"), lambda start, end, last: start),
    ],
)
def test_first_positions_are_the_counterfactuals_own(how: Intervention, expected: Callable[..., int]) -> None:
    tokens = tokenize(TRACES[0], MODEL.tokenizer)
    windows = list_windows(tokens, Settings(window=4, stride=3))
    firsts = first_positions(tokens, windows, how)
    last = tokens.n_context - 1
    assert firsts == [expected(start, end, last) for start, end in windows]
    assert firsts == [occlusion.counterfactual(tokens, window, how, MODEL).first for window in windows]


def test_windows_after_the_prompt_start_with_it() -> None:
    tokens = tokenize(TRACES[0], MODEL.tokenizer)
    last = tokens.n_context - 1
    found = list_windows(tokens, Settings(window=8, stride=4, skip_prompt=True))
    assert found == [(pos, min(pos + 8, last)) for pos in range(tokens.n_prompt, last - 4, 4)]
    lines = list_windows(tokens, Settings(units="line", skip_prompt=True))
    assert lines == [window for window in list_windows(tokens, Settings(units="line")) if window[0] >= tokens.n_prompt]
    assert len(lines) == len(list_windows(tokens, Settings(units="line"))) - 1
    with pytest.raises(InputError, match="after the prompt"):
        list_windows(tiny.as_tokens(tiny.token_ids(12), 4), Settings(skip_prompt=True))


def test_an_engine_lives_no_longer_than_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[str] = set()
    most: list[int] = []

    class Watched(occlusion.Occluder):
        def __init__(self, model: Model, tokens: Any, *rest: Any, **options: Any) -> None:
            self.mine = tokens.trace.id
            alive.add(self.mine)
            most.append(len(alive))
            super().__init__(model, tokens, *rest, **options)

        def __del__(self) -> None:
            alive.discard(self.mine)

    monkeypatch.setattr(measure, "Occluder", Watched)
    label(tmp_path, window=6)
    assert issubclass(Watched, Engine)
    assert set(most) == {1}
