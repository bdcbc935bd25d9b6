"""Do the table, the page and the notebook view show the right tokens, escaped, and legibly?"""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import made_runs
import numpy as np
import pytest

from kvlens import facts, findings, reporting
from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.page_style import DARK, LIGHT, N_STEPS, colours, step, step_class, style_sheet, visible

EFFECTS = {3: 2.0, 7: -1.5, 12: 0.75}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load(made_runs.write(tmp_path / "run", {"apples": made_runs.APPLES, "<b>": made_runs.HOSTILE}, EFFECTS))


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the token spans."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def token_spans(page: str) -> list[dict[str, str | None]]:
    return [attributes for tag, attributes in Elements(page).tags if tag == "span" and attributes.get("title")]


def test_top_windows_are_ranked_by_size_with_their_sign_and_without_the_sink(run: Run) -> None:
    top = findings.top_windows(run, "apples", n=3)
    assert list(top.start) == [3, 7, 12]
    assert list(top.end) == [4, 8, 13]
    assert list(top.effect_nats) == [2.0, -1.5, 0.75]
    assert list(top.trace_id) == ["apples"] * 3
    tokens = run.tokens[run.tokens.trace_id == "apples"].token
    assert top.text[0] == tokens.iloc[3]
    text = "".join(tokens)
    around = top.before[0] + top.text[0] + top.after[0]
    assert around in text
    assert text.startswith(top.before[0] + top.text[0])
    assert findings.sink_effects(run).to_dict() == {"apples": 23.5, "<b>": 23.5}


def test_top_windows_of_all_traces_and_never_of_the_target(run: Run) -> None:
    top = findings.top_windows(run, n=10_000)
    assert set(top.trace_id) == {"apples", "<b>"}
    assert set(top.segment) <= {"prompt", "reasoning"}
    assert len(top) == int((run.tokens.effect_nats.notna() & (run.tokens.pos > 0)).sum())
    assert (np.diff(top.effect_nats.abs()) <= 0).all()


def with_windows(run: Run, edges: list[tuple[int, int]], effects: list[float]) -> Run:
    """The run with these windows of the trace `apples` alone."""
    starts, ends = zip(*edges, strict=True)
    rows = run.windows.iloc[: len(edges)].assign(window_start=starts, window_end=ends, effect_nats=effects)
    return Run(run.path, run.meta, run.tables | {"windows": rows.assign(trace_id="apples")})


def test_a_wide_window_is_one_row_and_of_overlapping_ones_the_strongest_is_listed(run: Run) -> None:
    edges = [(0, 4), (2, 6), (4, 8), (6, 10), (10, 14), (12, 16)]
    wide = with_windows(run, edges, [30.0, 0.1, -3.0, 2.0, 0.5, 0.5])
    top = findings.top_windows(wide, "apples")
    assert list(zip(top.start, top.end, strict=True)) == [(4, 8), (10, 14)]
    tokens = run.tokens[run.tokens.trace_id == "apples"].token
    assert top.text[0] == "".join(tokens.iloc[4:8])
    assert top.before[0] == "".join(tokens.iloc[:4])[-findings.CONTEXT_CHARACTERS :]
    assert "4–7" in reporting.page(wide, ["apples"])
    assert facts.facts(wide)["position 0"].startswith("+30.0 nats: its whole window")


def test_only_the_sinks_window_leaves_nothing_to_rank(run: Run) -> None:
    assert findings.top_windows(with_windows(run, [(0, 9)], [3.0]), "apples").empty


def test_the_facts_of_one_trace_are_its_own(run: Run) -> None:
    sinks = run.windows.effect_nats.where((run.windows.window_start > 0) | (run.windows.trace_id != "<b>"), 4.5)
    other = Run(run.path, run.meta, run.tables | {"windows": run.windows.assign(effect_nats=sinks)})
    assert facts.summary(other, "<b>")["sink_nats_median"] == 4.5
    assert facts.summary(other, "<b>")["n_traces"] == 1
    assert facts.summary(other)["sink_nats_median"] == 14.0
    assert facts.facts(other, "<b>")["position 0"] == "+4.50 nats: often an attention sink, not ranked"
    assert facts.facts(other)["position 0"] == "+14.0 nats (median of 2 traces): often an attention sink, not ranked"


def test_a_noise_floor_of_zero_does_not_read_as_not_measured(run: Run) -> None:
    for value, words in ((0.0, "bit-equal"), (np.nan, "not measured"), (3e-6, "3e-06 nats (median trace)")):
        traces = run.traces.assign(noise_nats=value)
        assert words in facts.facts(Run(run.path, run.meta, run.tables | {"traces": traces}))["noise floor"]


@pytest.mark.parametrize("n", [0, -3])
def test_a_number_of_rows_that_is_none_is_refused(run: Run, n: int) -> None:
    with pytest.raises(InputError, match="cannot list"):
        reporting.inspect(run, n=n)


def test_the_page_tints_every_token_by_its_own_effect(run: Run) -> None:
    spans = token_spans(reporting.page(run, ["apples"]))
    tokens = run.tokens[run.tokens.trace_id == "apples"]
    assert len(spans) == len(tokens)
    assert spans[0]["class"] == "sink"
    assert "+23.5 nats" in str(spans[0]["title"])
    assert spans[3]["class"] == f"p{N_STEPS}"
    assert str(spans[3]["title"]).startswith("+2.00 nats · position 3 · ")
    assert spans[7]["class"].startswith("m")  # type: ignore[union-attr]
    assert "−1.50 nats" in str(spans[7]["title"])
    assert all("class" not in span for span, segment in zip(spans, tokens.segment, strict=True) if segment == "target")


def test_the_scale_ignores_the_sink(run: Run) -> None:
    page = reporting.page(run, ["apples"])
    assert "+23.5" not in re.search(r'<div class="ticks">.*?</div>', page).group()  # type: ignore[union-attr]


def test_what_shares_a_window_with_the_sink_is_set_apart_with_it(run: Run) -> None:
    windows = run.windows.assign(window_end=run.windows.window_end.where(run.windows.window_start > 0, 4))
    wide = Run(run.path, run.meta, run.tables | {"windows": windows})
    assert list(findings.top_windows(wide, "apples", n=2).start) == [3, 7]  # windows of their own, without the sink
    page = reporting.page(wide, ["apples"])
    assert [span.get("class") == "sink" for span in token_spans(page)][:6] == [True] * 4 + [False] * 2
    assert "+2.00" not in re.search(r'<div class="ticks">.*?</div>', page).group()  # type: ignore[union-attr]


def test_the_page_names_what_a_reader_must_know(run: Run) -> None:
    page = unescape(reporting.page(run))
    for fact in (
        "made-up (Q4_1, dequantised)",
        "evict",
        "width 1, stride 1",
        "float32",
        "2e-06 nats",
        "seed 0",
        "nats",
    ):
        assert fact in page


def test_text_cannot_become_markup(run: Run) -> None:
    page = reporting.page(run)
    tags = [tag for tag, _ in Elements(page).tags]
    assert not {"script", "img", "b"} & set(tags)
    assert tags.count("main") == tags.count("style") == 1
    assert not any(name.startswith("on") for _, attributes in Elements(page).tags for name in attributes)
    body = page[page.index("<body>") :]
    assert not [char for char in body if visible(char) != char and char != "\n"]
    assert "⟨202E⟩" in body
    assert "␛" in body
    assert "\ufffd" in body


def test_the_page_asks_for_nothing_from_outside(run: Run) -> None:
    page = reporting.page(run)
    assert not re.search(r"https?:|url\(|@import|src=|<link|<script", page)
    assert {tag: attributes for tag, attributes in Elements(page).tags if tag == "a"}["a"]["href"].startswith("#")  # type: ignore[union-attr]


def test_many_traces_get_a_table_of_contents_and_one_does_not(run: Run) -> None:
    page = reporting.page(run)
    links = [attributes["href"] for tag, attributes in Elements(page).tags if tag == "a"]
    anchors = [attributes["id"] for tag, attributes in Elements(page).tags if tag == "section"]
    assert links == [f"#{anchor}" for anchor in anchors]
    assert len(anchors) == 2
    assert "<nav" not in reporting.page(run, ["apples"])


def test_the_text_of_a_trace_stands_on_the_page_whole(run: Run) -> None:
    page = reporting.page(run, ["apples"])
    blocks = re.findall(r'<div class="tokens">(.*?)</div>', page, re.DOTALL)
    shown = unescape(re.sub(r"<[^>]*>", "", "".join(blocks))).replace("↵", "").replace("⇥", "\t")
    assert shown == "".join(made_runs.APPLES)
    assert re.findall(r'<div class="piece (\w+)">', page) == ["prompt", "reasoning", "target"]


def test_an_empty_selection_and_an_unlabelled_run_still_make_a_page(tmp_path: Path, run: Run) -> None:
    assert "<section" not in reporting.page(run, [])
    columns = made_runs.rows("bare", made_runs.APPLES)
    columns["tokens"]["effect_nats"] = np.full(len(columns["tokens"]["pos"]), np.nan)
    with made_runs.start(tmp_path / "bare") as bare:
        for table in ("tokens", "traces"):
            bare.write_part(table, "bare", columns[table])
        bare.write_part("windows", "bare", columns["windows"] | {"effect_nats": np.nan})
        bare.finish({table: ["bare"] for table in columns})
    page = reporting.page(tmp_path / "bare")
    assert not [span for span in token_spans(page) if span.get("class") not in (None, "sink")]
    assert "not labelled" in page
    assert findings.top_windows(tmp_path / "bare").empty


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_enough_contrast_on_every_colour(theme: dict[str, str]) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    palette = colours(theme)
    steps = [name for name in palette if re.fullmatch(r"[pm]\d+", name)]
    assert len(steps) == 2 * N_STEPS
    assert min(contrast(palette["ink"], palette[name]) for name in [*steps, "ground"]) >= 4.5
    assert contrast(palette["soft"], palette["ground"]) >= 4.5
    for sign in "pm":  # a stronger effect is always further from the ground
        away = [contrast(palette[f"{sign}{number}"], palette["ground"]) for number in range(1, N_STEPS + 1)]
        assert away == sorted(away)


@pytest.mark.parametrize(
    ("effect", "expected"),
    [(2.0, 8), (-2.0, -8), (90.0, 8), (1.0, 4), (-1.0, -4), (0.05, 0), (0.0, 0), (float("nan"), 0), (-np.inf, -8)],
)
def test_steps_are_symmetric_and_end_at_the_scale(effect: float, expected: int) -> None:
    assert step(effect, scale=2.0, noise=0.0) == expected


def test_effects_within_the_noise_get_no_tint() -> None:
    assert step(1.0, scale=2.0, noise=1.0) == 0
    assert step(1.0, scale=0.0, noise=0.0) == 0
    assert [step_class(number) for number in (-3, 0, 2)] == ["m3", "", "p2"]
    assert all(f".{step_class(number)}{{" in style_sheet() for number in range(-N_STEPS, N_STEPS + 1) if number)


def test_invisible_characters_become_signs() -> None:
    text = "a\n\t\x1b\x00\x7f\x9b\u202e\u2028\ud800é東🌧"
    assert visible(text) == "a↵⇥␛␀␡⟨009B⟩⟨202E⟩⟨2028⟩⟨D800⟩é東🌧"


def test_show_gives_a_notebook_the_same_view(run: Run, tmp_path: Path) -> None:
    view = reporting.show(run, "apples")
    assert token_spans(view._repr_html_()) == token_spans(reporting.page(run, ["apples"]))
    assert "<html" not in view._repr_html_()
    assert "2.0" in repr(view)
    assert repr(reporting.show(tmp_path / "run")) == repr(view)
    hostile = repr(reporting.show(run, "<b>"))
    assert "\x1b" not in hostile


def test_notebook_themes_win_over_the_systems(run: Run) -> None:
    html = reporting.show(run)._repr_html_()
    assert html.index("prefers-color-scheme:dark") < html.index('data-jp-theme-light="true"')
    assert 'data-jp-theme-light="false"' in html


def test_an_unknown_trace_is_refused_with_names_like_it(run: Run) -> None:
    for look in (reporting.show, findings.top_windows):
        with pytest.raises(InputError, match="no trace 'aples'") as caught:
            look(run, "aples")
        assert "apples" in caught.value.hint


def test_only_one_label_run_can_be_viewed(tmp_path: Path, run: Run) -> None:
    with pytest.raises(InputError, match="several runs"):
        reporting.page(load([tmp_path / "run"]))
    other = Run(run.path, run.meta | {"schema": "kvlens.signals/1"}, run.tables)
    with pytest.raises(InputError, match="a run of signals, not labels"):
        findings.top_windows(other)


def test_inspect_is_the_table_and_writes_the_page(tmp_path: Path, run: Run) -> None:
    table = reporting.inspect(tmp_path / "run", trace="apples", n=2, html=tmp_path / "page.html")
    assert list(table.start) == [3, 7]
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == reporting.page(run, ["apples"])
    assert json.dumps(facts.summary(run))


@pytest.mark.parametrize("name", ["run.json", "tokens.parquet", "new.parquet", ".lock", "../link/run.json"])
def test_the_page_never_replaces_a_file_of_the_run(tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(InputError, match="a file of the run itself"):
        reporting.inspect(run, html=tmp_path / "run" / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    reporting.inspect(run, html=tmp_path / "run" / "page.html")
    assert (tmp_path / "run" / "page.html").is_file()


def test_a_run_without_all_its_tables_cannot_be_viewed(run: Run) -> None:
    with pytest.raises(InputError, match="no table"):
        findings.top_windows(Run(run.path, run.meta, {"tokens": run.tokens}))


def test_a_page_replaces_no_file_that_is_none(run: Run, tmp_path: Path) -> None:
    for name in ("other.parquet", "traces.jsonl", "notes"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(InputError, match=r"it exists and is no \.html file"):
            reporting.inspect(run, html=tmp_path / name)
        assert (tmp_path / name).read_text() == "mine"
    reporting.inspect(run, html=tmp_path / "page.html")
    reporting.inspect(run, html=tmp_path / "page.html")


def test_the_facts_say_how_windows_were_chosen_and_filled(run: Run) -> None:
    config = run.meta["config"] | {"screen": "auto", "lag": 3}
    found = facts.facts(Run(run.path, run.meta | {"config": config}, run.tables))
    assert "gradient screen (auto)" in found["chosen"]
    assert found["lag"] == "3 tokens after a window's end"
    assert not {"chosen", "lag", "filler"} & set(facts.facts(run))


def with_results(run: Run, config: dict[str, object], results: dict[str, object]) -> Run:
    meta = run.meta | {"config": run.meta["config"] | config, "results": results}
    return Run(run.path, meta, run.tables)


def test_flips_are_told_in_facts_table_and_page(run: Run) -> None:
    starts = run.windows.window_start.to_numpy()
    flipped = [
        None if name == "<b>" else bool(start == 3) for name, start in zip(run.windows.trace_id, starts, strict=True)
    ]
    windows = run.windows.assign(flipped=np.array(flipped, dtype=object)).astype({"flipped": "boolean"})
    ways = {"apples": {"compared": "texts", "full_answer": "red"}, "<b>": {"compared": "nothing", "full_answer": ""}}
    seen = with_results(Run(run.path, run.meta, run.tables | {"windows": windows}), {"flips": True}, {"flips": ways})
    n_windows = int((run.windows.trace_id == "apples").sum())
    assert facts.summary(seen)["flips"] == {
        "n_flipped": 1, "n_compared": n_windows, "compared": {"texts": 1, "nothing": 1}
    }  # fmt: skip
    words = facts.facts(seen)["flips"]
    assert words.startswith(f"1 of {n_windows} windows compared change the model's answer")
    assert "1 trace without a stated answer: whole texts" in words
    assert "1 trace in which the model gives no answer" in words
    assert facts.facts(seen, "apples")["flips"].endswith("whole texts compared")
    assert list(findings.top_windows(seen, "apples", n=2).flipped) == [True, False]
    assert findings.top_windows(seen, "<b>", n=1).flipped[0] is None
    page = reporting.page(seen, ["apples"])
    assert page.count("<td>changes</td>") == 1
    assert "<td>changes</td>" not in reporting.page(run, ["apples"])
    assert "<th>answer</th>" not in reporting.page(run, ["apples"])
    assert facts.summary(run)["flips"] is None


def test_the_screen_and_the_random_sets_report_themselves(run: Run) -> None:
    def screened(recall: float) -> dict[str, float]:
        return {"n_windows": 50, "n_top": 10, "n_audit": 5, "recall": recall, "recall_low": recall - 0.2}

    sets = {"n_subsets": 20, "r2": 0.5, "rank_agreement": None, "alpha": 1.0}
    results = {"screen": {"apples": screened(1.0), "<b>": screened(0.9)}, "subsets": {"apples": sets, "<b>": sets}}
    found = with_results(run, {"screen": 0.2}, results)
    assert facts.summary(found)["screen"]["n_measured"] == 30
    assert facts.summary(found, "<b>")["screen"]["recall_least"] == 0.9
    words = facts.facts(found)["chosen"]
    assert "30 of 100 windows measured" in words
    assert "0.95 by the audit (95 %: 0.75 or more), least of a trace 0.90" in words
    assert "40 in 2 traces" in facts.facts(found)["random sets"]
    assert "R² 0.50" in facts.facts(found)["random sets"]
    few = {"apples": {"n_subsets": 3, "r2": None, "rank_agreement": None, "reason": "3 sets a trace are too few"}}
    assert facts.facts(with_results(run, {}, {"subsets": few}))["random sets"].endswith("3 sets a trace are too few")


def test_the_facts_say_what_was_left_out_and_name_a_skipped_trace(run: Run) -> None:
    config = run.meta["config"] | {"chat": True, "only_correct": True, "skip_prompt": True}
    counts = run.meta["counts"] | {"skipped": [{"id": "sum", "reason": "no answer"}, {"id": "b", "reason": "none"}]}
    found = facts.facts(Run(run.path, run.meta | {"config": config, "counts": counts}, run.tables))
    assert found["prompt"] == "in the model's chat format"
    assert found["left out"] == "traces without a right answer, windows of the prompt"
    assert found["traces"].endswith("2 skipped (sum: no answer; …)")
