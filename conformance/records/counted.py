"""A run of which only the number of results is known."""

from collections.abc import Mapping
from dataclasses import dataclass

from attest.conformance.record import RunRecord, Verdict, status_of


@dataclass(frozen=True)
class CountedRun:
    """A run without its results. run: all else of it. counts: how many results of each verdict it has."""

    run: RunRecord
    counts: Mapping[Verdict, int]

    @property
    def results(self) -> int:
        """The number of results."""
        return sum(self.counts.values())

    @property
    def red(self) -> int:
        """The number of results that fail the run."""
        return sum(count for verdict, count in self.counts.items() if verdict.red)

    @property
    def status(self) -> str:
        """The status of the run, as RunRecord has it."""
        return status_of(self.run, self.results, self.red > 0)
