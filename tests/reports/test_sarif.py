"""What a code scanning service reads: a log with the structure of SARIF 2.1.0."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attest.conformance.record import Verdict
from attest.reports.cards import cards
from attest.reports.render.sarif import render_run
from tests.reports.records import case, example_base, example_head, measurement, result, run

# The objects of SARIF 2.1.0 that a log here has: each property, whether it is required, and what it holds.
# No other property is allowed.
STRUCTURE: dict[str, dict[str, tuple[bool, str]]] = {
    "log": {"$schema": (False, "text"), "version": (True, "2.1.0"), "runs": (True, "run*")},
    "run": {"tool": (True, "tool"), "invocations": (False, "invocation*"), "results": (False, "result*")},
    "tool": {"driver": (True, "driver")},
    "driver": {"name": (True, "text"), "rules": (False, "rule*")},
    "rule": {
        "id": (True, "text"),
        "shortDescription": (False, "message"),
        "fullDescription": (False, "message"),
    },
    "invocation": {
        "executionSuccessful": (True, "boolean"),
        "toolExecutionNotifications": (False, "notification*"),
    },
    "notification": {"level": (False, "error"), "message": (True, "message")},
    "result": {
        "ruleId": (False, "text"),
        "ruleIndex": (False, "index"),
        "level": (False, "error"),
        "message": (True, "message"),
        "partialFingerprints": (False, "fingerprints"),
        "occurrenceCount": (False, "line"),
        "locations": (False, "location*"),
    },
    "message": {"text": (True, "text")},
    "fingerprints": {"attestCause/v1": (False, "text")},
    "location": {"physicalLocation": (False, "physicalLocation")},
    "physicalLocation": {"artifactLocation": (True, "artifactLocation"), "region": (False, "region")},
    "artifactLocation": {"uri": (False, "uri"), "uriBaseId": (False, "text")},
    "region": {"startLine": (False, "line")},
}
VALUES: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str) and value != "",
    "uri": lambda value: isinstance(value, str) and value != "" and value.isascii() and " " not in value,
    "boolean": lambda value: isinstance(value, bool),
    "index": lambda value: isinstance(value, int) and value >= 0,
    "line": lambda value: isinstance(value, int) and value >= 1,
}


def valid(kind: str, value: Any) -> None:
    """Fail unless a value has the structure of its kind."""
    if kind.endswith("*"):
        assert isinstance(value, list)
        for item in value:
            valid(kind[:-1], item)
    elif kind in STRUCTURE:
        properties = STRUCTURE[kind]
        assert set(value) <= set(properties), kind
        assert {name for name, (required, _) in properties.items() if required} <= set(value), kind
        for name, item in value.items():
            valid(properties[name][1], item)
    else:
        assert VALUES[kind](value) if kind in VALUES else value == kind, (kind, value)


def results(*found: Any) -> list[dict[str, Any]]:
    log = json.loads(render_run(run(*found)))
    valid("log", log)
    return log["runs"][0]["results"]


@pytest.mark.parametrize(
    "record",
    [example_head(), example_base(), run(), replace(example_base(), complete=False, note="killed")],
    ids=["failing", "known", "empty", "cut short"],
)
def test_a_log_has_the_structure_of_sarif(record):
    text = render_run(record)
    valid("log", json.loads(text))
    assert render_run(replace(record, results=record.results[::-1])) == text


def test_a_rule_for_each_check_and_a_result_for_each_cause():
    head = example_head()
    (found,) = json.loads(render_run(head))["runs"]
    rules = [rule["id"] for rule in found["tool"]["driver"]["rules"]]
    assert rules == sorted({result.check for result in head.results})
    for shown, card in zip(found["results"], cards(head.results), strict=True):
        assert shown["ruleId"] == card.example.check == rules[shown["ruleIndex"]]
        assert shown["message"]["text"].startswith(f"{card.cause.subject}: ")
        assert f"replay: {card.parts.replay}" in shown["message"]["text"]
        assert shown["partialFingerprints"] == {"attestCause/v1": card.id}
    (invocation,) = found["invocations"]
    said = [entry["message"]["text"] for entry in invocation["toolExecutionNotifications"]]
    assert said[0] == head.problems[0]
    assert said[1].startswith("our.kernel forward: did not finish")


def test_a_run_that_was_cut_short_was_not_successful():
    (found,) = json.loads(render_run(replace(example_base(), complete=False, note="killed")))["runs"]
    (invocation,) = found["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "cut short: killed"


@pytest.mark.parametrize(
    ("lines", "uri", "line"),
    [
        (("at kernels/a b.py:7 in call: x[0]",), "kernels/a%20b.py", 7),
        (("at a.py:7 in call", "at ../b.py:12 in <lambda>: 1 / 0"), "../b.py", 12),
        (("at /tmp/k\u00e9.py:3 in f",), "file:///tmp/k%C3%A9.py", 3),
        (("at a:b.py:3 in f: at c.py:4 in g",), "a%3Ab.py", 3),
    ],
)
def test_the_location_is_the_last_frame(lines, uri, line):
    (shown,) = results(result(Verdict.FAIL, message="\n".join(["raised ValueError: no", *lines])))
    (location,) = shown["locations"]
    place = location["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == (uri, line)
    assert ("uriBaseId" in place["artifactLocation"]) is not uri.startswith("file:")


@pytest.mark.parametrize(
    "message", ["outside the error model: out (bound)", "at nowhere", "at a.py:0 in f", "at a.py:1x in f", ""]
)
def test_what_names_no_line_is_located_in_the_file_of_the_kernel(message):
    failing = result(Verdict.FAIL, measurement(), message=message)
    (old,) = results(failing)
    assert "locations" not in old
    record = run(failing, environment={"kernel_files": {failing.subject: "kernels/our one.py"}})
    (shown,) = json.loads(render_run(record))["runs"][0]["results"]
    (location,) = shown["locations"]
    valid("location", location)
    place = location["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]) == ("kernels/our%20one.py", {"startLine": 1})


def test_any_text_survives():
    message = "".join(map(chr, range(256))) + "\ud800 \ufffe"
    evil = result(Verdict.ERROR, message=f"{message}\nat \ud800.py:1 in f", subject=message, check=message)
    shown, *_ = results(evil, result(Verdict.TIMEOUT, message=message, asked=case(3)))
    assert r"\x00" in shown["message"]["text"]
