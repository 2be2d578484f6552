"""What a run of correct kernels found: counts, alarms, and the largest statistics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.record import Measurement, Result, Verdict
from attest.reference import judgements

# The statistics of a measurement, by their names in it.
STATISTICS = ("worst_ratio", "rms_ratio", "largest_z", "bias_t")


@dataclass
class Tally:
    """Counts that add up.

    counts: by (subject, check, verdict). lines: what is to be written, one object each. largest: by (dtype,
    output, family, statistic), the largest value with the subject and case that had it.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    largest: dict[tuple[str, str, str, str], tuple[float, str, str]] = field(
        default_factory=dict[tuple[str, str, str, str], tuple[float, str, str]]
    )

    def add(self, subject: str, result: Result, seed: int) -> None:
        """Count one result; what is neither PASS nor UNSUPPORTED gets a line."""
        self.counts[subject, result.check, str(result.verdict)] += 1
        for measurement in result.measurements:
            self._note(subject, result, measurement)
        if result.verdict in (Verdict.PASS, Verdict.UNSUPPORTED):
            return
        self.lines.append(
            {
                "kind": "result",
                "verdict": str(result.verdict),
                "subject": subject,
                "check": result.check,
                "seed": seed,
                "case": result.case.to_json(),
                "message": result.message,
                "measurements": [_measurement_json(m) for m in result.measurements],
            }
        )

    def cut_short(self, subjects: str, verdict: Verdict, message: str, case: Case | None, seed: int) -> None:
        """Count a call without results, such as one whose process died, as one of all its subjects."""
        self.counts[subjects, "", str(verdict)] += 1
        self.lines.append(
            {
                "kind": "cut short",
                "verdict": str(verdict),
                "subject": subjects,
                "seed": seed,
                "case": None if case is None else case.to_json(),
                "message": message,
            }
        )

    def _note(self, subject: str, result: Result, measurement: Measurement) -> None:
        case = result.case
        values = {name: abs(getattr(measurement, name)) for name in STATISTICS}
        limit = judgements.limits(
            measurement.output, measurement.elements, case.kv_len, case.dtype, case.family
        )
        values["z_of_limit"] = values["largest_z"] / limit.largest_z
        for name, value in values.items():
            key = (case.dtype, measurement.output, case.family, name)
            if key not in self.largest or value > self.largest[key][0]:
                self.largest[key] = (value, subject, case.id)

    def join(self, other: "Tally") -> None:
        """Add another tally to this one, its lines aside."""
        self.counts.update(other.counts)
        for key, value in other.largest.items():
            self.largest[key] = max(self.largest.get(key, value), value)

    @property
    def red(self) -> int:
        """Results that would fail a run."""
        return sum(n for (_, _, verdict), n in self.counts.items() if Verdict(verdict).red)

    def counts_json(self) -> dict[str, Any]:
        """Totals, and counts by subject and verdict."""
        by_subject: dict[str, Counter[str]] = {}
        for (subject, _, verdict), count in self.counts.items():
            by_subject.setdefault(subject, Counter())[verdict] += count
        return {
            "results": sum(self.counts.values()),
            "red": self.red,
            "by_subject": {name: dict(sorted(found.items())) for name, found in sorted(by_subject.items())},
        }

    def summary(self) -> dict[str, Any]:
        """Everything but the lines, as one JSON object."""
        by_check: Counter[str] = Counter()
        for (_, check, verdict), count in self.counts.items():
            by_check[f"{check} {verdict}"] += count
        largest = [
            dict(zip(("dtype", "output", "family", "statistic"), key, strict=True))
            | {"value": value, "subject": subject, "case": case}
            for key, (value, subject, case) in sorted(self.largest.items())
        ]
        return {
            "kind": "summary",
            **self.counts_json(),
            "by_check": dict(sorted(by_check.items())),
            "largest": largest,
        }


def _measurement_json(measurement: Measurement) -> dict[str, Any]:
    numbers = {name: getattr(measurement, name) for name in STATISTICS}
    return {
        "output": measurement.output,
        "elements": measurement.elements,
        "broken": list(measurement.broken),
    } | numbers
