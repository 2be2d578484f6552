"""Correct kernels that an earlier error model failed: docs/explanation/error-model.md has the reasons."""

import json
from pathlib import Path
from typing import Any

import pytest

from attest.conformance.cases.case import case_from_json
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject
from tests.alarms.subjects import choose

ENTRIES = json.loads(Path(__file__).with_name("once_alarming.json").read_text())


def subject(name: str) -> Subject:
    return next(found for group in choose([name]) for found in group if found.name == name)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['subject']}, {entry['judgement']}")
def test_a_correct_kernel_is_not_failed(entry: dict[str, Any]) -> None:
    (result,) = judge(subject(entry["subject"]), case_from_json(entry["case"]), (entry["check"],))
    assert result.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), result.message
