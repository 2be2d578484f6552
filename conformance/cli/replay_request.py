"""Replay requests: a subject, checks and a case, from a failure's line or from a file; as a script, too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.checks import all_checks, unknown_check
from attest.conformance.cli.console import print_text
from attest.conformance.files import read_bytes, write_text
from attest.conformance.judging.failure import replay_command
from attest.conformance.judging.script.literals import ScriptError
from attest.conformance.judging.script.reproducer import reproducer
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import DRAWN
from attest.conformance.record import ACCURACY
from attest.conformance.sizes import sizes
from attest.conformance.subject import Subject
from attest.conformance.text import describe, sentence
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
    return ReplayRequest(name, checks or _drawn_checks(), case)


def write_script(request: ReplayRequest, subject: Subject, file: str) -> None:
    """Write a script that reproduces a case without attest to a file, or print it if that is "-".

    Of all checks of drawn cases, which a request has by default, a script has those of accuracy.
    Raises ValueError with one sentence if there is no such script, and FileError.
    """
    every = request.checks == _drawn_checks()
    checks = ACCURACY if every else request.checks
    line = replay_command(request.subject, request.case, None if every else request.checks[0])
    try:
        text = reproducer(Trial(subject, request.case), checks, line)
    except ScriptError as error:
        raise ValueError(sentence(f"--script: {error}")) from error
    except Exception as error:  # the declarations of a subject are code
        raise ValueError(f"--script: {subject.name} cannot be read: {describe(error)}") from error
    if file == "-":
        print_text(text.rstrip("\n"))
    else:
        write_text(Path(file), text)


def _drawn_checks() -> tuple[str, ...]:
    return tuple(check.name for check in all_checks().values() if check.kind is DRAWN)
