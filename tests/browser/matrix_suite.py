"""The page of the matrix in a browser: filters, links and details work by keyboard and by address.

`nox -s browser` runs it, and sets the variables ATTEST_CHROMIUM and ATTEST_AXE.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from attest.conformance.clauses import CLAUSES
from tests.browser.pages import SCHEMES, WINDOWS, shown
from tests.browser.report_suite import tab_to

NEW = "toys.attention-1.1-cpu"


@pytest.fixture
def file(files: dict[str, Path]) -> Path:
    return files["matrix"]


@pytest.fixture
def page(browser: Browser, file: Path) -> Generator[Page]:
    with shown(browser, file) as found:
        yield found


def columns(page: Page) -> int:
    return page.locator(".matrix thead th[data-column]").locator("visible=true").count()


def rows(page: Page) -> int:
    return page.locator(".matrix tbody tr").locator("visible=true").count()


def cell(page: Page, clause: str, number: int) -> Any:
    return page.locator(f".matrix tr[data-clause={clause}] td").nth(number)


def opened(page: Page, file: Path, rest: str) -> None:
    page.goto(f"{file.as_uri()}{rest}")


def test_the_text_of_an_implementation_filters_columns_by_keyboard(page: Page) -> None:
    assert (columns(page), rows(page)) == (3, len(CLAUSES))
    tab_to(page, "input[name=text]")
    page.keyboard.type("toys 1.1")
    assert columns(page) == 1
    assert page.locator(".column").locator("visible=true").count() == 1
    assert page.locator("#filters output").inner_text() == "1 of 3 implementations"
    tab_to(page, "button[type=reset]")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('input[name=text]').value === ''")
    page.wait_for_function("document.querySelectorAll('.matrix thead th[hidden]').length === 0")
    assert columns(page) == 3


def test_a_clause_and_a_device_filter_rows_and_columns(page: Page) -> None:
    page.select_option("select[name=clause]", "S6")
    assert rows(page) == 1
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.locator(".column tr[data-clause]").locator("visible=true").count() == 3
    page.select_option("select[name=device]", "CPU")
    assert columns(page) == 3


def test_a_dtype_shows_its_own_states(page: Page) -> None:
    whole = [cell(page, "S6", number).inner_text() for number in range(3)]
    assert whole[2].startswith("✗ fails 4 of 4")
    page.select_option("select[name=dtype]", "bfloat16")
    assert cell(page, "S6", 2).inner_text() == "○ not run"
    assert cell(page, "S6", 2).get_attribute("class") == "not-run"
    assert cell(page, "S3", 2).inner_text() == "– not supported"
    assert cell(page, "S3", 2).get_attribute("class") == "not-supported"
    page.select_option("select[name=dtype]", "")
    assert [cell(page, "S6", number).inner_text() for number in range(3)] == whole


def test_the_address_keeps_the_filters(page: Page, file: Path) -> None:
    page.select_option("select[name=clause]", "S2")
    page.select_option("select[name=dtype]", "float32")
    assert page.url.endswith("?clause=S2&dtype=float32")
    opened(page, file, "?clause=S6&dtype=bfloat16&text=1.1&device=elsewhere")
    assert (columns(page), rows(page)) == (1, 1)
    assert page.locator("select[name=device]").input_value() == ""
    assert cell(page, "S6", 2).inner_text() == "○ not run"


def test_a_cell_leads_to_its_evidence_by_keyboard(page: Page) -> None:
    cell(page, "S2", 2).locator("a").focus()
    page.keyboard.press("Enter")
    row = page.locator(f"[id='{NEW}-S2']")
    row.wait_for(state="visible")
    assert page.evaluate("document.querySelector(':target').id") == f"{NEW}-S2"
    assert "a bias is lost" in row.inner_text()
    assert row.locator("a").get_attribute("href") == "findings/toys/#a-bias"
    assert row.locator("code").last.inner_text().startswith("attest replay ")


def test_an_address_opens_evidence_that_is_folded_or_filtered_away(page: Page, file: Path) -> None:
    opened(page, file, f"?clause=S6&text=0.9#{NEW}-S2")
    page.locator(f"[id='{NEW}-S2']").wait_for(state="visible")
    assert (columns(page), rows(page)) == (3, len(CLAUSES))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_clauses_and_implementations_stay_in_sight(
    browser: Browser, file: Path, window: str, scheme: str
) -> None:
    with shown(browser, file, window, scheme) as page:
        page.evaluate("document.querySelector('.matrix').style.width = '120rem'")
        box = page.locator(".box:has(.matrix)")
        box.evaluate("(each) => { each.scrollLeft = 400; each.scrollTop = 300; }")
        edge, name = box.bounding_box(), page.locator(".matrix tbody th").nth(20).bounding_box()
        head = page.locator(".matrix thead th").nth(1).bounding_box()
        assert edge is not None
        assert name is not None
        assert head is not None
        assert 0 <= name["x"] - edge["x"] < 5
        assert 0 <= head["y"] - edge["y"] < 5


def test_the_table_works_without_a_script(browser: Browser, file: Path) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    try:
        page = context.new_page()
        page.goto(file.as_uri())
        assert not page.locator("#filters").is_visible()
        assert "fails 4 of 4" in cell(page, "S6", 2).inner_text()
        page.locator(f"[id='{NEW}'] summary").click()
        assert page.locator(f"[id='{NEW}-S2']").is_visible()
    finally:
        context.close()


def test_states_are_told_by_words_and_by_marks(page: Page) -> None:
    for text in page.locator(".matrix td").all_inner_texts():
        assert text[0] in "✗✓?–○"
        assert any(word in text for word in ("fails", "passes", "inconclusive", "not supported", "not run"))
