"""Does the page of a run of surprise show each token's own score and fate, escaped, and from nowhere else?"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import made_runs
import made_surprise
import numpy as np
import pytest
from made_surprise import APPLES, HOSTILE, NAN, Made, long
from test_reporting import Elements, token_spans

import kvlens
from kvlens import reporting, surprise_page
from kvlens.errors import InputError
from kvlens.loading import Run, load
from kvlens.page_style import DARK, LIGHT, N_STEPS, colours, visible

STRANGE = 'a"><script>1</script>\u202e'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load(made_surprise.write(tmp_path / "run", {"apples": APPLES, STRANGE: HOSTILE, "long": long(0)}))


@pytest.fixture
def bare(tmp_path: Path) -> Run:
    return load(made_surprise.write(tmp_path / "bare", {"apples": APPLES}, cycle=None))


def blocks(page: str) -> list[list[dict[str, str | None]]]:
    """The token spans under each variant, trace by trace."""
    return [token_spans(part) for part in page.split("<h3")[1:]]


def classes(span: dict[str, str | None]) -> set[str]:
    return set((span.get("class") or "").split())


def tint(span: dict[str, str | None]) -> int:
    (found,) = [name for name in classes(span) if re.fullmatch(r"[pm]\d+", name)] or [""]
    return 0 if not found else int(found[1:]) * (1 if found[0] == "p" else -1)


def step(text: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", text)).replace("↵", "").replace("⇥", "\t")


# What it shows


def test_every_token_stands_under_every_variant_with_its_score_and_fate(run: Run) -> None:
    full, fast = blocks(surprise_page.page(run, ["apples"]))
    assert len(full) == len(fast) == 12
    titles = [str(span["title"]) for span in full]
    assert titles[0] == "score -1.00 · position 0 · “<s>”"
    assert titles[1] == "score +3.00, left at refresh 1 (+0.50) · position 1 · “Ann”"
    assert titles[2] == "score +2.00, left at refresh 0 (+2.00) · position 2 · “ has”"
    assert titles[5] == "score +0.00, left at refresh 0 (+0.00) · position 5 · “.↵”"
    assert titles[11] == "nothing comes after it · position 11 · “ one”"
    assert str(fast[1]["title"]).startswith("score +1.00, left at refresh 0 (+1.00)")


@pytest.mark.parametrize("trace_id", ["apples", STRANGE, "long"])
def test_struck_out_is_what_the_refreshes_evict(run: Run, trace_id: str) -> None:
    for variant, spans in zip(("full", "fast"), blocks(surprise_page.page(run, [trace_id])), strict=True):
        rows = run.refreshes[(run.refreshes.trace_id == trace_id) & (run.refreshes.variant == variant)]
        gone = sorted(rows.pos[~rows.kept])
        assert len(gone) >= 3
        assert [number for number, span in enumerate(spans) if "left" in classes(span)] == gone


def test_the_tint_is_the_rank_among_the_scores_and_its_ends_are_the_deepest(run: Run) -> None:
    full, fast = blocks(surprise_page.page(run, ["apples"]))
    assert [tint(span) for span in fast] == [-8, -6, -5, -3, -2, 0, 2, 3, 5, 6, 8, 0]  # evenly, the middle without
    order = np.argsort(APPLES.scores["full"][:-1])
    assert [tint(full[number]) for number in order] == [-8, -6, -5, -3, -2, 0, 2, 3, 5, 6, 8]
    assert tint(full[11]) == 0


@pytest.mark.parametrize(
    ("scores", "tints"),
    [([NAN], [0]), ([4.0, NAN], [0, 0]), ([1.0, 2, NAN], [-8, 8, 0]), ([5.0, 5, 5], [0, 0, 0]), ([NAN, NAN], [0, 0])],
)
def test_few_or_equal_scores_are_tinted_evenly(tmp_path: Path, scores: list[float], tints: list[int]) -> None:
    made = Made([" t"] * len(scores), 1, {"full": scores})
    page = surprise_page.page(made_surprise.write(tmp_path / "run", {"t": made}, cycle=None))
    assert [tint(span) for span in blocks(page)[0]] == tints


def test_the_refreshes_are_a_table(run: Run, bare: Run, tmp_path: Path) -> None:
    page = surprise_page.page(run, ["apples"])
    first = page.split("<h3")[1]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(<td.*?)</tr>", first)]
    assert rows == [["0", "8", "8", "3", " has … .↵She"], ["1", "12", "9", "4", "Ann …  apples …  eats …  so"]]
    assert "<details" not in surprise_page.page(bare)
    assert "struck out" not in surprise_page.page(bare)
    assert not [span for span in token_spans(surprise_page.page(bare)) if "left" in classes(span)]
    still = Made(APPLES.tokens, 6, APPLES.scores, {"full": [], "fast": []})
    page = surprise_page.page(made_surprise.write(tmp_path / "still", {"t": still}))
    assert page.count("no refresh: the text is no longer than what is held") == 2


def test_long_text_that_left_is_cut(tmp_path: Path) -> None:
    made = Made([" word" * 9] * 12, 6, APPLES.scores, APPLES.steps)
    page = surprise_page.page(made_surprise.write(tmp_path / "run", {"t": made}))
    cells = re.findall(r'<td class="context">(.*?)</td>', page)
    assert cells
    assert all(len(cell) == surprise_page.LEFT_CHARACTERS + 2 and cell.endswith(" …") for cell in cells)


def test_the_text_of_a_trace_stands_on_the_page_whole_under_each_variant(run: Run) -> None:
    for trace_id, made in (("apples", APPLES), (STRANGE, HOSTILE)):
        for part in surprise_page.page(run, [trace_id]).split("<h3")[1:]:
            shown = "".join(re.findall(r'<div class="tokens">(.*?)</div>', part, re.DOTALL))
            text = "".join(visible(token) for token in made.tokens)
            assert step(shown).replace("\n", "") == text.replace("↵", "").replace("⇥", "\t")
            assert re.findall(r'<div class="piece (\w+)">', part) == ["prompt", "reasoning"]


def test_the_page_names_what_a_reader_must_know(run: Run) -> None:
    page = unescape(surprise_page.page(run))
    for fact in (
        "made-up (Q4_1, dequantised)",
        "float32 on cpu",
        "3 traces, 82 tokens",
        "every 4 tokens to 4",
        "seed 0",
    ):
        assert fact in page
    for variant in ("full", "fast"):
        assert page.count(f'<h3 class="soft">{variant}</h3>') == 3


# That it is safe


def test_text_cannot_become_markup(run: Run) -> None:
    page = surprise_page.page(run)
    elements = Elements(page).tags
    tags = [tag for tag, _ in elements]
    assert not {"script", "img", "b"} & set(tags)
    assert tags.count("main") == tags.count("style") == tags.count("title") == 1
    assert not any(name.startswith("on") for _, attributes in elements for name in attributes)
    assert {name for _, attributes in elements for name in attributes} <= {
        "lang", "charset", "name", "content", "class", "title", "id", "href", "aria-label",
    }  # fmt: skip
    body = page[page.index("<body>") :]
    assert not [char for char in body if visible(char) != char and char != "\n"]
    for sign in ("⟨202E⟩", "␛", "␍"):
        assert sign in body
    assert unescape(body).count(visible(STRANGE)) == 2  # in the contents and over its section


def test_a_hostile_model_path_and_variant_stay_text(tmp_path: Path) -> None:
    model = {"name": "<img src=x onerror=1>", "fingerprint": "f", "note": "<b>"}
    made = Made(["a", "b"], 1, {"<i>full": [1.0, NAN]})
    folder = made_surprise.write(tmp_path / "<u>", {"t": made}, cycle=None, model=model)
    for page in (surprise_page.page(folder), reporting.show(folder)._repr_html_()):
        assert not {"img", "b", "i", "u"} & {tag for tag, _ in Elements(page).tags}
        assert "&lt;i&gt;full" in page


def test_the_page_asks_for_nothing_from_outside(run: Run) -> None:
    page = surprise_page.page(run)
    assert not re.search(r"https?:|url\(|@import|src=|<link|<script", page)
    links = [attributes["href"] for tag, attributes in Elements(page).tags if tag == "a"]
    anchors = [attributes["id"] for tag, attributes in Elements(page).tags if tag == "section"]
    assert links == [f"#{anchor}" for anchor in anchors]
    assert len(set(anchors)) == 3
    assert "<nav" not in surprise_page.page(run, ["apples"])


def test_light_and_dark_have_every_colour(run: Run) -> None:
    page = surprise_page.page(run)
    assert 'content="light dark"' in page
    assert "prefers-color-scheme:dark" in page
    for theme in (LIGHT, DARK):
        for name, colour in colours(theme).items():
            assert f"--{name}:{colour}" in page
    used = {name for span in token_spans(page) for name in classes(span)} - {"left"}
    assert used <= {f"{sign}{number}" for sign in "pm" for number in range(1, N_STEPS + 1)}
    assert len(used) > 10
    assert all(f".{name}{{" in page for name in used)
    assert ".left{text-decoration:line-through" in page


def test_struck_text_keeps_its_contrast() -> None:
    """Made paler, ink on the deepest tint must still be read (4.5)."""

    def parts(colour: str) -> np.ndarray:
        return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])

    def luminance(colour: np.ndarray) -> float:
        linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    opacity = float((re.search(r"opacity:([\d.]+)", surprise_page.STRUCK) or ["", "1"])[1])
    for theme in (LIGHT, DARK):
        palette = colours(theme)
        for name in [name for name in palette if name[1:].isdigit()] + ["ground"]:
            ground = parts(palette["ground"])
            ink, behind = (opacity * parts(palette[one]) + (1 - opacity) * ground for one in ("ink", name))
            high, low = sorted((luminance(ink), luminance(behind)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, theme is DARK)


# How it is asked for


def test_inspect_writes_the_page_and_lists_the_top_tokens(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    top = kvlens.inspect(run, trace="apples", n=3, html=file)
    assert list(top.pos) == [8, 9, 3]
    assert file.read_text(encoding="utf-8") == surprise_page.page(run, ["apples"])
    kvlens.inspect(run.path, html=file)
    assert file.read_text(encoding="utf-8") == surprise_page.page(run.path)
    for name in ("refreshes.parquet", "run.json"):
        with pytest.raises(InputError, match="a file of the run itself"):
            kvlens.inspect(run, html=Path(run.path) / name)
    with pytest.raises(InputError, match="no trace 'aples'"):
        kvlens.inspect(run, trace="aples", html=tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_show_gives_a_notebook_the_same_view(run: Run) -> None:
    view = kvlens.show(run, "apples")
    html = view._repr_html_()
    assert token_spans(html) == token_spans(surprise_page.page(run, ["apples"]))
    assert "<html" not in html
    assert html.index("prefers-color-scheme:dark") < html.index('data-jp-theme-light="true"')
    assert ".left{text-decoration" in html
    assert repr(kvlens.show(run.path)) == repr(view)  # the first trace
    lines = repr(view).splitlines()
    assert lines[0] == "apples"
    assert len(lines) == 12  # ten tokens under their names
    assert "7.0" in lines[2]


def test_a_hostile_trace_is_printed_with_signs(run: Run) -> None:
    said = repr(kvlens.show(run, STRANGE))
    assert not [char for char in said if visible(char) != char and char != "\n"]


@pytest.mark.parametrize("trace_id", ["aples", ""])
def test_a_trace_that_is_none_is_refused(run: Run, trace_id: str) -> None:
    with pytest.raises(InputError, match="no trace"):
        kvlens.show(run, trace_id)
    with pytest.raises(InputError, match="no trace"):
        surprise_page.page(run, ["apples", trace_id])


def test_other_runs_have_no_such_page(run: Run, bare: Run, tmp_path: Path) -> None:
    labels = made_runs.write(tmp_path / "labels", {"apples": made_runs.APPLES})
    stacked: Any = load([run.path, bare.path])
    for other in (labels, stacked):
        with pytest.raises(InputError, match="no single run of surprise"):
            surprise_page.page(other)
    for ask in (kvlens.show, kvlens.inspect):
        with pytest.raises(InputError, match="no single run of surprise"):
            ask(stacked)
    assert "<section" not in surprise_page.page(run, [])
