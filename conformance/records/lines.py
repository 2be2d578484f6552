"""Records that are read a result at a time: only their header is in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from attest.conformance.files import is_special, read_line, reason_of
from attest.conformance.record import Result, RunRecord
from attest.conformance.records.gzipped import opened
from attest.conformance.records.line_format import (
    LINES,
    LinesHeader,
    Place,
    placed_lines,
    read_header,
    record_of,
    result_line,
)
from attest.conformance.records.record_file import read_record
from attest.conformance.records.schema import schema_of_first_line
from attest.conformance.sizes import sizes
from attest.conformance.text import sentence


@dataclass(frozen=True)
class RecordLines:
    """A record as a header and lines; of a file of lines, nothing but the header is held in memory.

    header: the record without results. count: of the results. where: the file's path.
    placed: begins to read the lines, each with its place. record: all of it, if it was read whole; else None.
    """

    header: RunRecord
    count: int
    where: str
    placed: Callable[[], Iterator[tuple[Place, bytes]]]
    record: RunRecord | None = None

    def whole(self) -> RunRecord:
        """Return the record with all results. Raises ValueError as `read_record` does."""
        return read_record(Path(self.where)) if self.record is None else self.record

    def __iter__(self) -> Iterator[bytes]:
        """Yield the JSON of each result, in the order of `Result.sort_key`.

        Each call reads the file again. Raises ValueError with one sentence that names the file and the line.
        """
        return (line for _, line in self.placed())


def open_lines(path: Path) -> RecordLines:
    """Open a record of any kind that `read_record` reads; those that are not lines are read whole.

    Raises ValueError with one sentence that begins with the path.
    """
    where = str(path)
    header = None if is_special(path) else _header(path)  # a pipe is read once
    if header is not None:
        return RecordLines(
            header=record_of(header, where),
            count=header.results,
            where=where,
            placed=partial(_results, path, header),
        )
    return lines_of(read_record(path), where)


def lines_of(record: RunRecord, where: str) -> RecordLines:
    """Return a record that is in memory as a header and lines. where: names it in messages."""
    return RecordLines(
        header=replace(record, results=()),
        count=len(record.results),
        where=where,
        placed=partial(_made, sorted(record.results, key=lambda result: result.sort_key)),
        record=record,
    )


def _header(path: Path) -> LinesHeader | None:
    """Read the first line of a file; return None if the file is of another kind or cannot be read."""
    try:
        with opened(path) as file:
            line = read_line(file, sizes().line_bytes, str(path))
    except (OSError, ValueError):  # what is wrong is found again where a file is read whole
        return None
    return read_header(line, str(path)) if schema_of_first_line(line) == LINES else None


def _made(results: Sequence[Result]) -> Iterator[tuple[Place, bytes]]:
    for result in results:
        place = Place(*result.key, result.verdict, result.minimal, result.shrunk_from)
        yield place, result_line(result).removesuffix(b"\n")


def _results(path: Path, header: LinesHeader) -> Iterator[tuple[Place, bytes]]:
    try:
        with opened(path) as file:
            read_line(file, sizes().line_bytes, str(path))
            yield from placed_lines(file, header, str(path))
    except OSError as error:
        raise ValueError(sentence(f"{path}: not a readable record: {reason_of(error)}")) from error
