"""The runner: judges every task of a run, keeps the results and shrinks the failures."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.checks import all_checks
from attest.conformance.judging.picture import picture
from attest.conformance.judging.trial import Trial
from attest.conformance.process.limits import limits
from attest.conformance.process.phases import phase
from attest.conformance.process.settings import LostError
from attest.conformance.process.signals import Interrupted, interruptible
from attest.conformance.process.workers import Job, Outcome, Workers, perform
from attest.conformance.record import (
    ACCURACY,
    Result,
    RunRecord,
    Verdict,
    settled,
    to_shrink,
    with_problems,
)
from attest.conformance.running.choice import Draw, chosen, first_try
from attest.conformance.running.expectations import Expectation, expect
from attest.conformance.running.fit import RequestError, left_out, refuse_unfit
from attest.conformance.running.judge import judge
from attest.conformance.running.pictures import with_pictures
from attest.conformance.running.plan import Profile, Restriction, Task, tasks
from attest.conformance.running.progress import Meter, Watch, call_in_words
from attest.conformance.running.results import died, late, late_search, lost, new_minimal, simplest
from attest.conformance.running.resume import Before, call_key
from attest.conformance.running.shrink import Failure, shrink
from attest.conformance.subject import Subject
from attest.conformance.text import describe, plural


@dataclass(frozen=True)
class Request:
    """The request of a run.

    subjects: by the name or `module:attribute` that finds each in another process.
    only: the restriction of the run; narrowed: the same as typed, for the record. shard: (number, total).
    workers: processes, 0 to stay in this one, or those of a cluster. timeout: seconds for one task.
    fail_fast: end at the first red verdict. shrink: search a simpler case for what fails.
    budget: seconds after which nothing more begins. before: what an earlier part of the run has judged.
    environment: for the record.
    """

    subjects: Mapping[str, Subject]
    profile: Profile
    seed: int = 0
    only: Restriction = field(default_factory=Restriction)
    narrowed: str = ""
    shard: tuple[int, int] = (1, 1)
    workers: Workers = 0
    timeout: float = field(default_factory=lambda: limits()["task_seconds"])
    fail_fast: bool = False
    shrink: bool = True
    budget: float = float("inf")
    expectations: Sequence[Expectation] = ()
    before: Before = field(default_factory=Before)
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])


_FEW = 3  # names of one family that are listed one by one

Planned = tuple[Draw, tuple[str, ...]]  # a case as it is drawn, and the checks that judge it
# Gets the results of one call, and its key; "" for a search for a simpler case.
Keep = Callable[[Sequence[Result], str], None]


def run(
    request: Request,
    watch: Watch = lambda _progress: None,
    keep: Keep = lambda _results, _key: None,
) -> RunRecord:
    """Judge a request. A run that is interrupted, or loses its cluster, returns a partial record.

    keep: called with results as soon as they are found; not with those of an earlier part of the run. Raises
    RequestError, before any result, if no case fits the restriction; WorkerError; and what `keep` raises.
    """
    for subject in request.subjects.values():
        refuse_unfit(subject, request.profile, request.only)
    found = _Found(request, watch, keep)
    try:
        with interruptible():
            if _judge_all(found):
                _shrink_failures(found)
                found.results = with_pictures(found.results, request.subjects, request.workers, found.meter)
    except Interrupted:
        return found.record(f"interrupted, {found.meter.place}")
    except LostError as error:
        return found.record(f"{error}, {found.meter.place}")
    return found.record(found.note)


def empty_record(request: Request) -> RunRecord:
    """Return the record of a run that has found nothing yet."""
    return RunRecord(
        profile=request.profile.name,
        seed=request.seed,
        shard=request.shard,
        complete=False,
        narrowed=request.narrowed,
        environment=request.environment,
    )


def replay(request: Request, case: Case, checks: Sequence[str]) -> list[Result]:
    """Judge one given case of each subject. Raises WorkerError and Interrupted."""
    outcomes = _of_each_subject(request, _judge, (case, tuple(checks)))
    return [result for outcome in outcomes for result in _results(request, outcome)]


def drawn_picture(request: Request, case: Case) -> str:
    """Return a picture of the keys that the subject of a request sees in a case, or why there is none."""
    outcomes = _of_each_subject(request, _draw, case)
    return "\n".join(outcome.value or f"no picture: {outcome.fault}" for outcome in outcomes)


def _of_each_subject(request: Request, work: Callable[[Any, Any], Any], argument: object) -> list[Outcome]:
    """Return the outcome of one call for each subject of a request. Raises WorkerError and Interrupted."""
    jobs = [Job(name, work, argument) for name in request.subjects]
    with (
        interruptible(),
        closing(perform(jobs, request.subjects, request.workers, request.timeout)) as outcomes,
    ):
        return list(outcomes)


def _draw(subject: Subject, case: Case) -> str:
    return picture(Trial(subject, case))


def in_shard(name: str, task: Task, shard: tuple[int, int]) -> bool:
    """Return whether a task belongs to a shard, which depends only on the content of the task."""
    number, count = shard
    case = first_try(task.draw)
    content = " ".join((name, case.id if case else "", *task.checks))
    return int(hashlib.sha256(content.encode()).hexdigest(), 16) % count == number - 1


class _Found:
    """The findings of a run so far."""

    def __init__(self, request: Request, watch: Watch, keep: Keep) -> None:
        self.request = request
        self.results = [result for call in request.before.calls for result in call.results]
        self.problems: list[str] = []
        self.left_out: list[str] = []
        self.note = ""
        self.meter = Meter(request.budget, watch)
        self.meter.red = sum(result.verdict.red for result in self.results)
        self._keep = keep
        self._shown: tuple[Job | None, str] = (None, "")

    def record(self, note: str) -> RunRecord:
        record = replace(
            empty_record(self.request),
            results=settled(self.results),
            complete=not note,
            note=note,
            left_out=tuple(sorted(self.left_out)),
            seconds=self.meter.seconds,
        )
        return with_problems(record, self.problems)

    def show(self, call: Job, seconds: float) -> None:
        """Report the call that has run longest."""
        if self._shown[0] is not call:
            first = call.argument[0]
            case = first[0].result.case if isinstance(first, tuple) else first_try(first)
            self._shown = call, call_in_words(call.subject, case)
        self.meter.run(self._shown[1], seconds)

    def take(self, results: Sequence[Result], key: str = "") -> None:
        """Keep the results of one call. key: of the call, if it is of the plan."""
        self.results.extend(results)
        self._keep(results, key)
        self.meter.red += sum(result.verdict.red for result in results)

    def add(self, results: Sequence[Result], key: str = "") -> None:
        """Keep the results of one call, and report the progress."""
        self.take(results, key)
        self.meter.finish()


def _judge_all(found: _Found) -> bool:
    """Judge every task; False if the run stopped at its first failing verdict, or after its budget."""
    request = found.request
    faults: Counter[str] = Counter()
    allowed = limits()["faults_per_subject"]
    left: list[Job] = []

    def wanted(job: Job) -> bool:
        if not found.meter.seconds_left:
            left.extend(job.calls)
            return False
        if faults[job.subject] < allowed:
            return True
        found.meter.plan(-len(job.calls))
        return False

    outcomes = perform(
        _judge_jobs(found), request.subjects, request.workers, request.timeout, wanted, found.show
    )
    with closing(outcomes):
        for outcome in outcomes:
            faults[outcome.job.subject] += bool(outcome.fault)
            found.add(_results(request, outcome), call_key(outcome.job.subject, *outcome.job.argument))
            if request.fail_fast and found.meter.red:
                found.note = f"stopped at the first failing verdict, {found.meter.place}"
                return False
    for name in sorted(name for name, count in faults.items() if count >= allowed):
        found.problems.append(
            f"{name}: hung or died {faults[name]} times, so its remaining tasks were skipped"
        )
    if left:
        found.note = f"stopped after its {request.budget:g} seconds: {_unjudged(found.results, left)}"
    return not left


def _unjudged(results: Sequence[Result], left: Sequence[Job]) -> str:
    """Return how many cases were not judged, and what was judged in none: subjects, features and checks."""
    cases = {(result.subject, result.case.id) for result in results}
    words = [f"{len(left)} of {plural(len(left) + len(cases), 'case')} not judged"]
    drawn = [(job.subject, first_try(draw), checks) for job in left for draw, checks in (job.argument,)]
    missing = {
        "subject": {name for name, _, _ in drawn} - {result.subject for result in results},
        "feature": {feature for _, case, _ in drawn if case is not None for feature in case.features}
        - {feature for result in results for feature in result.case.features},
        "check": {check for _, _, checks in drawn for check in checks} - {r.check for r in results},
    }
    for noun, names in missing.items():
        if names:
            words.append(f"no case judged of the {plural(len(names), noun)} {', '.join(_in_families(names))}")
    return "; ".join(words)


def _in_families(names: Iterable[str]) -> list[str]:
    """Return names in order; more than a few of one family, such as refusal.mask_shape, as their number."""
    families: dict[str, list[str]] = {}
    for name in sorted(names):
        families.setdefault(name.partition(".")[0], []).append(name)
    return [
        shown
        for family, of_family in families.items()
        for shown in (of_family if len(of_family) <= _FEW else [f"{len(of_family)} of {family}.*"])
    ]


def _results(request: Request, outcome: Outcome) -> list[Result]:
    """Return results with the name that finds the subject again; its own name may be another one."""
    name = outcome.job.subject
    results = _blamed(outcome, request.subjects[name]) if outcome.fault else outcome.value
    return [expect(replace(result, subject=name), request.expectations) for result in results]


def _judge_jobs(found: _Found) -> Iterator[Job]:
    request = found.request
    judged = request.before.keys
    for name, subject in request.subjects.items():
        planned = tasks(subject, request.profile, request.seed, request.only)
        found.left_out += _left_out(request, name, subject)
        while (task := _next(found, name, planned)) is not None:
            if in_shard(name, task, request.shard):
                draws = [draw for draw in task.draws if not judged or call_key(name, *draw) not in judged]
                found.meter.plan(len(draws))
                if draws:
                    yield Job(name, _judge, draws[0], tuple(draws[1:]))
    found.meter.all_planned()


def _left_out(request: Request, name: str, subject: Subject) -> tuple[str, ...]:
    """Return what a subject is not asked for; nothing if its declarations raise, which drawing reports."""
    try:
        return left_out(subject, name, request.profile, request.only)
    except Interrupted:
        raise
    except BaseException:
        return ()


def _next(found: _Found, name: str, planned: Iterator[Task]) -> Task | None:
    """Return the next task of a subject, None after the last. Its declarations are code and may raise."""
    try:
        return next(planned, None)
    except Interrupted:
        raise
    except ValueError as error:
        if found.request.only != Restriction():
            raise RequestError(str(error)) from error
        reason = describe(error)
    except BaseException as error:
        reason = describe(error)
    found.problems.append(f"cannot draw cases for {name}: {reason}")
    return None


def _judge(subject: Subject, planned: Planned) -> list[Result]:
    draw, checks = planned
    with phase("drawing"):
        case = chosen(draw)
    return [] if case is None else judge(subject, case, checks)


def _blamed(outcome: Outcome, subject: Subject) -> list[Result]:
    """Return the results of a case that was cut short."""
    planned: Planned = outcome.job.argument
    draw, checks = planned
    case = chosen(draw)
    if case is None:
        return []
    if outcome.lost:
        return lost(subject, checks, case, outcome.fault)
    if outcome.timed_out:
        return late(subject, checks, case, outcome.fault, outcome.phase, outcome.check)
    return died(subject, checks, case, outcome.fault, outcome.phase)


def _shrink_failures(found: _Found) -> None:
    """Find the simplest failing case of each check of each subject; cases that hung or died are kept.

    Failures that begin with one case are searched together, since they share its simpler cases. The searches
    of a subject run one after the other, accuracy first: each tries the cases that those before it found.
    """
    request = found.request
    chosen = to_shrink(found.results)
    together: dict[str, dict[str, list[Failure]]] = {}
    for (name, check, semantic), result in sorted(
        chosen.items(), key=lambda item: item[0][1] not in ACCURACY
    ):
        stays = not semantic and (name, check, True) in chosen
        if all_checks()[check].kind.listed:
            found.take([simplest(result, result)])
        else:
            of_subject = together.setdefault(name, {})
            of_subject.setdefault(result.case.id, []).append(Failure(result, stays))
    if not together or not request.shrink:
        return
    searches = {name: [*of_subject.values()] for name, of_subject in together.items()}
    found.meter.begin("shrinking", sum(map(len, searches.values())), limits()["searches_seconds"])
    simple: dict[str, list[Result]] = {name: [] for name in searches}
    for turn in range(max(map(len, searches.values()))):
        jobs = [
            Job(name, _shrink, (tuple(groups[turn]), request.profile.shrink_evaluations, tuple(simple[name])))
            for name, groups in searches.items()
            if turn < len(groups)
        ]
        for name, results in _search_all(found, jobs):
            simple[name] += [each for each in results if each.verdict is Verdict.FAIL]


def _search_all(found: _Found, jobs: Sequence[Job]) -> Iterator[tuple[str, list[Result]]]:
    """Run searches; keep what they find, and yield it with the name of the subject."""
    request = found.request

    def wanted(_job: Job) -> bool:
        return found.meter.stage_seconds_left > 0

    outcomes = perform(
        jobs, request.subjects, request.workers, limits()["shrink_seconds"], wanted, found.show
    )
    with closing(outcomes):
        for outcome in outcomes:
            results = _shrunk(request, outcome)
            found.add(results)
            yield outcome.job.subject, results


def _shrunk(request: Request, outcome: Outcome) -> list[Result]:
    """Return the simplest failing cases of a search that are new failures; a TIMEOUT if the search hung."""
    failures: tuple[Failure, ...] = outcome.job.argument[0]
    if outcome.timed_out:
        return [late_search(failures[0].result, outcome.fault)]
    if outcome.fault:
        return []
    # All of them begin with one case.
    found = (new_minimal(failures[0].result, minimal, request.expectations) for minimal in outcome.value)
    return [each for each in found if each is not None]


def _shrink(subject: Subject, argument: tuple[tuple[Failure, ...], int, tuple[Result, ...]]) -> list[Result]:
    failures, evaluations, simple = argument
    return shrink(subject, failures, evaluations, limits()["search_seconds"], simple)
