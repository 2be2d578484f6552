"""What a run finds: poses every task to its subject, keeps what comes back, and shrinks the failures.

Nothing that was found is lost: the record is saved while the run goes on, and says that it is partial
until the run has ended.
"""

import hashlib
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from conformance.case import Case
from conformance.checks import all_checks
from conformance.execute import describe
from conformance.expectations import Expectation, expect
from conformance.judge import judge
from conformance.plan import Profile, Restriction, Task, tasks
from conformance.record import Result, RunRecord, Verdict
from conformance.shrink import shrink
from conformance.subject import Subject
from conformance.trial import Trial
from conformance.workers import Job, Outcome, perform

# The kinds of check whose cases are listed: a smaller one would be another question.
_LISTED = ("refused", "production")


class RequestError(Exception):
    """What was asked cannot be done; the message is one sentence."""


@cache
def limits() -> Mapping[str, float]:
    """The waiting times of conformance/runner.toml."""
    return tomllib.loads(Path(__file__).with_name("runner.toml").read_text())


@dataclass(frozen=True)
class Request:
    """What a run is asked.

    subjects: by the name or `module:attribute` that finds each in another process.
    only: what narrows the run; narrowed: the same as typed, for the record. shard: (number, of how many).
    workers: processes, 0 to stay in this one. timeout: seconds for one task.
    environment: for the record.
    """

    subjects: Mapping[str, Subject]
    profile: Profile
    seed: int = 0
    only: Restriction = field(default_factory=Restriction)
    narrowed: str = ""
    shard: tuple[int, int] = (1, 1)
    workers: int = 0
    timeout: float = field(default_factory=lambda: limits()["task_seconds"])
    expectations: Sequence[Expectation] = ()
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Progress:
    """Where a run is: its stage, the tasks done and known so far, and how many verdicts are red."""

    stage: str
    done: int
    total: int
    red: int


Watch = Callable[[Progress], None]
Save = Callable[[RunRecord], None]


def run(
    request: Request,
    watch: Watch = lambda _progress: None,
    save: Save = lambda _record: None,
) -> RunRecord:
    """Do what is asked. An interrupted run gives the partial record of what it had found.

    Raises RequestError, before anything is saved, if nothing fits what narrows the run; and WorkerError.
    """
    journal = _Journal(request, watch, save)
    try:
        _judge_all(journal)
        _shrink_failures(journal)
    except RequestError:
        raise
    except KeyboardInterrupt:
        note = f"interrupted, {journal.place}"
        journal.save(note)
        return journal.record(note)
    except BaseException as error:
        journal.save(f"the run itself failed, {journal.place}: {describe(error)}")
        raise
    return journal.record()


def replay(request: Request, case: Case, checks: Sequence[str]) -> list[Result]:
    """Judge one case of each subject, whatever the profile would draw. Raises WorkerError."""
    jobs = [
        Job(name, _judge, Task(subject.name, case, tuple(checks)))
        for name, subject in request.subjects.items()
    ]
    with closing(perform(jobs, request.subjects, request.workers, request.timeout)) as outcomes:
        return [result for outcome in outcomes for result in _results(request, outcome)]


def in_shard(name: str, task: Task, shard: tuple[int, int]) -> bool:
    """Whether a task belongs to a shard: by its content alone, so that no other task matters."""
    number, count = shard
    content = " ".join((name, task.case.id, *task.checks))
    return int(hashlib.sha256(content.encode()).hexdigest(), 16) % count == number - 1


class _Journal:
    """What a run has found so far, saved now and then."""

    def __init__(self, request: Request, watch: Watch, save: Save) -> None:
        self.request = request
        self.results: list[Result] = []
        self.problems: list[str] = []
        self.faulted: set[Result] = set()
        self.stage = "judging"
        self.done = self.total = self.red = 0
        self._watch, self._save = watch, save
        self._next_save = 0.0

    @property
    def place(self) -> str:
        return f"{self.stage}: {self.done} of at least {self.total} tasks done"

    def record(self, note: str = "") -> RunRecord:
        request = self.request
        return RunRecord(
            profile=request.profile.name,
            seed=request.seed,
            results=tuple(sorted(self.results, key=lambda result: result.sort_key)),
            shard=request.shard,
            complete=not note,
            note=note,
            problems=tuple(sorted(self.problems)),
            narrowed=request.narrowed,
            environment=request.environment,
        )

    def save(self, note: str) -> None:
        start = time.monotonic()
        self._save(self.record(note))
        end = time.monotonic()
        pause = max(limits()["save_seconds"], (end - start) / limits()["save_share"])
        self._next_save = end + pause

    def begin(self, stage: str) -> None:
        self.stage, self.done, self.total = stage, 0, 0

    def expected(self) -> None:
        self.total += 1
        self._tell()
        self._save_if_due()

    def add(self, results: Sequence[Result], faulted: bool = False) -> None:
        self.results.extend(results)
        self.red += sum(result.verdict.red for result in results)
        if faulted:
            self.faulted.update(results)

    def finished(self) -> None:
        self.done += 1
        self._tell()
        self._save_if_due()

    def _save_if_due(self) -> None:
        if time.monotonic() >= self._next_save:
            self.save(f"the run has not finished, {self.place}")

    def _tell(self) -> None:
        self._watch(Progress(self.stage, self.done, self.total, self.red))


def _judge_all(journal: _Journal) -> None:
    request = journal.request
    faults: Counter[str] = Counter()
    allowed = limits()["faults_per_subject"]

    def wanted(job: Job) -> bool:
        return faults[job.subject] < allowed

    outcomes = perform(_judge_jobs(journal), request.subjects, request.workers, request.timeout, wanted)
    with closing(outcomes):
        for outcome in outcomes:
            faults[outcome.job.subject] += bool(outcome.fault)
            journal.add(_results(request, outcome), faulted=bool(outcome.fault))
            journal.finished()
    for name in sorted(name for name, count in faults.items() if count >= allowed):
        journal.problems.append(
            f"{name}: hung or died {faults[name]} times, so the rest of its tasks was left out"
        )


def _results(request: Request, outcome: Outcome) -> list[Result]:
    """Named as the subject can be found again, which its own name may not do."""
    name = outcome.job.subject
    results = _blamed(outcome, request.subjects[name]) if outcome.fault else outcome.value
    return [expect(replace(result, subject=name), request.expectations) for result in results]


def _judge_jobs(journal: _Journal) -> Iterator[Job]:
    request = journal.request
    for name, subject in request.subjects.items():
        try:
            for task in tasks(subject, request.profile, request.seed, request.only):
                if in_shard(name, task, request.shard):
                    journal.expected()
                    yield Job(name, _judge, task)
        except ValueError as error:
            if request.only != Restriction():
                raise RequestError(str(error)) from error
            journal.problems.append(f"no cases can be drawn for {name}: {describe(error)}")
        except Exception as error:  # a subject's declarations are code, too
            journal.problems.append(f"no cases can be drawn for {name}: {describe(error)}")
    if journal.total == 0 and request.shard == (1, 1):
        journal.problems.append("nothing was judged: no case fits what was asked")


def _judge(subject: Subject, task: Task) -> list[Result]:
    return [result for case, checks in task.posed for result in judge(subject, case, checks)]


def _blamed(outcome: Outcome, subject: Subject) -> list[Result]:
    """Every check of a task that hung or died has failed: which of them it was, nobody can tell."""
    task: Task = outcome.job.argument
    return [
        Result(
            subject=subject.name,
            check=check,
            clauses=_clauses(subject, case, check),
            case=case,
            verdict=Verdict.FAIL,
            message=outcome.fault,
        )
        for case, checks in task.posed
        for check in checks
    ]


def _clauses(subject: Subject, case: Case, check: str) -> tuple[str, ...]:
    try:
        return all_checks()[check].clauses(Trial(subject, case))
    except Exception:  # it has been blamed already
        return ()


def _shrink_failures(journal: _Journal) -> None:
    """Find the simplest failing case of each check of each subject; what hung or died is left as it is."""
    chosen: dict[tuple[str, str], Result] = {}
    for result in sorted(journal.results, key=_simplicity):
        if result.verdict is Verdict.FAIL and result not in journal.faulted:
            chosen.setdefault((result.subject, result.check), result)
    if not chosen:
        return
    request = journal.request
    journal.begin("shrinking")
    evaluations = request.profile.shrink_evaluations
    jobs = [Job(result.subject, _shrink, (result, evaluations)) for _, result in sorted(chosen.items())]
    for _ in jobs:
        journal.expected()
    outcomes = perform(jobs, request.subjects, request.workers, limits()["shrink_seconds"])
    with closing(outcomes):
        for outcome in outcomes:
            original: Result = outcome.job.argument[0]
            if isinstance(outcome.value, Result):
                minimal = replace(outcome.value, subject=original.subject, minimal=True)
                # A simpler case of a known failure does not show what is new about this one.
                if expect(minimal, request.expectations).verdict is Verdict.FAIL:
                    if minimal.case == original.case:
                        journal.results.remove(original)
                        journal.red -= 1
                    journal.add([minimal])
            journal.finished()


def _shrink(subject: Subject, argument: tuple[Result, int]) -> Result:
    result, evaluations = argument
    if all_checks()[result.check].kind in _LISTED:
        return result
    return shrink(subject, result, evaluations)


def _simplicity(result: Result) -> tuple[int, int, str]:
    case = result.case
    return case.batch * (case.q_len + case.kv_len), len(case.features), case.id
