"""JSON of a comparison, for programs: regressions, causes, changed verdicts and the numbers of both runs."""

import json
import math
from typing import Any

from attest.conformance.records.counted import CountedRun
from attest.conformance.text import printable
from attest.reports.comparison import Comparison
from attest.reports.failures import NewCause
from attest.reports.pairing import Fate, Pair
from attest.reports.rows import Row
from attest.reports.spread import STATISTICS, Spread
from attest.reports.summary import options_of

SCHEMA = "attest.comparison/1"


def render_json(comparison: Comparison) -> str:
    """Return the comparison as JSON; numbers that are not finite are the texts "inf" and "nan"."""
    data = {
        "schema": SCHEMA,
        "headline": comparison.headline,
        "regressed": comparison.regressed,
        "regressions": [{"where": r.where, "what": r.what} for r in comparison.regressions],
        "causes": [_cause(found) for found in comparison.new_causes],
        "notes": list(comparison.notes),
        "base": _side(comparison.base),
        "head": _side(comparison.head),
        "verdicts": [_verdict(pair) for pair in comparison.pairs if pair.fate is not Fate.SAME],
        "numbers": [_numbers(row) for row in comparison.rows],
    }
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _side(side: CountedRun) -> dict[str, Any]:
    return {"status": side.status, "options": printable(options_of(side.run)), "counts": side.counts}


def _cause(found: NewCause) -> dict[str, Any]:
    parts, cause = found.card.parts, found.card.cause
    return {
        "id": found.card.id,
        "subject": printable(cause.subject),
        "headline": printable(parts.headline),
        "failures": len(cause.results),
        "new": found.new,
        "outputs": dict(cause.outputs),
        "stage": cause.stage,
        "counts": printable(parts.counts),
        "clauses": list(parts.clauses),
        "replay": printable(parts.replay),
        "numbers": [
            {
                "output": row.output,
                "wrong": row.wrong,
                "worst_ratio": [_finite(value) for value in row.worst_ratio],
                "rms_ratio": [_finite(value) for value in row.rms_ratio],
            }
            for row in found.numbers
        ],
    }


def _verdict(pair: Pair) -> dict[str, Any]:
    subject, check, case = pair.key
    return {
        "subject": subject,
        "check": check,
        "case": case,
        "fate": pair.fate.value,
        "base": pair.base.verdict.value if pair.base else None,
        "head": pair.head.verdict.value if pair.head else None,
        "message": printable(pair.result.message),
    }


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "subject": row.subject,
        "check": row.check,
        "dtype": row.dtype,
        "feature": row.feature,
        "output": row.output,
        "scope": row.scope,
        "worse": list(row.worse),
        "better": list(row.better),
        "base": _spread(row.base),
        "head": _spread(row.head),
    }


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {"results": spread.results, **{name: _finite(getattr(spread, name)) for name in STATISTICS}}


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
