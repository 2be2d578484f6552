"""JUnit XML of a run: one suite for each subject, one test for each check and case."""

import xml.etree.ElementTree as ET
from itertools import groupby

from attest.conformance.judging import failure
from attest.conformance.record import Result, RunRecord, Verdict
from attest.conformance.text import printable
from attest.reports.cards import Card, cards
from attest.reports.pairing import ordered
from attest.reports.words import one_line, recipe

# The suite of what fails a run beyond single verdicts; without it a reader of the XML would see green.
RUN_SUITE = "attest.run"


def render_run(record: RunRecord) -> str:
    """Return the run as JUnit XML.

    A test of which no time is known took 0 seconds: some readers show a time that is missing as NaN.
    """
    cause_of = {result: card for card in cards(record.results) for result in card.cause.results}
    suites = [
        suite(subject, [_test(result, cause_of.get(result)) for result in results])
        for subject, results in groupby(ordered(record.results), key=lambda result: result.subject)
    ]
    return document([*suites, suite(RUN_SUITE, _run_tests(record))])


def document(suites: list[ET.Element]) -> str:
    """Return suites as a document."""
    totals = _totals([test for each in suites for test in each])
    root = ET.Element("testsuites", {"name": "attest", **totals})
    root.extend(suites)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def suite(name: str, tests: list[ET.Element]) -> ET.Element:
    """Return a suite of tests."""
    found = ET.Element("testsuite", {"name": one_line(name), **_totals(tests)})
    found.extend(tests)
    return found


def _totals(tests: list[ET.Element]) -> dict[str, str]:
    counts = {
        "tests": len(tests),
        "failures": sum(test.find("failure") is not None for test in tests),
        "errors": sum(test.find("error") is not None for test in tests),
        "skipped": sum(test.find("skipped") is not None for test in tests),
    }
    seconds = sum(float(test.get("time", "0")) for test in tests)
    return {**{name: str(count) for name, count in counts.items()}, "time": _seconds(seconds)}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def _test(result: Result, card: Card | None) -> ET.Element:
    test = element(_name(result), f"{result.subject}.{result.check}", result.seconds)
    if result.verdict is Verdict.PASS:
        return test
    about = {"type": result.verdict.value, "message": one_line(result.message) or result.verdict.value}
    if not result.verdict.red:
        about["message"] = one_line(" ".join((result.verdict.value, result.message, result.link)))
        ET.SubElement(test, "skipped", about)
        return test
    tag = "error" if result.verdict in (Verdict.ERROR, Verdict.TIMEOUT) else "failure"
    ET.SubElement(test, tag, about).text = printable(_explained(result, card))
    return test


def _name(result: Result) -> str:
    return f"{result.check}[{result.case.id}] {recipe(result.case)}"


def _explained(result: Result, card: Card | None) -> str:
    """Return the card for the example of a cause, and a reference to that test for its other failures."""
    if card is None:
        return failure.explain(result)
    if result == card.example:
        return card.text
    return f"same cause as {one_line(_name(card.example))}: {one_line(card.parts.headline)}"


def _run_tests(record: RunRecord) -> list[ET.Element]:
    tests = [element("complete", RUN_SUITE)]
    if not record.complete or not record.results:
        why = record.note or ("the run was cut short" if record.results else "the run judged nothing")
        ET.SubElement(tests[0], "failure", {"type": "incomplete", "message": one_line(why)})
    for problem in record.problems:
        test = element(f"problem: {problem}", RUN_SUITE)
        about = {"type": "problem", "message": one_line(problem)}
        ET.SubElement(test, "failure", about).text = printable(problem)
        tests.append(test)
    return tests


def element(name: str, classname: str, seconds: float = 0.0) -> ET.Element:
    """Return a test that passed."""
    names = {"name": one_line(name), "classname": one_line(classname)}
    return ET.Element("testcase", {**names, "time": _seconds(seconds)})
