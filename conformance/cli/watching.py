"""The lines of a run on stderr while it goes on: its progress, and its first failure when it is found.

On a terminal, a bar; elsewhere, as in CI, a line now and then. Both say what has run longest.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from attest.conformance.cli.console import console_of, note
from attest.conformance.judging.failure import describe_case, replay_line
from attest.conformance.process.limits import limits
from attest.conformance.record import Result, Verdict
from attest.conformance.running.progress import Progress
from attest.conformance.text import printable

# The columns of the bar itself. The last text takes what the others leave of the width.
_BAR_WIDTH = 8
# Seconds after which a call has run so long that the time is named.
_LONG = 5.0


@dataclass(frozen=True)
class Watching:
    """The callbacks of a run: for its progress, for results as they are found, and for a sentence."""

    progress: Callable[[Progress], None]
    results: Callable[[Sequence[Result]], None]
    say: Callable[[str], None]


@contextmanager
def watching() -> Generator[Watching]:
    """Return callbacks that show how a run goes on, for as long as the block runs."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("CI"):  # type: ignore[reportUnnecessaryComparison]
        lines = _Lines()
        yield Watching(lines.progress, _First(note).results, note)
        return
    began = time.monotonic()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(_BAR_WIDTH),
        TextColumn(
            "{task.fields[now]}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
    )
    with Bar(*columns, console=console_of(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task("planning", total=None, now="")

        def show(now: Progress) -> None:
            total = now.total if now.planned else None
            bar.update(task, description=_counts(now), completed=now.done, total=total)
            left = "" if now.left is None else f", {_clock(now.left)} left"
            bar.update(task, now=printable(f"{_clock(time.monotonic() - began)}{left}{_running(now)}"))

        def write(text: str) -> None:
            bar.console.print(printable(text), soft_wrap=True, markup=False, highlight=False)

        yield Watching(show, _First(write).results, write)


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
            note(f"{_described(now)}: {now.tasks} {_times(now, seconds - self._began)}{_running(now)}")


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


def _counts(now: Progress) -> str:
    """Return the stage with its counts, as wide whatever is done: "judging   7/149"."""
    total = str(now.total) if now.planned else "?"
    return f"{_described(now)} {now.done:>{len(total)}}/{total}"


def _times(now: Progress, elapsed: float) -> str:
    """Return the time of a run and the time left: "after 20 s, about 40 s left"."""
    left = "" if now.left is None else f", about {now.left:.0f} s left"
    return f"after {elapsed:.0f} s{left}"


def _running(now: Progress) -> str:
    """Return the call that has run longest, with its time if that is long: "; 9 s on xla: causal"."""
    long = f"{now.seconds:.0f} s " if now.seconds >= _LONG else ""
    return f"; {long}on {now.now}" if now.now else ""


def _clock(seconds: float) -> str:
    """Return a time as on a clock: "2:05"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
