"""The page and the JUnit XML of a comparison: what changed, its causes, and nothing that a text can break."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

from attest.conformance.record import Verdict
from attest.reports.compare import compare_records
from attest.reports.render.comparison_html import render_html
from attest.reports.render.comparison_junit import render_junit
from tests.reports.records import case, example_base, example_head, measurement, result, run

HOSTILE = '<script>alert(1)</script> & "quotes" \x1b[31m'
OFF = measurement(worst_ratio=40.0, broken=("bound", "semantics"))


class Page(HTMLParser):
    """The text of a page, its tags, and the ids that it has."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.ids = "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.text += data


def broken(**more):
    """A result that passed in base and fails in head."""
    return run(result()), run(
        result(Verdict.FAIL, OFF, message="outside the error model: out (bound)", **more)
    )


def test_a_page_shows_what_changed_and_the_cause_of_a_regression():
    page = Page(render_html(compare_records(*broken())))
    assert "1 regression" in page.text
    assert "Causes of new failures" in page.text
    assert "Became worse (1)" in page.text
    assert len(set(page.ids)) == len(page.ids)


def test_a_failure_that_base_has_too_is_no_cause_of_a_regression():
    _, head = broken()
    comparison = compare_records(head, head)
    assert comparison.new_causes == ()
    page = Page(render_html(comparison))
    assert "Causes of new failures" not in page.text
    assert "No regression; head fails with 1 failing result (1 cause)" in page.text
    assert 'class="status fail"' in render_html(comparison)


def test_two_equal_runs_that_pass_are_green_and_short():
    text = render_html(compare_records(run(result()), run(result())))
    assert 'class="status pass"' in text
    assert "Changed verdicts" not in Page(text).text


def test_the_page_loads_nothing_and_no_text_breaks_it():
    base, head = broken()
    hostile = replace(head, results=tuple(replace(r, message=HOSTILE, subject=HOSTILE) for r in head.results))
    text = render_html(compare_records(base, replace(hostile, environment={HOSTILE: HOSTILE})))
    assert "script" not in Page(text).tags
    assert "\x1b" not in text
    assert "http" not in text.replace("https://example.org", "")


def test_the_same_records_give_the_same_page():
    comparison = compare_records(example_base(), example_head())
    turned = replace(example_head(), results=tuple(reversed(example_head().results)))
    assert render_html(comparison) == render_html(compare_records(example_base(), turned))
    assert len(render_html(comparison).encode()) < 2_000_000


def test_a_large_comparison_is_cut_and_says_so():
    many = [result(asked=case(seed=number)) for number in range(9000)]
    worse = [replace(each, verdict=Verdict.ERROR, message="gone " * 60) for each in many]
    text = render_html(compare_records(run(*many), run(*worse)))
    assert len(text.encode()) < 2_000_000
    assert "more: see the record." in text


def test_junit_fails_what_became_worse():
    base, head = broken()
    fixed = result(Verdict.FAIL, asked=case(seed=5))
    root = ET.fromstring(
        render_junit(
            compare_records(
                replace(base, results=(*base.results, fixed)),
                replace(head, results=(*head.results, replace(fixed, verdict=Verdict.PASS))),
            )
        )
    )
    suites = {suite.get("name"): suite for suite in root}
    assert suites["attest.verdicts"].get("tests") == "2"
    assert suites["attest.verdicts"].get("failures") == "1"
    assert int(suites["attest.regressions"].get("failures", "")) >= 1
    assert int(root.get("failures", "")) == 1 + int(suites["attest.regressions"].get("failures", ""))


def test_junit_of_no_change_has_a_test_that_passes():
    root = ET.fromstring(render_junit(compare_records(run(result()), run(result()))))
    assert (root.get("tests"), root.get("failures")) == ("1", "0")
