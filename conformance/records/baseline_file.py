"""Baselines as files, `attest.baseline/1`: JSON lines, a header and one compact line for each result.

The header has all fields of a RunRecord except the results, and their number. A result has the fields of
`attest.run/2`; those at their default are left out. `record_file.read_record` reads both.
"""

import json
from typing import Any, Literal

from attest.conformance.record import RunRecord
from attest.conformance.records.schema import (
    Count,
    ResultData,
    RunData,
    Text,
    result_from_data,
    result_to_json,
    run_fields,
    run_fields_to_json,
    schema_of,
)
from attest.conformance.text import sentence
from attest.conformance.typed import decode

BASELINE = "attest.baseline/1"

# `case_id` follows from `case`.
_LEFT_OUT = ("case_id", "seconds")


class _Header(RunData, kw_only=True):
    schema: Literal["attest.baseline/1"]
    results: Count
    complete: bool = True
    note: Text = ""
    problems: tuple[Text, ...] = ()


def is_baseline(data: bytes) -> bool:
    """Return whether a file's bytes begin as a baseline does."""
    try:
        return schema_of(data.partition(b"\n")[0], "") == BASELINE
    except ValueError:
        return False


def baseline_text(record: RunRecord) -> str:
    """Return a record as the text of a baseline's file; results are sorted."""
    results = sorted(record.results, key=lambda result: result.sort_key)
    header = {
        "schema": BASELINE,
        "results": len(results),
        "complete": record.complete,
        "note": record.note,
        "problems": list(record.problems),
        **run_fields_to_json(record),
    }
    lines = [header, *(_compact(result_to_json(result)) for result in results)]
    return "".join(f"{json.dumps(line, separators=(',', ':'), allow_nan=False)}\n" for line in lines)


def read_baseline(data: bytes, where: str) -> RunRecord:
    """Read a baseline's bytes. Raises ValueError with one sentence that begins with `where`."""
    first, *lines = data.removesuffix(b"\n").split(b"\n")
    header = decode(first, _Header, f"{where}: broken baseline, line 1")
    if len(lines) != header.results:
        raise ValueError(
            sentence(f"{where}: broken baseline: {len(lines)} results, its header names {header.results}")
        )
    places = (f"{where}: broken baseline, line {number}" for number in range(2, len(lines) + 2))
    return RunRecord(
        **run_fields(header, where),
        results=tuple(
            result_from_data(decode(line, ResultData, place), place)
            for line, place in zip(lines, places, strict=True)
        ),
        complete=header.complete,
        note=header.note,
        problems=header.problems,
    )


def _compact(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out the empty fields of a result and of its measurements."""
    kept = {name: value for name, value in data.items() if _says_something(value) and name not in _LEFT_OUT}
    if "measurements" in kept:
        kept["measurements"] = [
            {name: value for name, value in measurement.items() if _says_something(value)}
            for measurement in data["measurements"]
        ]
    return kept


def _says_something(value: object) -> bool:
    """Return whether a value must be written: every number, and anything not empty."""
    return value is not None and value is not False and value not in ("", [], ())
