"""What `attest replay` is asked: a subject, checks and a case, from a failure's line or from a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.case import Case, case_from_json
from conformance.checks import all_checks

_KEYS = ("subject", "check", "case")


@dataclass(frozen=True)
class Question:
    """Who is asked what, on which case."""

    subject: str
    checks: tuple[str, ...]
    case: Case


def read_question(text: str, subject: str | None, checks: tuple[str, ...]) -> Question:
    """Read the JSON object in `text`, or in the file that it names; `subject` and `checks` go before its own.

    A Case by itself needs `subject`; without checks, all that drawn cases serve are asked.
    Raises ValueError with one sentence.
    """
    source, data = _load(text)
    if "case" in data:
        unknown = sorted(set(data) - set(_KEYS))
        if unknown:
            raise ValueError(f"{source}: {unknown[0]!r} is not known, expected {', '.join(_KEYS)}")
        subject = subject or _string(source, data, "subject")
        named = _string(source, data, "check")
        checks = checks or ((named,) if named else ())
        data = data["case"]
    if not subject:
        raise ValueError(f"{source}: names no subject: add --subject")
    known = all_checks()
    for name in checks:
        if name not in known:
            raise ValueError(f"unknown check {name!r}: known are {', '.join(sorted(known))}")
    try:
        case = case_from_json(data)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    drawn = tuple(name for name, check in known.items() if check.kind == "drawn")
    return Question(subject, checks or drawn, case)


def _load(text: str) -> tuple[str, Mapping[str, Any]]:
    """Where the object comes from, for messages, and the object."""
    inline = text.lstrip().startswith("{")
    source = "the case on the command line" if inline else text
    try:
        data: Any = json.loads(text if inline else Path(text).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: not readable: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{source}: got a JSON {type(data).__name__}, expected an object")
    return source, data


def _string(source: str, data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{source}, {key}: got {value!r}, expected a string")
    return value
