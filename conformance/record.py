"""What a run found: results by subject, check and case, and the JSON file that holds them.

Everything but `environment` is byte-deterministic for the same kernels, cases and device: results are
sorted, floats are written by `repr`, and neither times nor paths appear.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from conformance.case import Case, case_from_json

SCHEMA = "attest.run/1"

# Names that verdicts have in older records.
_FORMER_VERDICTS = {"MISTRUSTED": "INCONCLUSIVE"}


class Verdict(StrEnum):
    """What a check says of a subject on a case."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"  # declared and properly refused
    INCONCLUSIVE = "INCONCLUSIVE"  # the case cannot tell right from wrong
    TIMEOUT = "TIMEOUT"  # did not finish in time; the message names the phase
    ERROR = "ERROR"  # the check could not be carried out
    XFAIL = "XFAIL"  # expected, with a reason
    XPASS = "XPASS"  # expected to fail, but did not

    @property
    def red(self) -> bool:
        """Whether one such verdict fails a run."""
        return self in (Verdict.FAIL, Verdict.TIMEOUT, Verdict.ERROR, Verdict.XPASS)


@dataclass(frozen=True)
class Element:
    """One element of an output: where it is, and what was got and expected, in decimal and in hex."""

    index: tuple[int, ...]
    got: float
    expected: float
    got_hex: str
    expected_hex: str


@dataclass(frozen=True)
class Measurement:
    """How far one output is from the oracle: numbers only.

    output: out, lse, dquery, dkey, dvalue, dbias or dsoftmax_aux. elements: how many were judged.
    worst_ratio: the largest err / bound. rms_ratio: rms(err) / rms(std). largest_z: of err / std.
    bias_t: the signed statistic. broken: the judgements that failed: bound, rms, z, bias, drift.
    worst: the element of the largest err / bound.
    """

    output: str
    elements: int
    worst_ratio: float
    rms_ratio: float
    largest_z: float
    bias_t: float
    broken: tuple[str, ...] = ()
    worst: Element | None = None


@dataclass(frozen=True)
class Result:
    """One verdict.

    clauses: the clauses that the check tests on this case. message: what is wrong, or why not judged.
    minimal: whether `case` is the smallest failing one that shrinking found.
    link: the public report behind an expectation.
    """

    subject: str
    check: str
    clauses: tuple[str, ...]
    case: Case
    verdict: Verdict
    measurements: tuple[Measurement, ...] = ()
    message: str = ""
    minimal: bool = False
    link: str = ""

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        """The order of results in a record."""
        return (self.subject, self.check, self.case.id, self.verdict)


@dataclass(frozen=True)
class RunRecord:
    """All that one run found.

    profile, seed, shard: what was asked. complete: False if the run was cut short, `note` says why.
    problems: what fails the run beyond single verdicts, such as stale expectations.
    narrowed: the options that narrowed the run to less than its profile, as typed; empty for all of it.
    environment: device, versions, flags, commit.
    """

    profile: str
    seed: int
    results: tuple[Result, ...] = ()
    shard: tuple[int, int] = (1, 1)
    complete: bool = True
    note: str = ""
    problems: tuple[str, ...] = ()
    narrowed: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def status(self) -> str:
        """ "pass" or "fail": a red verdict, a problem or an early end fails; so does a run of nothing."""
        red = any(result.verdict.red for result in self.results)
        nothing = not self.results and self.shard == (1, 1)  # one shard of several may happen to be empty
        return "fail" if red or self.problems or not self.complete or nothing else "pass"

    @property
    def counts(self) -> dict[str, int]:
        """How many results of each verdict."""
        found = Counter(result.verdict.value for result in self.results)
        return {verdict.value: found[verdict.value] for verdict in Verdict}

    def to_json(self) -> dict[str, Any]:
        """The record as JSON data; numbers that JSON lacks become "nan", "inf" and "-inf"."""
        return {
            "schema": SCHEMA,
            "status": self.status,
            "complete": self.complete,
            "note": self.note,
            "profile": self.profile,
            "seed": self.seed,
            "shard": list(self.shard),
            "counts": self.counts,
            "problems": list(self.problems),
            "narrowed": self.narrowed,
            "environment": dict(self.environment),
            "results": [_result_to_json(r) for r in sorted(self.results, key=lambda r: r.sort_key)],
        }


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record whole or not at all, so that a crash leaves the previous one."""
    text = json.dumps(record.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(text)
    os.replace(scratch, path)


def read_record(path: Path) -> RunRecord:
    """Read a record. Raises ValueError with one sentence naming the file and what is wrong with it."""
    try:
        data: Any = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a readable record: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path}: schema {found!r}, expected {SCHEMA!r}: write it with attest ... --json")
    try:
        return RunRecord(
            profile=data["profile"],
            seed=data["seed"],
            results=tuple(_result_from_json(r) for r in data["results"]),
            shard=(data["shard"][0], data["shard"][1]),
            complete=data["complete"],
            note=data["note"],
            problems=tuple(data["problems"]),
            narrowed=data["narrowed"],
            environment=data["environment"],
        )
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: broken record: {type(error).__name__}: {error}") from error


def merge_records(records: Iterable[RunRecord]) -> RunRecord:
    """One record of all the shards of one run.

    Raises ValueError if they are of different runs, or a shard is missing or given twice.
    """
    parts = sorted(records, key=lambda record: record.shard)
    if not parts:
        raise ValueError("no records to merge")
    first = parts[0]
    for part in parts[1:]:
        for name in ("profile", "seed", "narrowed"):
            if getattr(part, name) != getattr(first, name):
                raise ValueError(f"{name}: got {getattr(part, name)!r}, expected {getattr(first, name)!r}")
    shards = [part.shard for part in parts]
    expected = [(number, first.shard[1]) for number in range(1, first.shard[1] + 1)]
    if shards != expected:
        raise ValueError(f"shards: got {_shards(shards)}, expected {_shards(expected)}")
    return replace(
        first,
        results=tuple(result for part in parts for result in part.results),
        shard=(1, 1),
        complete=all(part.complete for part in parts),
        note="; ".join(part.note for part in parts if part.note),
        problems=tuple(sorted({problem for part in parts for problem in part.problems})),
    )


def _shards(shards: list[tuple[int, int]]) -> str:
    return ", ".join(f"{number}/{count}" for number, count in shards)


def _result_to_json(result: Result) -> dict[str, Any]:
    data = _finite(asdict(result))
    data["case"] = result.case.to_json()
    data["case_id"] = result.case.id
    data["verdict"] = result.verdict.value
    return data


def _result_from_json(data: Mapping[str, Any]) -> Result:
    return Result(
        subject=data["subject"],
        check=data["check"],
        clauses=tuple(data["clauses"]),
        case=case_from_json(data["case"]),
        verdict=Verdict(_FORMER_VERDICTS.get(data["verdict"], data["verdict"])),
        measurements=tuple(_measurement_from_json(m) for m in data["measurements"]),
        message=data["message"],
        minimal=data["minimal"],
        link=data["link"],
    )


def _measurement_from_json(data: Mapping[str, Any]) -> Measurement:
    numbers = {name: float(data[name]) for name in ("worst_ratio", "rms_ratio", "largest_z", "bias_t")}
    worst: Mapping[str, Any] | None = data["worst"]
    element = None
    if worst is not None:
        element = Element(
            index=tuple(worst["index"]),
            got=float(worst["got"]),
            expected=float(worst["expected"]),
            got_hex=worst["got_hex"],
            expected_hex=worst["expected_hex"],
        )
    return Measurement(
        output=data["output"],
        elements=data["elements"],
        broken=tuple(data["broken"]),
        worst=element,
        **numbers,
    )


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities: spell them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
