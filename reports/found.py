"""Results of records as reports read them: the counted fields at once, the rest of a result on request.

A record of a million results is read line by line, and only what a report shows becomes a Result.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec

from attest.conformance.cases.case import DEFAULTS, Case, features_of
from attest.conformance.record import ACCURACY, Measurement, Result, Verdict
from attest.conformance.records.lines import RecordLines
from attest.conformance.records.schema import ResultData, result_from_data
from attest.conformance.typed import decode
from attest.reference import judgements

Place = tuple[str, str]  # subject and check

# How many passing cases of a check are kept, to see what the failing ones have in common.
_PASSING_CASES = 1000
# Cases whose facts are kept: those of a record of a million results.
_CASES = 1 << 18

# A known failure would hide all others behind its numbers.
_NOT_COUNTED = (Verdict.XFAIL,)
# Former names of verdicts are rare: the whole line is read for them.
_VERDICTS = {verdict.value: verdict for verdict in Verdict}


class LineNumbers(msgspec.Struct, frozen=True, gc=False):
    """The numbers of a Measurement as a line has them: what is not finite is a text."""

    output: str
    elements: int
    worst_ratio: float | str
    rms_ratio: float | str
    largest_z: float | str
    bias_t: float | str


Numbers = Measurement | LineNumbers


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a case that a comparison needs.

    features: in order. keys: how many it has. only_bound: whether only the bound judges its family.
    """

    dtype: str
    features: tuple[str, ...]
    keys: int
    only_bound: bool


def facts_of(case: Case) -> Facts:
    """Return the facts of a case."""
    return _facts(vars(case))


class Found(msgspec.Struct, frozen=True, gc=False):
    """One result of a record. whole: the result; or its line, the file, and the number of the result."""

    subject: str
    check: str
    case_id: str
    verdict: Verdict
    facts: Facts
    measurements: Sequence[Numbers]
    cut: bool
    minimal: bool
    drawn: bool
    seconds: float
    whole: Result | tuple[bytes, str, int]

    @property
    def place(self) -> Place:
        """The subject and the check."""
        return self.subject, self.check

    @property
    def counted(self) -> Sequence[Numbers]:
        """The measurements that count."""
        return () if self.verdict in _NOT_COUNTED else self.measurements

    @property
    def result(self) -> Result:
        """The result. Raises ValueError if its line is broken."""
        if isinstance(self.whole, Result):
            return self.whole
        return _whole(*self.whole)


class _Line(msgspec.Struct, frozen=True, gc=False):
    subject: str
    check: str
    case: msgspec.Raw
    verdict: str
    case_id: str = ""
    measurements: tuple[LineNumbers, ...] = ()
    cut: bool = False
    minimal: bool = False
    shrunk_from: str = ""
    seconds: float = 0.0


_LINES = msgspec.json.Decoder(_Line)


def found_in(record: RecordLines) -> Iterable[Found]:
    """Return the results of a record, in its order. Raises ValueError if a line of it is broken."""
    return of_lines(record, record.where) if record.record is None else of_results(record.record.results)


def of_results(results: Iterable[Result]) -> list[Found]:
    """Return results in the order of a record."""
    facts: dict[str, Facts] = {}
    found: list[Found] = []
    for result in sorted(results, key=lambda result: result.sort_key):
        case = result.case
        known = facts.get(case.id)
        if known is None:
            known = facts[case.id] = facts_of(case)
        found.append(
            Found(
                result.subject,
                result.check,
                case.id,
                result.verdict,
                known,
                result.measurements,
                result.cut,
                result.minimal,
                result.drawn,
                result.seconds,
                result,
            )
        )
    return found


def of_lines(lines: Iterable[bytes], where: str) -> Iterator[Found]:
    """Yield the results of lines of a record, in their order. Raises ValueError that begins with `where`."""
    for number, line in enumerate(lines, start=1):
        found = _of_line(line, where, number)
        if found is None:
            # Only the whole check of a line knows: an older spelling, or a mistake to name.
            (found,) = of_results([_whole(line, where, number)])
        yield found


def _of_line(line: bytes, where: str, number: int) -> Found | None:
    try:
        data = _LINES.decode(line)
        facts = _facts_of_json(bytes(data.case))
        verdict = _VERDICTS[data.verdict]
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError):
        return None
    if not data.case_id:
        return None
    return Found(
        data.subject,
        data.check,
        data.case_id,
        verdict,
        facts,
        data.measurements,
        data.cut,
        data.minimal,
        not data.minimal or data.shrunk_from == data.case_id,
        data.seconds,
        (line, where, number),
    )


def _whole(line: bytes, where: str, number: int) -> Result:
    place = f"{where}: result {number}"
    return result_from_data(decode(line, ResultData, place), place)


@lru_cache(_CASES)
def _facts_of_json(data: bytes) -> Facts:
    return _facts(DEFAULTS | msgspec.json.decode(data, type=dict[str, Any]))


def _facts(fields: Mapping[str, Any]) -> Facts:
    dtype, keys = fields["dtype"], fields["kv_len"]
    limits = judgements.limits("out", 1, keys, dtype, fields["family"])
    return Facts(dtype, tuple(sorted(features_of(fields))), keys, math.isinf(limits.largest_z))


def groups(
    base: Iterable[Found], head: Iterable[Found]
) -> Iterator[tuple[Place, Sequence[Found], Sequence[Found]]]:
    """Yield each subject and check of two records with the results of both; each record is in order."""
    sides = [groupby(side, key=lambda found: found.place) for side in (base, head)]
    ahead = [next(side, None) for side in sides]
    while any(ahead):
        place = min(group[0] for group in ahead if group is not None)
        both: list[Sequence[Found]] = []
        for number, group in enumerate(ahead):
            if group is None or group[0] != place:
                both.append(())
                continue
            both.append([*group[1]])
            ahead[number] = next(sides[number], None)
        yield place, both[0], both[1]


def evidence(results: Iterable[Found]) -> list[Found]:
    """Return what fails of one check, and as much of what passes as is needed to tell the causes."""
    kept: list[Found] = []
    passed = 0
    for found in results:
        if found.verdict.red:
            kept.append(found)
        elif found.check in ACCURACY and found.measurements and passed < _PASSING_CASES:
            passed += 1
            kept.append(found)
    return kept
