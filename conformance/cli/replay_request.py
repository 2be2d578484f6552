"""Replay requests: a subject, checks and a case, from a failure's line or from a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.checks import all_checks, unknown_check
from attest.conformance.files import read_bytes
from attest.conformance.kinds import DRAWN
from attest.conformance.sizes import sizes
from attest.conformance.text import sentence
from attest.conformance.typed import convert, decode


@dataclass(frozen=True)
class ReplayRequest:
    """A subject, the checks that judge it, and the case."""

    subject: str
    checks: tuple[str, ...]
    case: Case


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    case: dict[str, Any]
    subject: str | None = None
    check: str | None = None


def read_replay_request(
    text: str, subject: str | None, checks: tuple[str, ...], allow_import: bool = False
) -> ReplayRequest:
    """Read the JSON object in `text`, or in the file that it names; `subject` and `checks` override its own.

    A Case by itself needs `subject`. Without checks, all checks of drawn cases judge it.
    allow_import: whether the object may name a `module:attribute`, whose module is then imported.
    Raises ValueError with one sentence.
    """
    inline = text.lstrip().startswith("{")
    where = "the case on the command line" if inline else sentence(text)
    limit = sizes().request_bytes
    data = text.encode(errors="surrogateescape") if inline else read_bytes(Path(text), limit, "case")
    if len(data) > limit:
        raise ValueError(f"{where}: got {len(data)} bytes, expected at most {limit}")
    fields = decode(data, dict[str, Any], where)
    request = convert(fields if "case" in fields else {"case": fields}, _Request, where)
    name = subject or request.subject
    if not name:
        raise ValueError(f"{where}: names no subject: add --subject")
    checks = checks or ((request.check,) if request.check else ())
    known = all_checks()
    for check in checks:
        if check not in known:
            raise ValueError(sentence(unknown_check(check)))
    try:
        case = case_from_json(request.case)
    except (ValueError, OverflowError) as error:
        raise ValueError(sentence(f"{where}: {error}")) from error
    if subject is None and ":" in name and not allow_import:
        raise ValueError(
            sentence(
                f"{where}: subject {name!r} is a module that would be imported: if you trust it, add"
                " --allow-import, or --subject and its name"
            )
        )
    drawn = tuple(check.name for check in known.values() if check.kind is DRAWN)
    return ReplayRequest(name, checks or drawn, case)
