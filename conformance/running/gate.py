"""The gate: the subjects that it runs, and the rules that a whole run must keep."""

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from attest.conformance.process.signals import Interrupted
from attest.conformance.record import RunRecord, Verdict, with_problems
from attest.conformance.running.expectations import Expectation, Matches
from attest.conformance.subject import Subject, discover, find
from attest.conformance.text import describe


@dataclass(frozen=True)
class RunnableSubjects:
    """The subjects of a gate.

    subjects: those that this machine can run, by name. skipped: the others, with the reason.
    broken: a sentence for each installed subject that cannot be loaded.
    """

    subjects: Mapping[str, Subject] = field(default_factory=dict[str, Subject])
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    broken: tuple[str, ...] = ()


def runnable_subjects(backend: str, patterns: Sequence[str] = ()) -> RunnableSubjects:
    """Return every installed subject, divided by whether this process can run it on a backend.

    patterns: of names, such as "operation.*"; without one, all subjects are meant. Raises LookupError for a
    pattern that no name matches.
    """
    subjects: dict[str, Subject] = {}
    skipped: dict[str, str] = {}
    broken: list[str] = []
    for name in _named(sorted(discover()), patterns):
        try:
            subject = find(name)
            reason = why_not_here(subject, backend)
        except LookupError as error:
            broken.append(str(error.args[0]))
            continue
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            broken.append(f"subject {name!r} cannot be loaded: its module raised {describe(error)}")
            continue
        if reason is None:
            subjects[name] = subject
        else:
            skipped[name] = reason
    return RunnableSubjects(subjects, skipped, tuple(broken))


def _named(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches; all of them without one."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LookupError(
                f"--subject: got {pattern!r}, expected names of `attest list`, or patterns of some"
            )
    return [name for name in names if not patterns or any(fnmatchcase(name, x) for x in patterns)]


def why_not_here(subject: Subject, backend: str) -> str | None:
    """Return why a subject cannot run in this process, in one clause; None if it can.

    Raises LookupError with one sentence if the subject raises.
    """
    try:
        return subject.why_not_here(backend)
    except Interrupted:
        raise
    except BaseException as error:
        raise LookupError(
            f"subject {subject.name!r} raised {describe(error)}, while checking whether it can run here"
        ) from error


def with_policy(record: RunRecord, expectations: Sequence[Expectation]) -> RunRecord:
    """Return the record with the problems that only a whole run can have.

    A run that was cut short or narrowed, or is one shard of several, is left as it is.
    """
    if not record.whole:
        return record
    matches = Matches(expectations)
    verdicts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
    for result in record.results:
        matches.add(result)
        verdicts[result.subject][result.verdict] += 1
    return with_problems(record, policy_problems(record.profile, matches, verdicts))


def policy_problems(
    profile: str, matches: Matches, verdicts: Mapping[str, Mapping[Verdict, int]]
) -> tuple[str, ...]:
    """Return the problems of a whole run.

    matches: of its results. verdicts: the number of results of each verdict of each subject.
    """
    return (*matches.stale(profile), *_untested(verdicts))


@cache
def _inconclusive_share() -> float:
    return tomllib.loads(Path(__file__).with_name("gate.toml").read_text())["inconclusive_share"]


def _untested(verdicts: Mapping[str, Mapping[Verdict, int]]) -> Iterable[str]:
    """Yield a sentence for each subject without a PASS or with too many INCONCLUSIVE verdicts."""
    for name, counts in sorted(verdicts.items()):
        if not counts.get(Verdict.PASS):
            yield f"{name}: no check passed, so nothing was tested"
        blind, every = counts.get(Verdict.INCONCLUSIVE, 0), sum(counts.values())
        if blind > _inconclusive_share() * every:
            yield f"{name}: {blind} of {every} verdicts are INCONCLUSIVE, more than the gate allows"
