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


def test_a_cause_shows_a_case_before_and_after():
    base, head = run(result(Verdict.PASS, measurement())), run(result(Verdict.FAIL, OFF))
    text = render_html(compare_records(base, head))
    page = Page(text)
    assert "1 of 1 failure is new" in page.text
    assert f"Case {case().id}: PASS → FAIL" in page.text
    assert '<th scope="row" class="red">out (wrong)</th><td class="n">0.4</td><td class="n">40</td>' in text


def test_causes_come_before_regressions_and_many_of_these_are_folded():
    checks = [f"law.n{number}" for number in range(9)]
    base = run(*(result(check=check) for check in checks))
    text = render_html(compare_records(base, run(*(result(Verdict.FAIL, check=check) for check in checks))))
    before, _, listed = text.partition("What became worse")
    assert "Causes of new failures" in before
    assert (
        listed.index("law.n5")
        < listed.index("<summary>3 more regressions</summary>")
        < listed.index("law.n6")
    )
    few = render_html(compare_records(*broken()))
    assert "more regression" not in few


def test_files_of_kernels_in_another_folder_are_no_change():
    here, there = ({"kernel_files": {"toy": f"{folder}/toy.py"}, "device": folder} for folder in ("/a", "/b"))
    text = render_html(compare_records(run(result(), environment=here), run(result(), environment=there)))
    assert '<th scope="row">device</th>' in text
    assert "toy.py" not in text


def test_another_date_is_no_change_and_another_version_is_one():
    here, there = (
        {
            "date": f"2026-11-0{day}",
            "declarations": {"toy": {"clauses": ["S1"] * day}},
            "distributions": {"toy": {"name": "toys", "version": f"1.{day}"}},
        }
        for day in (1, 2)
    )
    text = render_html(compare_records(run(result(), environment=here), run(result(), environment=there)))
    assert '<th scope="row">distributions.toy.version</th>' in text
    assert "2026-11-0" not in text
    assert "declarations" not in text


def test_only_numbers_that_changed_are_shown_each_with_bars():
    kept, old = result(check="lse"), result(Verdict.PASS, measurement(rms_ratio=0.5))
    same = replace(kept, measurements=(measurement("lse"),))
    new = replace(old, measurements=(measurement(rms_ratio=1.0),))
    text = render_html(compare_records(run(same, old), run(same, new)))
    assert "1 row of numbers did not change." in Page(text).text
    assert "<td>lse</td>" not in text
    assert '<rect class="base" width="14" height="4"/><rect class="head" y="5" width="28"' in text
    assert text.count("<svg") == 2  # the largest rms ratio and the median


def test_a_bar_of_what_is_not_finite_is_full():
    base, head = (
        run(result(Verdict.PASS, measurement())),
        run(result(Verdict.PASS, measurement(worst_ratio=float("nan")))),
    )
    text = render_html(compare_records(base, head))
    assert '<rect class="base" width="22" height="4"/><rect class="head" y="5" width="56"' in text


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


def test_junit_has_the_card_of_a_cause_once():
    passing = [result(Verdict.PASS, measurement(), asked=case(seed, causal=True)) for seed in range(6)]
    rest = [result(Verdict.PASS, measurement(), asked=case(seed)) for seed in range(6)]
    failing = [replace(each, verdict=Verdict.FAIL, measurements=(OFF,)) for each in passing]
    comparison = compare_records(run(*passing, *rest), run(*failing, *rest))
    (found,) = comparison.new_causes
    root = ET.fromstring(render_junit(comparison))
    texts = [each.text for each in root.findall("testsuite[@name='attest.verdicts']/testcase/failure")]
    assert texts.count(f"6 of 6 failures are new\n{found.card.text}") == 1
    references = [text for text in texts if text.startswith("same cause as forward[")]
    assert len(references) == 5
    assert references[0].endswith(": out is wrong with causal")


def test_junit_shows_the_card_where_a_test_fails_for_it():
    """The first failure of the cause is no regression: it failed in base, in another way."""
    old = [result(Verdict.FAIL, message="raised A"), result(asked=case(3))]
    new = [replace(each, verdict=Verdict.ERROR, message="raised B") for each in old]
    comparison = compare_records(run(*old), run(*new))
    (found,) = comparison.new_causes
    assert found.counts == "2 of 2 failures are new; 1 failed otherwise in base"
    root = ET.fromstring(render_junit(comparison))
    (failure,) = root.findall("testsuite[@name='attest.verdicts']/testcase/failure")
    assert failure.text == f"{found.counts}\n{found.card.text}"


def test_junit_of_no_change_has_a_test_that_passes():
    root = ET.fromstring(render_junit(compare_records(run(result()), run(result()))))
    assert (root.get("tests"), root.get("failures")) == ("1", "0")
