"""Results of a record as the matrix reads them: counted fields at once, the rest of a result on request."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import msgspec

from attest.conformance.cases.case import DEFAULTS
from attest.conformance.record import Result, Verdict
from attest.conformance.records.line_format import result_line
from attest.conformance.records.lines import RecordLines
from attest.conformance.records.schema import ResultData, result_from_data
from attest.conformance.typed import decode


class _Numbers(msgspec.Struct):
    worst_ratio: float | str


class _Case(msgspec.Struct):
    dtype: Literal["float32", "bfloat16", "float16"] = cast(Any, DEFAULTS["dtype"])


class _Fields(msgspec.Struct):
    subject: str
    check: str
    case: _Case
    verdict: str
    clauses: tuple[str, ...] = ()
    measurements: tuple[_Numbers, ...] = ()


_DECODER = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True)
class Line:
    """One result of a record. ratio: its largest err/bound. line: its JSON. where: names it in messages."""

    subject: str
    check: str
    dtype: str
    verdict: Verdict
    clauses: tuple[str, ...]
    ratio: float | None
    line: bytes
    where: str

    @cached_property
    def result(self) -> Result:
        """The whole result. Raises ValueError if its line is broken."""
        return result_from_data(decode(self.line, ResultData, self.where), self.where)


def lines_in(record: RecordLines) -> Iterator[Line]:
    """Yield the results of a record, in its order. Raises ValueError if a line of it is broken."""
    for number, line in enumerate(record, start=1):
        where = f"{record.where}: result {number}"
        try:
            found = _DECODER.decode(line)
            verdict = Verdict(found.verdict)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Only the whole check of a line knows: an older spelling, or a mistake to name.
            whole = result_from_data(decode(line, ResultData, where), where)
            found, verdict = _DECODER.decode(result_line(whole)), whole.verdict
        yield Line(
            found.subject,
            found.check,
            found.case.dtype,
            verdict,
            found.clauses,
            max((float(measured.worst_ratio) for measured in found.measurements), default=None),
            line,
            where,
        )
