"""Records that are read a result at a time: only their header is in memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from attest.conformance.files import is_special, read_line, reason_of
from attest.conformance.record import RunRecord
from attest.conformance.records.gzipped import opened
from attest.conformance.records.line_format import (
    LINES,
    LinesHeader,
    checked_lines,
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
    """A record as a header and lines; nothing but the header is held in memory.

    header: the record without results. count: of the results. read: begins to read the lines.
    """

    header: RunRecord
    count: int
    read: Callable[[], Iterator[bytes]]

    def __iter__(self) -> Iterator[bytes]:
        """Yield the JSON of each result, in the order of `Result.sort_key`.

        Each call reads the file again. Raises ValueError with one sentence that names the file and the line.
        """
        return self.read()


def open_lines(path: Path) -> RecordLines:
    """Open a record of any kind that `read_record` reads; those that are not lines are read whole.

    Raises ValueError with one sentence that begins with the path.
    """
    header = None if is_special(path) else _header(path)  # a pipe is read once
    if header is not None:
        found = header
        return RecordLines(record_of(header, str(path)), header.results, lambda: _results(path, found))
    record = read_record(path)
    results = sorted(record.results, key=lambda result: result.sort_key)
    return RecordLines(
        replace(record, results=()),
        len(results),
        lambda: (result_line(result).removesuffix(b"\n") for result in results),
    )


def _header(path: Path) -> LinesHeader | None:
    """Read the first line of a file; return None if the file is of another kind or cannot be read."""
    try:
        with opened(path) as file:
            line = read_line(file, sizes().line_bytes, str(path))
    except (OSError, ValueError):  # what is wrong is found again where a file is read whole
        return None
    return read_header(line, str(path)) if schema_of_first_line(line) == LINES else None


def _results(path: Path, header: LinesHeader) -> Iterator[bytes]:
    try:
        with opened(path) as file:
            read_line(file, sizes().line_bytes, str(path))
            yield from checked_lines(file, header, str(path))
    except OSError as error:
        raise ValueError(sentence(f"{path}: not a readable record: {reason_of(error)}")) from error
