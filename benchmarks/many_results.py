"""Records of as many results as a benchmark asks for, made from a baseline: its cases with other seeds."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from attest.conformance.cases.case import Case
from attest.conformance.record import Measurement, Result, RunRecord, Verdict
from attest.conformance.records.line_format import header_line, result_line
from attest.conformance.records.record_file import read_record

_BASELINE = Path(__file__).parents[1] / "reports/data/baselines/nvidia-h200/standard/pallas.mosaic_gpu.jsonl"
_SUBJECTS = 10
# How far a number of the run after a change is from that before, as a standard deviation of its logarithm.
_NOISE = 0.02
# Every so many results of the run after a change fail.
_FAILURE_EVERY = 20_000


@dataclass(frozen=True)
class Many:
    """Results that are made one check of a subject at a time.

    count: how many. seed: of the noise in their numbers. failing: whether some fail.
    """

    count: int
    seed: int
    failing: bool

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of a record, the header first."""
        baseline = read_record(_BASELINE)
        yield header_line(replace(baseline, results=()), self.count)
        noise = random.Random(self.seed)
        made = 0
        for results in self._checks(baseline):
            for result in results:
                made += 1
                failed = self.failing and made % _FAILURE_EVERY == 0
                yield result_line(_failed(result) if failed else _varied(result, noise))

    def _checks(self, baseline: RunRecord) -> Iterator[list[Result]]:
        """Yield the results of each check of each subject, in the order of a record."""
        by_check: defaultdict[str, list[Result]] = defaultdict(list)
        for result in baseline.results:
            by_check[result.check].append(result)
        copies = math.ceil(self.count / (_SUBJECTS * len(baseline.results)))
        left = self.count
        for number in range(_SUBJECTS):
            cases: dict[str, list[Case]] = {}
            for check in sorted(by_check):
                found: list[Result] = []
                for result in by_check[check]:
                    if result.case.id not in cases:
                        cases[result.case.id] = [
                            replace(result.case, seed=result.case.seed + (number * copies + copy) * 2**33)
                            for copy in range(copies)
                        ]
                    subject = f"synthetic.kernel_{number}"
                    found += [replace(result, subject=subject, case=case) for case in cases[result.case.id]]
                found = sorted(found[:left], key=lambda result: result.sort_key)
                left -= len(found)
                yield found


def _varied(result: Result, noise: random.Random) -> Result:
    measurements = tuple(_with_noise(each, noise) for each in result.measurements)
    return replace(result, measurements=measurements, seconds=round(noise.expovariate(10.0), 4))


def _with_noise(measurement: Measurement, noise: random.Random) -> Measurement:
    return replace(
        measurement,
        worst_ratio=measurement.worst_ratio * noise.lognormvariate(0.0, _NOISE),
        rms_ratio=measurement.rms_ratio * noise.lognormvariate(0.0, _NOISE),
        largest_z=measurement.largest_z * noise.lognormvariate(0.0, _NOISE),
        bias_t=measurement.bias_t * noise.lognormvariate(0.0, _NOISE),
    )


def _failed(result: Result) -> Result:
    measurements = tuple(
        replace(each, worst_ratio=40.0, broken=("bound",), wrong=3) for each in result.measurements
    )
    return replace(result, verdict=Verdict.FAIL, measurements=measurements, message="wrong numbers")
