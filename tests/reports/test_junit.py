"""What a CI server reads: well-formed JUnit XML whose counts are right and whose red is red."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

import pytest

from attest.conformance.judging.failure import explain
from attest.conformance.record import Verdict
from attest.reports.cards import cards
from attest.reports.render.junit import RUN_SUITE, render_run
from tests.reports.records import case, example_base, example_head, measurement, result, run


@pytest.mark.usefixtures("own_words")
def test_snapshot(matches_snapshot: Callable[[str, str], None]) -> None:
    matches_snapshot("run.junit.xml", render_run(example_head()))


def test_counts_are_those_of_the_record() -> None:
    record = example_head()
    root = ET.fromstring(render_run(record))
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {"our.kernel", "their.kernel", RUN_SUITE}
    assert root.get("tests") == str(len(record.results) + 1 + len(record.problems))
    for name in ("tests", "failures", "errors", "skipped"):
        assert int(root.get(name, "")) == sum(int(suite.get(name, "")) for suite in suites.values())
    ours = suites["our.kernel"]
    assert (ours.get("failures"), ours.get("errors"), ours.get("skipped")) == ("1", "1", "3")
    assert suites["their.kernel"].get("errors") == "1"
    names = [(test.get("classname"), test.get("name")) for test in root.iter("testcase")]
    assert len(set(names)) == len(names)


def test_times_are_those_of_the_checks() -> None:
    record = run(result(seconds=1.25), result(check="lse", seconds=0.5), result(check="poison"))
    root = ET.fromstring(render_run(record))
    times = {test.get("name", "").partition("[")[0]: test.get("time") for test in root.iter("testcase")}
    assert times == {"forward": "1.25", "lse": "0.5", "poison": "0", "complete": "0"}
    assert [suite.get("time") for suite in root] == ["1.75", "0"]
    assert root.get("time") == "1.75"


@pytest.mark.parametrize("verdict", list(Verdict))
def test_each_verdict_has_its_element(verdict: Verdict) -> None:
    record = run(result(verdict, message="because", link="https://example.org/1"))
    (test,) = ET.fromstring(render_run(record)).findall("testsuite[@name='our.kernel']/testcase")
    tags = [child.tag for child in test]
    if verdict is Verdict.PASS:
        assert tags == []
    elif verdict.red:
        assert tags == ["error" if verdict in (Verdict.ERROR, Verdict.TIMEOUT) else "failure"]
        (card,) = cards(record.results) or (None,)
        assert test[0].text == (card.text if card else explain(record.results[0]))
        assert (test[0].get("type"), test[0].get("message")) == (verdict.value, "because")
    else:
        assert tags == ["skipped"]
        assert test[0].get("message") == f"{verdict.value} because https://example.org/1"


def test_the_card_of_a_cause_is_in_one_test_and_the_others_refer_to_it() -> None:
    wrong = measurement(broken=("bound", "semantics"))
    record = run(
        *(result(Verdict.FAIL, wrong, asked=case(seed, causal=True)) for seed in range(9)),
        *(result(Verdict.PASS, measurement(), asked=case(seed)) for seed in range(9)),
        result(Verdict.ERROR, message="bad", check="lse"),
        result(Verdict.TIMEOUT, message="late", asked=case(30)),
    )
    numeric, other = cards(record.results)
    tests = {
        test.get("name"): test[0].text
        for test in ET.fromstring(render_run(record)).iter("testcase")
        if len(test)
    }
    texts = list(tests.values())
    assert texts.count(numeric.text) == 1
    assert texts.count(other.text) == 1
    (home,) = (name for name, text in tests.items() if text == numeric.text)
    assert texts.count(f"same cause as {home}: out is wrong with causal") == 8
    assert texts.count(explain(record.results[-1])) == 1
    assert len(texts) == 11


def test_any_text_survives() -> None:
    message = "".join(map(chr, range(256))) + "\ud800 \ufffe ]]> & <a b='c'>"
    root = ET.fromstring(render_run(run(result(Verdict.FAIL, message=message), problems=(message,))))
    (failure,) = root.findall("testsuite[@name='our.kernel']/testcase/failure")
    assert "]]> & <a b='c'>" in (failure.text or "")
    assert r"\x00" in (failure.text or "")


def test_what_fails_a_run_is_a_failing_test() -> None:
    for record, name in (
        (replace(example_base(), problems=("stale",)), "problem: stale"),
        (replace(example_base(), complete=False, note="interrupted"), "complete"),
        (run(), "complete"),
    ):
        root = ET.fromstring(render_run(record))
        (test,) = root.findall(f"testsuite[@name='{RUN_SUITE}']/testcase[failure]")
        assert test.get("name") == name
    assert ET.fromstring(render_run(run(result()))).get("failures") == "0"


def test_the_order_of_results_does_not_matter() -> None:
    head = example_head()
    assert render_run(replace(head, results=head.results[::-1])) == render_run(head)
