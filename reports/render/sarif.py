"""SARIF 2.1.0 of a run: a rule for each check, a result for each cause of what failed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from attest.conformance.clauses import CLAUSES
from attest.conformance.record import Result, RunRecord
from attest.conformance.text import printable
from attest.conformance.user_frames import frames_of
from attest.reports.cards import Card, cards
from attest.reports.pairing import ordered
from attest.reports.words import one_line, setting

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_TITLE_WIDTH = 300


def render_run(record: RunRecord) -> str:
    """Return the run as SARIF. Timeouts are no results: they show neither right nor wrong."""
    found = cards(record.results)
    checks = sorted({result.check for result in record.results})
    run = {
        "tool": {"driver": {"name": "attest", "rules": [_rule(check, record) for check in checks]}},
        "invocations": [
            {
                "executionSuccessful": record.complete,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": printable(problem)}}
                    for problem in _problems(record)
                ],
            }
        ],
        "results": [_result(card, checks, setting(record, "kernel_files")) for card in found],
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1, sort_keys=True) + "\n"


def _rule(check: str, record: RunRecord) -> dict[str, Any]:
    clauses = sorted(
        {clause for result in record.results if result.check == check for clause in result.clauses},
        key=lambda clause: (len(clause), clause),
    )
    rules = [f"{clause}: {CLAUSES[clause]}" for clause in clauses if clause in CLAUSES]
    rule: dict[str, Any] = {
        "id": one_line(check),
        "shortDescription": {"text": f"The check {one_line(check)} of attest"},
    }
    if rules:
        rule["fullDescription"] = {"text": f"Tests these clauses: {'; '.join(rules)}"}
    return rule


def _problems(record: RunRecord) -> Sequence[str]:
    late = [f"{r.subject} {r.check}: {r.message}" for r in ordered(record.results) if r.verdict == "TIMEOUT"]
    ended = [] if record.complete else [f"cut short: {record.note or 'no reason given'}"]
    return [*ended, *record.problems, *late]


def _result(card: Card, checks: Sequence[str], files: Mapping[str, Any]) -> dict[str, Any]:
    example = card.example
    title = one_line(f"{card.cause.subject}: {card.parts.headline}", _TITLE_WIDTH)
    result: dict[str, Any] = {
        "ruleId": one_line(example.check),
        "ruleIndex": checks.index(example.check),
        "level": "error",
        "message": {"text": f"{title}\n\n{printable(card.text)}"},
        "partialFingerprints": {"attestCause/v1": card.id},
        "occurrenceCount": len(card.cause.results),
    }
    place = _location(example, files)
    return {**result, "locations": [place]} if place is not None else result


def _location(example: Result, files: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the line of the innermost frame that a message names, or the file of the kernel.

    Code scanning at GitHub rejects results without a location. None only for a kernel of an old record.
    """
    frames = frames_of(example.message)
    if not frames and example.subject not in files:
        return None
    file, line = (frames[-1].file, frames[-1].line) if frames else (str(files[example.subject]), 1)
    return {"physicalLocation": {"artifactLocation": _artifact(file), "region": {"startLine": line}}}


def _artifact(file: str) -> dict[str, str]:
    if Path(file).is_absolute():
        return {"uri": f"file://{quote(PurePath(file).as_posix(), errors='replace')}"}
    return {"uri": quote(PurePath(file).as_posix(), errors="replace"), "uriBaseId": "%SRCROOT%"}
