"""The rows of a run in the tables of a store, but for its name and its day."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from attest.conformance.record import Measurement, Result
from attest.conformance.records.counted import CountedRun
from attest.conformance.records.lines import RecordLines
from attest.conformance.records.schema import ResultData, result_from_data
from attest.conformance.typed import decode


def row_of_run(lines: RecordLines) -> dict[str, Any]:
    """Return the row of a run."""
    counts = Counter(place.verdict for place, _ in lines.placed())
    of = CountedRun(lines.header, counts)
    run = lines.header
    here = run.environment
    versions = here.get("versions", {})
    number, count = run.shard
    return {
        "commit": here.get("commit", ""),
        "profile": run.profile,
        "seed": run.seed,
        "shard": f"{number}/{count}",
        "narrowed": run.narrowed,
        "complete": run.complete,
        "status": of.status,
        "results": of.results,
        "seconds": run.seconds,
        "device": here.get("device", ""),
        "backend": here.get("backend", ""),
        "python": here.get("python", ""),
        "jax": versions.get("jax", ""),
        "jaxlib": versions.get("jaxlib", ""),
        "environment": json.dumps(here, sort_keys=True),
    }


def rows_of_results(lines: RecordLines) -> Iterator[dict[str, Any]]:
    """Yield the row of each result of a run. Raises ValueError if the record is broken."""
    for number, line in enumerate(lines, start=1):
        where = f"{lines.where}: result {number}"
        yield _row(result_from_data(decode(line, ResultData, where), where))


def _row(result: Result) -> dict[str, Any]:
    return {
        "subject": result.subject,
        "check": result.check,
        "case_id": result.case.id,
        "dtype": result.case.dtype,
        "features": sorted(result.case.features),
        "verdict": result.verdict.value,
        "red": result.verdict.red,
        "minimal": result.minimal,
        "message": result.message,
        "clauses": list(result.clauses),
        "seconds": result.seconds,
        "case": json.dumps(result.case.to_json(), sort_keys=True),
        "measurements": [_measurement(each) for each in result.measurements],
    }


def _measurement(measurement: Measurement) -> dict[str, Any]:
    return {
        "output": measurement.output,
        "worst_ratio": _number(measurement.worst_ratio),
        "rms_ratio": _number(measurement.rms_ratio),
        "largest_z": _number(measurement.largest_z),
        "bias_t": _number(measurement.bias_t),
        "broken": list(measurement.broken),
        "wrong": measurement.wrong,
        "size": measurement.size,
    }


def _number(value: float) -> float | str:
    """Return a number as JSON has it; what is not finite as the word that DuckDB reads."""
    return value if math.isfinite(value) else str(value)
