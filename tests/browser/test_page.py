"""Does the page work in a real browser: light and dark, tints, the value on hover, nothing fetched?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_runs
import pytest

from kvlens import reporting
from kvlens.page_style import DARK, LIGHT, N_STEPS

CHROMIUM = Path("/usr/bin/chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM} (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    quiet = ("quic", "background-networking", "component-update", "sync", "gpu")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    traces = {"apples": made_runs.APPLES, "<b>": made_runs.HOSTILE} | {f"n{i}": made_runs.APPLES for i in range(30)}
    made_runs.write(folder / "run", traces, {3: 2.0, 7: -1.5})
    reporting.inspect(folder / "run", html=folder / "page.html")
    return folder / "page.html"


def opened(browser: Any, html: Path, scheme: str = "light", width: int = 1100) -> tuple[Any, list[str]]:
    """The page and a growing list of everything it asked for or complained about."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("dialog", lambda dialog: seen.append(dialog.message))
    page.goto(html.as_uri())
    return page, seen


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize(("scheme", "theme"), [("light", LIGHT), ("dark", DARK)])
def test_tokens_are_tinted_in_both_schemes(browser: Any, html: Path, scheme: str, theme: dict[str, str]) -> None:
    page, seen = opened(browser, html, scheme)
    style = "(e) => { const s = getComputedStyle(e); return [s.backgroundColor, s.color] }"
    tokens = page.locator("#t0 .tokens > span")
    assert tokens.nth(3).evaluate(style) == [rgb(theme["plus"]), rgb(theme["ink"])]
    blue = tokens.nth(7).evaluate(style)[0]
    assert blue not in (rgb(theme["ground"]), rgb(theme["plus"]), "rgba(0, 0, 0, 0)")
    assert tokens.last.evaluate(style)[0] == "rgba(0, 0, 0, 0)"
    assert page.locator("main").evaluate(style) == [rgb(theme["ground"]), rgb(theme["ink"])]
    assert page.locator(".steps span").count() == 2 * N_STEPS + 1
    assert seen == [html.as_uri()]
    page.close()


def test_the_value_shows_on_hover(browser: Any, html: Path) -> None:
    page, _ = opened(browser, html)
    token = page.locator("#t0 .tokens > span").nth(3)
    after = "(e) => { const s = getComputedStyle(e, '::after'); return [s.content, s.position, s.bottom] }"
    assert token.evaluate(after)[0] == "none"
    token.hover()
    assert token.evaluate(after) == [f'"{token.get_attribute("title")}"', "fixed", "0px"]
    assert token.get_attribute("title").startswith("+2.00 nats · position 3")
    page.close()


def test_text_is_shown_as_it_is(browser: Any, html: Path) -> None:
    page, _ = opened(browser, html)
    assert page.locator("#t0 .tokens").first.text_content() == made_runs.APPLES[0].replace("\n", "↵\n")
    hostile = page.locator("#t1 .tokens").first.text_content()
    assert '<script>alert("x")</script> & <b>bold</b>' in hostile
    assert page.locator("#t1 script, #t1 .tokens b, #t1 img").count() == 0
    lines = page.locator("#t0 .tokens").first.evaluate("(e) => e.getBoundingClientRect().height")
    one_line = page.locator("#t0 .target .tokens").evaluate("(e) => e.getBoundingClientRect().height")
    assert lines >= 2 * one_line
    page.close()


def test_contents_lead_to_a_trace_below_the_legend(browser: Any, html: Path) -> None:
    page, _ = opened(browser, html)
    page.locator("nav a", has_text="n9").click()
    legend = page.locator(".legend").bounding_box()
    heading = page.locator("#t11 h2").bounding_box()
    assert legend["y"] == 0
    assert legend["height"] <= heading["y"] < 900
    page.close()


@pytest.mark.parametrize("width", [360, 1100])
def test_nothing_sticks_out_sideways(browser: Any, html: Path, width: int) -> None:
    page, _ = opened(browser, html, width=width)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


@pytest.mark.parametrize(("attribute", "theme"), [("true", LIGHT), ("false", DARK)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_notebook_view_follows_the_notebooks_theme(
    browser: Any, html: Path, attribute: str, theme: dict[str, str], scheme: str
) -> None:
    view = reporting.show(html.parent / "run")._repr_html_()
    page = browser.new_page(color_scheme=scheme)
    page.set_content(f'<body data-jp-theme-light="{attribute}">{view}</body>')
    found = page.locator(".kvlens").evaluate("(e) => getComputedStyle(e).backgroundColor")
    assert found == rgb(theme["ground"])
    page.close()
