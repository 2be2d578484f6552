"""Records as JSON lines, `attest.lines/1`, and baselines: a header, then one compact line for each result.

The header has all fields of a RunRecord except the results, and their number. A result has the fields of
`attest.run/2`; those at their default are left out. A baseline, `attest.baseline/1`, also leaves out what
varies between two runs.
"""

import json
from collections.abc import Iterator, Sequence
from io import BufferedIOBase, BytesIO
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from attest.conformance.files import read_line
from attest.conformance.record import Result, RunRecord, Verdict
from attest.conformance.records.schema import (
    Count,
    ResultData,
    RunData,
    Text,
    result_from_data,
    result_to_json,
    run_fields,
    run_fields_to_json,
)
from attest.conformance.sizes import sizes
from attest.conformance.text import sentence
from attest.conformance.typed import decode

LINES = "attest.lines/1"
BASELINE = "attest.baseline/1"

# What a baseline leaves out of its header and of each result; `case_id` follows from `case`.
_NOT_IN_BASELINES = ("left_out", "seconds", "case_id")


class LinesHeader(RunData, kw_only=True):
    """The first line: a RunRecord without its results, and their number."""

    schema: Literal["attest.lines/1", "attest.baseline/1"]
    results: Count
    complete: bool = True
    note: Text = ""
    problems: tuple[Text, ...] = ()
    left_out: tuple[Text, ...] = ()
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class Place(msgspec.Struct):
    """The fields of a line that give its place in the order of a record, and whether a search found it."""

    subject: str
    check: str
    case_id: Annotated[str, Meta(min_length=1)]
    verdict: Verdict
    minimal: bool = False
    shrunk_from: str = ""

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        """The order of results in a record, as of a Result."""
        return (self.subject, self.check, self.case_id, self.verdict)


_PLACES = msgspec.json.Decoder(Place)


def header_line(record: RunRecord, count: int, schema: str = LINES) -> bytes:
    """Return the first line of a file of `count` results."""
    header = {
        "schema": schema,
        "results": count,
        "complete": record.complete,
        "note": record.note,
        "problems": list(record.problems),
        "left_out": list(record.left_out),
        "seconds": record.seconds,
        **run_fields_to_json(record),
    }
    return _line(header, schema)


def result_line(result: Result, schema: str = LINES) -> bytes:
    """Return the line of one result, without what is at its default."""
    data = result_to_json(result)
    kept = {name: value for name, value in data.items() if _says_something(value)}
    if "measurements" in kept:
        kept["measurements"] = [
            {name: value for name, value in measurement.items() if _says_something(value)}
            for measurement in data["measurements"]
        ]
    if not result.seconds:
        del kept["seconds"]
    return _line(kept, schema)


def all_lines(record: RunRecord, schema: str = LINES) -> Iterator[bytes]:
    """Yield the lines of a record's file; results are sorted."""
    results = sorted(record.results, key=lambda result: result.sort_key)
    yield header_line(record, len(results), schema)
    yield from (result_line(result, schema) for result in results)


def read_header(line: bytes, where: str) -> LinesHeader:
    """Read the first line. Raises ValueError that begins with `where`."""
    return decode(line, LinesHeader, f"{where}: broken record, line 1")


def record_of(header: LinesHeader, where: str, results: Sequence[Result] = ()) -> RunRecord:
    """Make a record of a header and results. Raises ValueError that begins with `where`."""
    return RunRecord(
        **run_fields(header, where),
        results=tuple(results),
        complete=header.complete,
        note=header.note,
        problems=header.problems,
        left_out=header.left_out,
        seconds=header.seconds,
    )


def placed_lines(file: BufferedIOBase, header: LinesHeader, where: str) -> Iterator[tuple[Place, bytes]]:
    """Yield the lines after the header, without their ends, and the place of each.

    Raises ValueError that names a line, as `plain_lines` does, and for one that is out of order.
    """
    before = ("",)
    for number, line in enumerate(plain_lines(file, header, where), start=2):
        found = _placed(line, where, number)
        key = found.sort_key
        if key < before:
            place = f"{where}: broken record, line {number}"
            raise ValueError(sentence(f"{place}: it is out of order: {key} comes before {before}"))
        before = key
        yield found, line


def _placed(line: bytes, where: str, number: int) -> Place:
    try:
        return _PLACES.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return decode(line, Place, f"{where}: broken record, line {number}")  # says what is wrong


def plain_lines(file: BufferedIOBase, header: LinesHeader, where: str) -> Iterator[bytes]:
    """Yield the lines after the header, without their ends.

    Raises ValueError that names a line, for one that is too long or damaged, and if there are not as many as
    the header names.
    """
    limit = sizes().line_bytes
    for number in range(2, header.results + 2):
        place = f"{where}: broken record, line {number}"
        line = read_line(file, limit, place)
        if not line:
            raise ValueError(f"{place}: it is missing, the header names {header.results} results")
        yield line.removesuffix(b"\n")
    place = f"{where}: broken record, line {header.results + 2}"
    if read_line(file, limit, place):
        raise ValueError(f"{place}: more results than the header names, {header.results}")


def read_lines(data: bytes, where: str) -> RunRecord:
    """Read a file whole. Raises ValueError with one sentence that begins with `where`."""
    file = BytesIO(data)
    header = read_header(read_line(file, len(data), where), where)
    places = (f"{where}: broken record, line {number}" for number in range(2, header.results + 2))
    if header.schema == BASELINE:  # its lines do not name their cases
        lines = plain_lines(file, header, where)
    else:
        lines = (line for _, line in placed_lines(file, header, where))
    results = [
        result_from_data(decode(line, ResultData, place), place)
        for line, place in zip(lines, places, strict=True)
    ]
    return record_of(header, where, results)


def _line(data: dict[str, Any], schema: str) -> bytes:
    left_out = _NOT_IN_BASELINES if schema == BASELINE else ()
    kept = {name: value for name, value in data.items() if name not in left_out}
    return f"{json.dumps(kept, separators=(',', ':'), allow_nan=False)}\n".encode()


def _says_something(value: object) -> bool:
    """Return whether a value must be written: every number, and anything not empty."""
    return value is not None and value is not False and value not in ("", [], ())
