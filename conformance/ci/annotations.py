"""Annotations of a record: each cause of failures, where it raised or where the subject's call is defined."""

from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from os import devnull
from pathlib import Path

from attest.conformance.causes.card import card, headline
from attest.conformance.causes.group import causes
from attest.conformance.process.settings import see_folder
from attest.conformance.record import Result, Verdict
from attest.conformance.records.record_file import read_record
from attest.conformance.subject import find
from attest.conformance.text import plural, sentence
from attest.conformance.user_frames import frames_of
from attest.conformance.user_function import plain_function

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
    """Yield the annotations of a record: the first causes of failures, then what else fails the run."""
    found = read_record(record)
    failing = causes(found.results)
    late = sum(result.verdict is Verdict.TIMEOUT for result in found.results)
    others = [*found.problems, *([f"timed out: {plural(late, 'case')}"] if late else [])]
    kept = failing[: _SHOWN - 1] if others or len(failing) > _SHOWN else failing
    places = {name: _place_of_call(name, workspace) for name in sorted({cause.subject for cause in kept})}
    for number, cause in enumerate(kept, start=1):
        file, line = _place_of_frame(cause.example, workspace) or places[cause.subject]
        text = card(cause, number, len(failing))
        yield Annotation(sentence(f"{cause.subject}: {headline(cause)}"), text, file, line)
    more = len(failing) - len(kept)
    others += [f"causes that are not shown here: {more}"] if more else []
    if others:
        yield Annotation("attest", "\n".join(others))


def _place_of_frame(result: Result, workspace: Path) -> tuple[str, int] | None:
    """Return the innermost line in the repository that a failing case raised at, if its message has one."""
    for frame in reversed(frames_of(result.message)):
        try:
            file = Path(frame.file).resolve().relative_to(workspace.resolve())
        except ValueError:
            continue
        if (workspace / file).is_file():
            return file.as_posix(), frame.line
    return None


def _place_of_call(name: str, workspace: Path) -> tuple[str, int]:
    """Return the file and line of a subject's call; ("", 0) if it is not in the repository, or unknown."""
    see_folder()
    try:
        with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
            call = plain_function(find(name).call)
        code = call.__code__
        file = Path(code.co_filename).resolve().relative_to(workspace.resolve())
    except (Exception, SystemExit):  # its module is the user's, and has run before
        return "", 0
    return file.as_posix(), code.co_firstlineno
