"""Whether a run passes: which subjects it must hold, and what fails it beyond single verdicts."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from conformance.expectations import Expectation, stale
from conformance.record import RunRecord, Verdict
from conformance.subject import Subject, discover, find


@dataclass(frozen=True)
class Entrants:
    """The subjects of a gate.

    subjects: those that this machine can run, by name. skipped: the others, with the reason.
    broken: a sentence for each that is installed and cannot be loaded.
    """

    subjects: Mapping[str, Subject] = field(default_factory=dict[str, Subject])
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    broken: tuple[str, ...] = ()


def entrants(backend: str) -> Entrants:
    """Every subject that can be found, sorted by whether this process can run it, on a backend of JAX."""
    subjects: dict[str, Subject] = {}
    skipped: dict[str, str] = {}
    broken: list[str] = []
    for name in sorted(discover()):
        try:
            subject = find(name)
        except LookupError as error:
            broken.append(str(error))
            continue
        reason = subject.why_not_here(backend)
        if reason is None:
            subjects[name] = subject
        else:
            skipped[name] = reason
    return Entrants(subjects, skipped, tuple(broken))


def with_policy(record: RunRecord, expectations: Sequence[Expectation]) -> RunRecord:
    """The record with the problems that only a whole run can have.

    A run that was cut short or narrowed, or is one shard of several, is left as it is.
    """
    if not record.complete or record.narrowed or record.shard != (1, 1):
        return record
    problems = {*record.problems, *stale(record, expectations), *_untested(record)}
    return replace(record, problems=tuple(sorted(problems)))


@cache
def _inconclusive_share() -> float:
    return tomllib.loads(Path(__file__).with_name("gate.toml").read_text())["inconclusive_share"]


def _untested(record: RunRecord) -> Iterable[str]:
    """Subjects of which the run can say nothing good: no PASS at all, or too many cases that cannot tell."""
    for name in sorted({result.subject for result in record.results}):
        verdicts = [result.verdict for result in record.results if result.subject == name]
        if Verdict.PASS not in verdicts:
            yield f"{name}: not a single check passed, so nothing was tested"
        blind = verdicts.count(Verdict.INCONCLUSIVE)
        if blind > _inconclusive_share() * len(verdicts):
            yield f"{name}: {blind} of {len(verdicts)} verdicts are INCONCLUSIVE, more than the gate allows"
