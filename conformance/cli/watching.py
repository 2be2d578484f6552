"""The lines of a run on stderr while it goes on: its progress, and its first failure when it is found.

On a terminal, a bar; elsewhere, as in CI, a line now and then.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from attest.conformance.cli.console import console_of, note
from attest.conformance.judging.failure import describe_case, replay_line
from attest.conformance.process.limits import limits
from attest.conformance.record import Result, Verdict
from attest.conformance.running.runner import Progress
from attest.conformance.text import plural, printable


@dataclass(frozen=True)
class Watching:
    """The two callbacks of a run: for its progress, and for results as they are found."""

    progress: Callable[[Progress], None]
    results: Callable[[Sequence[Result]], None]


@contextmanager
def watching() -> Generator[Watching]:
    """Return callbacks that show how a run goes on, for as long as the block runs."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("CI"):  # type: ignore[reportUnnecessaryComparison]
        lines = _Lines()
        yield Watching(lines.progress, _First(note).results)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console_of(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)

        def show(now: Progress) -> None:
            bar.update(task, description=_described(now), completed=now.done, total=now.total)

        def write(text: str) -> None:
            bar.console.print(printable(text), soft_wrap=True, markup=False, highlight=False)

        yield Watching(show, _First(write).results)


class _Lines:
    """Progress in lines, one after each pause, and one where the searches begin."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._stage = ""

    def progress(self, now: Progress) -> None:
        new_stage = bool(self._stage) and now.stage != self._stage
        self._stage = now.stage
        seconds = time.monotonic()
        if new_stage or seconds - self._last >= limits()["heartbeat_seconds"]:
            self._last = seconds
            tasks = f"{now.done} of at least {plural(now.total, 'task')} done"
            note(f"{_described(now)}: {tasks} after {seconds - self._began:.0f} s")


class _First:
    """The first failure of a run, shown once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._shown = False

    def results(self, found: Sequence[Result]) -> None:
        failing = next((result for result in found if result.verdict is Verdict.FAIL), None)
        if failing is None or self._shown:
            return
        self._shown = True
        said = failing.message.partition("\n")[0]
        self._write(f"first failure: {failing.subject}: {failing.check}: {said}")
        self._write(f"  {describe_case(failing.case)}")
        self._write(f"  replay: {replay_line(failing)}")


def _described(now: Progress) -> str:
    return now.stage + (f", {now.red} failing" if now.red else "")
