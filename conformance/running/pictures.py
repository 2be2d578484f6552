"""Pictures of the simplest failing cases, which need the kernel and so are drawn while the run has it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from attest.conformance.cases.case import Case
from attest.conformance.judging.execute import SubjectError
from attest.conformance.judging.picture import TooLateError, draw
from attest.conformance.judging.trial import Trial
from attest.conformance.process.limits import limits
from attest.conformance.process.workers import Job, Workers, perform
from attest.conformance.record import ACCURACY, Picture, Result, Verdict
from attest.conformance.running.progress import Meter, call_in_words
from attest.conformance.subject import Subject


def with_pictures(
    results: Sequence[Result],
    subjects: Mapping[str, Subject],
    workers: Workers,
    meter: Meter | None = None,
) -> list[Result]:
    """Return the results, the simplest failures with a picture of what is wrong.

    Each case is drawn once. A case that is large, hangs or whose process dies has no picture. meter: of the
    run, after whose time no drawing begins.
    """
    wanted = {(r.subject, r.case): None for r in results if _is_shown(r)}
    jobs = [Job(name, _draw, case) for name, case in wanted]
    drawn = dict(_drawn(jobs, subjects, workers, meter or Meter())) if jobs else {}
    return [replace(r, picture=drawn.get((r.subject, r.case))) if _is_shown(r) else r for r in results]


def _is_shown(result: Result) -> bool:
    """Return whether a result is a simplest failure of an output, which a card shows."""
    return result.minimal and result.verdict is Verdict.FAIL and result.check in ACCURACY and not result.phase


def _drawn(
    jobs: Sequence[Job], subjects: Mapping[str, Subject], workers: Workers, meter: Meter
) -> Iterator[tuple[tuple[str, Case], Picture]]:
    meter.begin("drawing pictures", len(jobs), limits()["pictures_seconds"])

    def wanted(_job: Job) -> bool:
        return meter.stage_seconds_left > 0

    def watch(call: Job, seconds: float) -> None:
        meter.run(call_in_words(call.subject, call.argument), seconds)

    with closing(perform(jobs, subjects, workers, limits()["picture_seconds"], wanted, watch)) as outcomes:
        for outcome in outcomes:
            meter.finish()
            if outcome.value is not None:
                yield (outcome.job.subject, outcome.job.argument), outcome.value


def _draw(subject: Subject, case: Case) -> Picture | None:
    """Return the picture of a case; None if it is too large, the kernel raises, or nothing is wrong in it."""
    calls = 2 * -(-case.kv_len // case.value_width)
    if calls > limits()["picture_calls"]:
        return None
    ends = time.monotonic() + limits()["picture_seconds"] / 2
    try:
        shown = draw(Trial(subject, case), lambda: time.monotonic() < ends)
    except (SubjectError, TooLateError):
        return None
    return shown if shown.differ or shown.wrong_weights else None
