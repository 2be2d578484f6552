"""The JSON of records, `attest.run/2`, and of journals, `attest.journal/2`: its fields, as types.

Records of schema 1 are read, too: they lack `shrunk_from` and `phase`, and call INCONCLUSIVE MISTRUSTED.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.process.phases import PHASES
from attest.conformance.record import Element, Measurement, Picture, Result, RunRecord, Verdict
from attest.conformance.sizes import sizes
from attest.conformance.text import sentence
from attest.conformance.typed import decode

RECORD = "attest.run/2"
JOURNAL = "attest.journal/2"
_READ = ("attest.run/1", RECORD)

# Names that verdicts have in older records.
_FORMER_VERDICTS = {"MISTRUSTED": Verdict.INCONCLUSIVE}

Text = Annotated[str, Meta(max_length=sizes().string_characters)]
Number = float | Literal["nan", "inf", "-inf"]
Count = Annotated[int, Meta(ge=0)]


class _Data(msgspec.Struct, forbid_unknown_fields=True):
    """A record with these fields and no others."""


class ElementData(_Data):
    """An Element."""

    index: tuple[Count, ...]
    got: Number
    expected: Number
    got_hex: Text
    expected_hex: Text


class MeasurementData(_Data):
    """A Measurement."""

    output: Text
    elements: Count
    worst_ratio: Number
    rms_ratio: Number
    largest_z: Number
    bias_t: Number
    broken: tuple[Text, ...] = ()
    worst: ElementData | None = None
    wrong: Count = 0
    size: Count = 0
    where: tuple[Text, ...] = ()
    fingerprints: tuple[Text, ...] = ()


class PictureData(_Data):
    """A Picture."""

    batch: Count
    head: Count
    rows: Count
    keys: Count
    first_row: Count
    first_key: Count
    query_block: Count
    key_block: Count
    differ: Count
    seen: tuple[Text, ...]
    errors: tuple[Text, ...]


class ResultData(_Data):
    """A Result, whose defaults a baseline leaves out; `case_id` repeats the name of `case` for readers."""

    subject: Text
    check: Text
    case: dict[str, Any]
    verdict: Text
    clauses: tuple[Text, ...] = ()
    measurements: tuple[MeasurementData, ...] = ()
    message: Text = ""
    minimal: bool = False
    link: Text = ""
    case_id: Text = ""
    shrunk_from: Text = ""
    phase: Text = ""
    cut: bool = False
    picture: PictureData | None = None
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    several_blocks: bool = False
    breaks: tuple[Text, ...] = ()


class RunData(_Data):
    """The request of a run."""

    profile: Text
    seed: Count
    shard: tuple[Count, Count]
    narrowed: Text
    environment: dict[str, Any]


class RecordData(RunData):
    """A RunRecord; `status` and `counts` follow from `results`, for readers."""

    complete: bool
    note: Text
    problems: tuple[Text, ...]
    results: tuple[ResultData, ...]
    schema: str
    status: str
    counts: dict[str, int]
    left_out: tuple[Text, ...] = ()
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class RunLine(RunData):
    """The first line of a journal."""

    schema: str


class JournalLine(_Data):
    """A later line of a journal: the results of one call.

    judged: the key of the call in the plan; empty for a search for a simpler case. result: the only one, in a
    journal of an older version.
    """

    judged: Text = ""
    results: tuple[ResultData, ...] = ()
    result: ResultData | None = None


class _Head(msgspec.Struct):
    schema: Any | UnsetType = UNSET


def schema_of(data: bytes, where: str) -> str:
    """Return the schema that a JSON object names. Raises ValueError if it names none."""
    found = decode(data, _Head, where).schema
    if not isinstance(found, str):
        got = "none" if found is UNSET else repr(found)
        raise ValueError(sentence(f"{where}: schema: got {got}, expected {RECORD!r}: write it with --json"))
    return found


def schema_of_first_line(data: bytes) -> str:
    """Return the schema that the first line of a file of JSON lines names; "" if none."""
    try:
        return schema_of(data.partition(b"\n")[0], "")
    except ValueError:
        return ""


def record_from_json(data: bytes, where: str) -> RunRecord:
    """Read a record. Raises ValueError that begins with `where`."""
    schema = schema_of(data, where)
    if schema not in _READ:
        raise ValueError(
            sentence(f"{where}: schema: got {schema!r}, expected {RECORD!r}: write it with attest ... --json")
        )
    found = decode(data, RecordData, f"{where}: broken record")
    return RunRecord(
        **run_fields(found, where),
        results=tuple(
            result_from_data(result, f"{where}: broken record, results[{number}]")
            for number, result in enumerate(found.results)
        ),
        complete=found.complete,
        note=found.note,
        problems=found.problems,
        left_out=found.left_out,
        seconds=found.seconds,
    )


def run_from_json(data: bytes, where: str) -> RunRecord:
    """Read the first line of a journal: what was requested, and no results. Raises ValueError."""
    return RunRecord(**run_fields(decode(data, RunLine, where), where), complete=False)


def journal_line(data: bytes, where: str) -> tuple[str, tuple[Result, ...]]:
    """Read a later line of a journal: the key of a call, and its results. Raises ValueError."""
    line = decode(data, JournalLine, where)
    found = line.results if line.result is None else (line.result, *line.results)
    return line.judged, tuple(result_from_data(each, where) for each in found)


def result_from_data(data: ResultData, where: str) -> Result:
    """Make a Result of typed JSON. Raises ValueError for values that only a Result forbids."""
    try:
        case = case_from_json(data.case)
    except (ValueError, OverflowError) as error:
        raise ValueError(sentence(f"{where}: {error}")) from error
    if data.phase and data.phase not in PHASES:
        raise ValueError(
            sentence(f"{where}.phase: got {data.phase!r}, expected one of {', '.join(PHASES)}, or nothing")
        )
    return Result(
        subject=data.subject,
        check=data.check,
        clauses=data.clauses,
        case=case,
        verdict=_verdict(data.verdict, where),
        measurements=tuple(_measurement(measurement) for measurement in data.measurements),
        message=data.message,
        minimal=data.minimal,
        shrunk_from=data.shrunk_from,
        phase=data.phase,
        link=data.link,
        cut=data.cut,
        picture=data.picture and Picture(**msgspec.structs.asdict(data.picture)),
        seconds=data.seconds,
        several_blocks=data.several_blocks,
        breaks=data.breaks,
    )


def record_to_json(record: RunRecord) -> dict[str, Any]:
    """Return the record as JSON data; numbers that JSON lacks become "nan", "inf" and "-inf"."""
    return {
        "schema": RECORD,
        "status": record.status,
        "complete": record.complete,
        "note": record.note,
        "counts": record.counts,
        "problems": list(record.problems),
        "left_out": list(record.left_out),
        "seconds": record.seconds,
        "results": [result_to_json(r) for r in sorted(record.results, key=lambda r: r.sort_key)],
        **run_fields_to_json(record),
    }


def run_to_json(record: RunRecord) -> dict[str, Any]:
    """Return the first line of a journal."""
    return {"schema": JOURNAL, **run_fields_to_json(record)}


def result_to_json(result: Result) -> dict[str, Any]:
    """Return one result as records and journals hold it."""
    data = {name: _plain(value) for name, value in vars(result).items()}
    data["case_id"] = result.case.id
    data["verdict"] = result.verdict.value
    return data


def run_fields(data: RunData, where: str) -> dict[str, Any]:
    """Return the fields of a RunRecord that describe the request. Raises ValueError."""
    number, count = data.shard
    if not 1 <= number <= count:
        raise ValueError(f"{where}: shard: got {number}/{count}, expected i/n with 1 <= i <= n")
    return {
        "profile": data.profile,
        "seed": data.seed,
        "shard": data.shard,
        "narrowed": data.narrowed,
        "environment": data.environment,
    }


def run_fields_to_json(record: RunRecord) -> dict[str, Any]:
    """Return the request of a run, as JSON data."""
    return {
        "profile": record.profile,
        "seed": record.seed,
        "shard": list(record.shard),
        "narrowed": record.narrowed,
        "environment": dict(record.environment),
    }


def _verdict(name: str, where: str) -> Verdict:
    if name in _FORMER_VERDICTS:
        return _FORMER_VERDICTS[name]
    if name not in Verdict.__members__:
        raise ValueError(
            sentence(f"{where}.verdict: got {name!r}, expected one of {', '.join(Verdict.__members__)}")
        )
    return Verdict[name]


def _measurement(data: MeasurementData) -> Measurement:
    worst = data.worst
    return Measurement(
        output=data.output,
        elements=data.elements,
        worst_ratio=float(data.worst_ratio),
        rms_ratio=float(data.rms_ratio),
        largest_z=float(data.largest_z),
        bias_t=float(data.bias_t),
        broken=data.broken,
        worst=worst
        and Element(worst.index, float(worst.got), float(worst.expected), worst.got_hex, worst.expected_hex),
        wrong=data.wrong,
        size=data.size,
        where=data.where,
        fingerprints=data.fingerprints,
    )


def _plain(value: Any) -> Any:
    """Return a part of a result as JSON data; NaN and infinities, which JSON lacks, are spelled."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, (Measurement, Element, Picture)):
        return {name: _plain(item) for name, item in vars(value).items()}
    return value.to_json() if isinstance(value, Case) else value
