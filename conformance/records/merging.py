"""The merge of a run's shards a result at a time: only what a search may change is in memory."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge

from attest.conformance.record import (
    Result,
    RunRecord,
    ShrunkOnce,
    Verdict,
    decisive,
    merge_headers,
    shrunk_once,
)
from attest.conformance.records.line_format import Place, header_line, result_line
from attest.conformance.records.lines import RecordLines
from attest.conformance.records.schema import ResultData, result_from_data
from attest.conformance.typed import decode


@dataclass(frozen=True)
class MergedLines:
    """The record of all the shards of one run.

    header: the record without results, and without the problems of a whole run. parts: the shards, sorted by
    their numbers. searches: those of the shards that stay. verdicts: the number of results of each verdict of
    each subject.
    """

    header: RunRecord
    parts: Sequence[RecordLines]
    searches: ShrunkOnce
    verdicts: Mapping[str, Mapping[Verdict, int]]

    @property
    def count(self) -> int:
        """The number of results."""
        return sum(sum(counts.values()) for counts in self.verdicts.values())

    def lines(self, header: RunRecord) -> Iterator[bytes]:
        """Yield the lines of the record's file. header: the record without results, with all its problems."""
        yield header_line(header, self.count)
        placed = (self._of(part) for part in self.parts)
        for _, line in merge(*placed, key=lambda item: item[0].sort_key):
            yield line + b"\n"

    def _of(self, part: RecordLines) -> Iterator[tuple[Place, bytes]]:
        """Yield the lines of a shard as the run has them."""
        for number, (place, line) in enumerate(part.placed(), start=2):
            if not _may_change(place):
                yield place, line
                continue
            was = _result(part, number, decode(line, ResultData, _where(part, number)))
            result = self.searches.of(was)
            if result is not None:
                yield place, line if result is was else result_line(result).removesuffix(b"\n")


def merge_lines(
    parts: Sequence[RecordLines], concern: Callable[[str, str], bool], add: Callable[[Result], None]
) -> MergedLines:
    """Read the records of all the shards of one run once.

    concern: whether `add` is to get the results of a check of a subject. Raises ValueError as `merge_records`
    does, and for a file that is damaged.
    """
    parts = sorted(parts, key=lambda part: part.header.shard)
    header = merge_headers([part.header for part in parts])
    verdicts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
    found: list[Result] = []
    for part in parts:
        for number, (place, line) in enumerate(part.placed(), start=2):
            data = decode(line, ResultData, _where(part, number))
            if _may_change(place):
                found.append(_result(part, number, data))
                continue
            verdicts[place.subject][place.verdict] += 1
            if concern(place.subject, place.check):
                add(_result(part, number, data))
    searches = shrunk_once(found)
    for result in (result for each in found if (result := searches.of(each)) is not None):
        verdicts[result.subject][result.verdict] += 1
        if concern(result.subject, result.check):
            add(result)
    return MergedLines(header, parts, searches, verdicts)


def _may_change(place: Place) -> bool:
    return decisive(place.verdict, place.minimal, place.shrunk_from)


def _result(part: RecordLines, number: int, data: ResultData) -> Result:
    """Make a Result of a line. Raises ValueError if its case has another name."""
    where = _where(part, number)
    result = result_from_data(data, where)
    if result.case.id != data.case_id:
        raise ValueError(f"{where}, case_id: got {data.case_id!r}, expected {result.case.id!r}")
    return result


def _where(part: RecordLines, number: int) -> str:
    return f"{part.where}: broken record, line {number}"
