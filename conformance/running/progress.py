"""The progress of a run: its stage, what is done and left of it, and what runs now."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from attest.conformance.cases.case import Case
from attest.conformance.text import plural

# The tasks after which a stage has a speed.
_ENOUGH = 3


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    done, total: the tasks of the stage. planned: whether `total` is all of them; until then, it grows.
    red: the failing verdicts of the run.
    left: about how many seconds the stage still takes; None while that is not known.
    now, seconds: subject and features of the call that has run longest, and how long; empty if none is known.
    """

    stage: str
    done: int
    total: int
    red: int
    planned: bool = True
    left: float | None = None
    now: str = ""
    seconds: float = 0.0

    @property
    def tasks(self) -> str:
        """The number of tasks done, and of all tasks, in words."""
        return f"{self.done} of {'' if self.planned else 'at least '}{plural(self.total, 'task')} done"


Watch = Callable[[Progress], None]


class Meter:
    """The count of what a run has done, by its clock.

    budget: the seconds after which nothing more begins.
    """

    def __init__(self, budget: float = float("inf"), watch: Watch = lambda _progress: None) -> None:
        self.red = 0
        self._watch = watch
        self._began = time.monotonic()
        self._ends = self._began + budget
        self._enter("judging", 0, self._ends)
        self._planned = False

    def _enter(self, stage: str, total: int, ends: float) -> None:
        self._stage, self._total, self._stage_ends = stage, total, ends
        self._planned = True
        self._done = 0
        self._first = self._last = 0.0
        self._now, self._seconds = "", 0.0

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return round(time.monotonic() - self._began, 3)

    @property
    def seconds_left(self) -> float:
        """The seconds until nothing more begins."""
        return max(self._ends - time.monotonic(), 0.0)

    @property
    def stage_seconds_left(self) -> float:
        """The seconds until nothing more of this stage begins."""
        return max(self._stage_ends - time.monotonic(), 0.0)

    @property
    def place(self) -> str:
        """The stage and how much of it is done, in words."""
        return f"{self._stage}: {self._progress.tasks}"

    @property
    def _progress(self) -> Progress:
        return Progress(
            self._stage,
            self._done,
            self._total,
            self.red,
            self._planned,
            self._left(),
            self._now,
            self._seconds,
        )

    def _left(self) -> float | None:
        """Return the seconds left at the speed so far: the first task also waits for processes to start.

        A task that takes longer than others do changes the speed when it ends.
        """
        if not self._planned or self._done < _ENOUGH:
            return None
        pace = (self._last - self._first) / (self._done - 1)
        left = pace * (self._total - self._done) - (time.monotonic() - self._last)
        return min(left, self.stage_seconds_left) if left > 0 else None

    def begin(self, stage: str, total: int, seconds: float = float("inf")) -> None:
        """Begin a stage of so many tasks, of which none begins after so many seconds."""
        self._enter(stage, total, min(self._ends, time.monotonic() + seconds))
        self._watch(self._progress)

    def plan(self, count: int) -> None:
        """Add tasks to the stage, or subtract those that are no longer wanted."""
        self._total += count

    def all_planned(self) -> None:
        """Note that no more tasks will be added."""
        self._planned = True

    def run(self, now: str, seconds: float) -> None:
        """Note what runs, and for how long it has run."""
        self._now, self._seconds = now, seconds
        self._watch(self._progress)

    def finish(self) -> None:
        """Count one task as done."""
        self._last = time.monotonic()
        if not self._done:
            self._first = self._last
        self._done += 1
        self._watch(self._progress)


def call_in_words(subject: str, case: Case | None) -> str:
    """Return the subject of a call, and the features of its case."""
    features = sorted(case.features) if case is not None else ()
    return f"{subject}: {', '.join(features) or 'no option'}"
