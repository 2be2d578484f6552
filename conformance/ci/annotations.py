"""Annotations of a record: each failing check, at the line where the subject's call is defined."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from os import devnull
from pathlib import Path
from typing import Any

from attest.conformance.judging.failure import explain
from attest.conformance.process.settings import see_folder
from attest.conformance.record import Result, RunRecord
from attest.conformance.records.record_file import read_record
from attest.conformance.subject import find

# GitHub shows ten errors of a step.
_SHOWN = 10


@dataclass(frozen=True)
class Annotation:
    """A message at a line of a file, whose name is relative to the repository; "" for no file."""

    title: str
    message: str
    file: str = ""
    line: int = 0


def annotations(record: Path, workspace: Path) -> Iterator[Annotation]:
    """Yield the annotations of a record: the first failing checks, then what else fails the run."""
    found = read_record(record)
    failing = _failing(found)
    kept = failing[: _SHOWN - 1] if found.problems or len(failing) > _SHOWN else failing
    places = {name: _place(name, workspace) for name in sorted({result.subject for result in kept})}
    for result in kept:
        yield Annotation(
            f"{result.verdict} {result.subject}: {result.check}", explain(result), *places[result.subject]
        )
    more = len(failing) - len(kept)
    others = [*found.problems, *([f"{more} more checks fail"] if more else [])]
    if others:
        yield Annotation("attest", "\n".join(others))


def _failing(record: RunRecord) -> list[Result]:
    """Return the simplest red result of each subject and check."""
    shown: dict[tuple[str, str], Result] = {}
    for result in sorted(record.results, key=lambda result: (not result.minimal, result.sort_key)):
        if result.verdict.red:
            shown.setdefault((result.subject, result.check), result)
    return [shown[key] for key in sorted(shown)]


def _place(name: str, workspace: Path) -> tuple[str, int]:
    """Return the file and line of a subject's call; ("", 0) if it is not in the repository, or unknown."""
    see_folder()
    try:
        with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
            call = _plain(find(name).call)
        code = call.__code__
        file = Path(code.co_filename).resolve().relative_to(workspace.resolve())
    except (Exception, SystemExit):  # its module is the user's, and has run before
        return "", 0
    return file.as_posix(), code.co_firstlineno


def _plain(call: Callable[..., Any]) -> Any:
    """Return the function behind decorators, partial applications and methods."""
    while isinstance(call, partial):
        call = call.func
    call = inspect.unwrap(call)
    if not inspect.isroutine(call):
        call = type(call).__call__
    return inspect.unwrap(getattr(call, "__func__", call))
