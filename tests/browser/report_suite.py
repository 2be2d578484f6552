"""The pages in a browser: accessible, usable by keyboard, as wide as their window, as on their screenshots.

`nox -s browser` runs it, and sets the variables ATTEST_CHROMIUM and ATTEST_AXE.
"""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.browser.pages import (
    IMAGES,
    SCHEMES,
    SETTINGS,
    WINDOWS,
    screenshot,
    shown,
    terminal,
)

OPEN_ALL = "document.querySelectorAll('details').forEach((each) => (each.open = true))"
PAGES = ("report", "comparison", "matrix")
# More than the stops of Tab before the main part of the page.
STOPS = 40


@pytest.fixture
def file(files: dict[str, Path]) -> Path:
    return files["report"]


@pytest.fixture
def page(browser: Browser, file: Path) -> Generator[Page]:
    with shown(browser, file) as found:
        yield found


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(STOPS):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def visible(page: Page, selector: str) -> int:
    return page.locator(selector).locator("visible=true").count()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("opened", [False, True], ids=["folded", "open"])
def test_axe_finds_no_fault(
    browser: Browser, files: dict[str, Path], axe: str, name: str, window: str, scheme: str, opened: bool
) -> None:
    with shown(browser, files[name], window, scheme) as page:
        if opened:
            page.evaluate(OPEN_ALL)
        page.evaluate(axe)
        found: dict[str, Any] = page.evaluate("axe.run()")
    assert len(found["passes"]) > 20
    faults = {each["id"]: [node["html"] for node in each["nodes"]] for each in found["violations"]}
    assert faults == {}


def test_axe_would_find_a_fault(page: Page, axe: str) -> None:
    page.evaluate("document.querySelector('select').parentElement.firstChild.remove()")
    page.evaluate("document.querySelector('.meta').style.color = '#ddd'")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert {each["id"] for each in found["violations"]} == {"select-name", "color-contrast"}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("window", WINDOWS)
def test_nothing_is_wider_than_the_window(
    browser: Browser, files: dict[str, Path], name: str, window: str
) -> None:
    """Wide tables scroll in a box of their own, which the keyboard reaches; no column is cut off."""
    with shown(browser, files[name], window) as page:
        page.evaluate(OPEN_ALL)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= WINDOWS[window][0]
        lost = page.evaluate(
            """() => [...document.querySelectorAll('main *')].filter((each) => {
                const box = each.closest('.box');
                return !box && each.getBoundingClientRect().right > innerWidth;
            }).map((each) => each.outerHTML.slice(0, 80))"""
        )
        assert lost == []
        assert page.evaluate(
            """() => [...document.querySelectorAll('.box')].every((box) =>
                box.tabIndex === 0 && ['auto', 'scroll'].includes(getComputedStyle(box).overflowX))"""
        )


def test_the_names_of_features_stay_beside_the_columns_of_a_narrow_heat_map(
    browser: Browser, file: Path
) -> None:
    with shown(browser, file, "narrow") as page:
        page.evaluate("document.querySelector('.heat').style.width = '60rem'")
        box = page.locator(".box:has(.heat)").first
        box.evaluate("(each) => (each.scrollLeft = 500)")
        first = box.locator("tbody th").first.bounding_box()
        assert first is not None
        assert 0 <= first["x"] < 30


@pytest.mark.parametrize("name", PAGES)
def test_the_page_loads_nothing_and_its_script_has_no_error(
    browser: Browser, files: dict[str, Path], name: str
) -> None:
    file = files[name]
    asked: list[str] = []
    errors: list[str] = []
    with shown(browser, file) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.reload()
        page.evaluate(OPEN_ALL)
    assert asked == [file.as_uri()]
    assert errors == []


def test_filters_work_by_keyboard(page: Page) -> None:
    every = visible(page, "[data-subject]")
    tab_to(page, "select[name=check]")
    page.keyboard.type("lse")
    page.keyboard.press("Tab")
    some = visible(page, "[data-subject]")
    assert 0 < some < every
    assert re.fullmatch(r"\d+ of \d+ entries", page.locator("#filters output").inner_text())
    assert page.evaluate(
        """() => [...document.querySelectorAll('[data-check]:not([hidden])')].every(
            (each) => each.dataset.check.split('\\n').includes('lse'))"""
    )
    tab_to(page, "button[type=reset]")
    page.keyboard.press("Enter")
    # The page filters anew in a task behind the one that resets the form.
    page.wait_for_function("document.querySelectorAll('[data-subject][hidden]').length === 0")
    assert page.evaluate("document.querySelector('select[name=check]').selectedIndex") == 0
    assert visible(page, "[data-subject]") == every


def test_the_keyboard_skips_to_the_results(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_what_has_the_focus_can_be_seen(page: Page) -> None:
    for _ in range(STOPS):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        assert page.evaluate(
            """() => {
                const box = document.activeElement.getBoundingClientRect();
                const style = getComputedStyle(document.activeElement);
                return box.width > 0 && box.right > 0 && parseFloat(style.outlineWidth) >= 2;
            }"""
        ), page.evaluate("document.activeElement.outerHTML")


def test_a_link_leads_to_its_cause(browser: Browser, file: Path, page: Page) -> None:
    tab_to(page, ".card .meta a")
    page.keyboard.press("Enter")
    link = page.url.partition("#")[2]
    assert link.startswith("cause-")
    with shown(browser, file) as other:
        other.goto(f"{file.as_uri()}#{link}")
        assert other.locator(".card:target").get_attribute("id") == link
        top = other.locator(".card:target").bounding_box()
        assert top is not None
        assert -1 < top["y"] < WINDOWS["wide"][1]


def test_a_link_leads_to_a_cause_that_the_filters_hide(page: Page) -> None:
    card = page.locator(".card").first
    page.select_option("select[name=verdict]", "PASS")
    assert not card.is_visible()
    page.evaluate("(id) => (location.hash = id)", card.get_attribute("id"))
    card.wait_for(state="visible")
    assert page.locator("select[name=verdict]").input_value() == "all"


def test_the_command_is_copied_by_keyboard(page: Page) -> None:
    tab_to(page, ".replay button")
    page.keyboard.press("Enter")
    page.get_by_text("Copied").wait_for()
    page.evaluate("document.body.append(document.createElement('textarea'))")
    page.locator("textarea").focus()
    page.keyboard.press("Control+V")
    pasted = page.locator("textarea").input_value()
    assert pasted == page.locator(".replay code").first.text_content()
    assert pasted.startswith("attest replay ")


def squares(image: Image.Image) -> Any:
    """The mean colour of each square."""
    side = SETTINGS["screenshots"]["square"]
    pixels = np.asarray(image.convert("RGB"), np.float64)
    height, width = pixels.shape[0] // side, pixels.shape[1] // side
    cut = pixels[: height * side, : width * side]
    return cut.reshape(height, side, width, side, 3).mean(axis=(1, 3))


def difference(image: Image.Image, committed: Image.Image) -> float:
    """The share of squares that differ, of those that show anything; 1 if the sizes differ."""
    if image.size != committed.size:
        return 1.0
    level = SETTINGS["screenshots"]["level"]
    one, other = squares(image), squares(committed)
    ground = committed.convert("RGB").getpixel((0, 0))
    used = [np.abs(each - ground).max(axis=-1) > level / 2 for each in (one, other)]
    apart = np.abs(one - other).max(axis=-1) > level
    return float(apart.sum() / (used[0] | used[1] | apart).sum())


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_page_looks_as_on_its_screenshot(
    browser: Browser, files: dict[str, Path], name: str, window: str, scheme: str
) -> None:
    with shown(browser, files[name], window, scheme) as page:
        seen = screenshot(page)
    committed = Image.open(IMAGES / f"{name}-{window}-{scheme}.png")
    share = difference(seen, committed)
    assert share <= SETTINGS["screenshots"]["share"], "refresh them: uvx nox -s browser -- --refresh"


@pytest.mark.parametrize("change", ["#filters", ".heat", ".strip", ".pictures"])
def test_a_page_without_a_part_looks_different(browser: Browser, file: Path, change: str) -> None:
    with shown(browser, file) as page:
        page.add_style_tag(content=f"{change} {{ display: none !important; }}")
        seen = screenshot(page)
    committed = Image.open(IMAGES / "report-wide-light.png")
    assert difference(seen, committed) > SETTINGS["screenshots"]["share"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_terminal_shows_what_its_screenshot_does(scheme: str) -> None:
    """The words, since another version of rich may write other tags."""
    texts = [
        "".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
        for svg in (terminal(scheme), (IMAGES / f"terminal-{scheme}.svg").read_text(encoding="utf-8"))
    ]
    assert len(texts[0]) > 500
    assert texts[0] == texts[1], "refresh them: uvx nox -s browser -- --refresh"
