"""Runs scores in several processes, and continues a run from the scores that a file holds already."""

import json
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from attest.conformance.drawing.tables import leave_out
from attest.conformance.files import write_text
from attest.conformance.mutants import clean_score, judge_score, package_score
from attest.conformance.mutants.catalogue import GROUPS, Mutant, digest, load, of_class
from attest.conformance.mutants.not_here import NotHereError
from attest.conformance.mutants.rivals import RivalJudge, RivalScore
from attest.conformance.mutants.verdict import Score
from attest.conformance.process.limits import limits
from attest.conformance.process.settings import WorkerError
from attest.conformance.process.workers import Job, Workers, perform
from attest.conformance.typed import convert, decode

# The environment of processes that have one core each: threads of libraries would fight for it. Measured on
# two busy cores, NumPy was ten times slower with them.
SINGLE_THREADED = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


# Into so many parts the defects are divided for the rules of others, where the number of workers may change.
_SHARES = 64


@dataclass(frozen=True)
class Scores:
    """The scores of a run.

    catalogue: the hash of each group. skipped: mutants that cannot run here, with the reason. ablated: the
    class whose cases were left out; empty if none were.
    """

    catalogue: dict[str, str]
    scores: tuple[Score, ...]
    skipped: dict[str, str]
    ablated: str = ""

    def to_json(self) -> str:
        """Return the scores as JSON, in an order that does not depend on which was ready first."""
        ordered = sorted(self.scores, key=lambda score: (score.group, score.name, score.profile, score.seed))
        return json.dumps(asdict(replace(self, scores=tuple(ordered))), indent=1) + "\n"


def scores_from_json(data: bytes, where: str) -> Scores:
    """Read scores. Raises ValueError that begins with `where`."""
    return convert(decode(data, dict[str, Any], where), Scores, where)


def score_all(
    mutants: Sequence[Mutant],
    profiles: Sequence[str],
    seeds: Sequence[int],
    workers: Workers,
    path: Path | None,
    found_one: Callable[[Score, int, int], None],
    ablated: str = "",
) -> Scores:
    """Return the scores of mutants with every profile and seed; those that a file has are not made again.

    workers: processes, or those of a cluster. path: is written after each score. found_one: called after
    each, with the number of scores and of all. ablated: the class of defects whose cases are left out, if
    any. Raises ValueError if the file is of another catalogue, or if other cases were left out.
    """
    catalogue = {mutant.group: digest(mutant.group) for mutant in mutants}
    scores, skipped = _before(path, ablated), dict[str, str]()
    catalogue |= {score.group: digest(score.group) for score in scores}
    done = {(score.name, score.profile, score.seed) for score in scores}
    wanted = [
        (mutant, profile, seed)
        for profile in profiles
        for seed in seeds
        for mutant in mutants
        if not mutant.test
    ]
    wanted += [(mutant, judge_score.PROFILE, judge_score.SEED) for mutant in mutants if mutant.test]
    jobs = [job for job in wanted if (job[0].name, *job[1:]) not in done]
    for name, score in _performed(_score, jobs, workers, of_class(ablated) if ablated else frozenset()):
        if isinstance(score, str):
            skipped[name] = score
        else:
            scores.append(score)
            found_one(score, len(scores), len(done) + len(jobs))
        if path is not None:
            write_text(path, Scores(catalogue, tuple(scores), skipped, ablated).to_json())
    return Scores(catalogue, tuple(scores), skipped, ablated)


def _before(path: Path | None, ablated: str) -> list[Score]:
    """Return the scores that a file holds already; none if there is no file."""
    if path is None or not path.exists():
        return []
    old = scores_from_json(path.read_bytes(), str(path))
    if old.ablated != ablated:
        was, now = _without(old.ablated), _without(ablated)
        raise ValueError(f"{path}: its scores are {was}, these are {now}: name another file")
    for group, was in old.catalogue.items():
        now = digest(group) if group in GROUPS else "gone"
        if was != now:
            raise ValueError(
                f"{path}: its scores are of the group {group} as {was}, which is {now} here:"
                " name another file"
            )
    return [*old.scores]


def _without(ablated: str) -> str:
    return f"without the cases made for {ablated}" if ablated else "of all cases"


def rival_scores(mutants: Sequence[Mutant], profile: str, seed: int, workers: Workers) -> list[RivalScore]:
    """Judge the mutants of the clean kernel by the rules of other test suites."""
    nulls = [(null, profile, seed) for null in load("nulls").values()]
    closest = [*_performed(_closest, nulls, workers)]
    thresholds = {dtype: max(each[dtype] for each in closest) for dtype in closest[0]}
    clean = [each for each in mutants if not (each.subject or each.test or each.compiled)]
    # Those of a share have the exact answers in common.
    count = workers if isinstance(workers, int) else _SHARES
    shares = [clean[number::count] for number in range(count)]
    jobs = [(share, profile, seed, thresholds) for share in shares if share]
    return [score for found in _performed(_rivals, jobs, workers) for score in found]


def _performed[Work, Done](
    work: Callable[[Work], Done],
    jobs: Sequence[Work],
    workers: Workers,
    left_out: frozenset[str] = frozenset(),
) -> Iterator[Done]:
    """Yield work(job) of every job, as they come. left_out: defects for which no case is drawn.

    Raises WorkerError if a job has no value on a cluster, and LostError.
    """
    if not isinstance(workers, int):
        calls = [Job("", _called, (work, job, left_out)) for job in jobs]
        with closing(perform(calls, {}, workers, limits()["mutant_seconds"])) as outcomes:
            for outcome in outcomes:
                if outcome.fault:
                    raise WorkerError(f"a worker of the cluster: {outcome.fault}")
                yield outcome.value
        return
    with (
        single_threaded(),
        multiprocessing.get_context("spawn").Pool(workers, leave_out, (left_out,)) as pool,
    ):
        yield from pool.imap_unordered(work, jobs)


@contextmanager
def single_threaded() -> Generator[None]:
    """Let processes that are started in the block have one thread each; settings of the user are kept."""
    # Of processes alone: NumPy reads how many threads it may use when it is first imported.
    before = dict(os.environ)
    os.environ.update({name: os.environ.get(name, value) for name, value in SINGLE_THREADED.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _called[Work, Done](_subject: None, call: tuple[Callable[[Work], Done], Work, frozenset[str]]) -> Done:
    work, job, left_out = call
    leave_out(left_out)
    return work(job)


def _score(job: tuple[Mutant, str, int]) -> tuple[str, Score | str]:
    """Return the name of a mutant and its score, or why it cannot run here."""
    mutant, profile, seed = job
    try:
        if mutant.test:
            return mutant.name, judge_score.scored(mutant)
        if mutant.subject:
            return mutant.name, package_score.scored(mutant, profile, seed)
    except NotHereError as error:
        return mutant.name, str(error)
    return mutant.name, clean_score.scored(_judge(), mutant, profile, seed, _kills())


def _closest(job: tuple[Mutant, str, int]) -> dict[str, float]:
    null, profile, seed = job
    return RivalJudge(profile, seed, {}).closest(null)


def _rivals(job: tuple[Sequence[Mutant], str, int, Mapping[str, float]]) -> list[RivalScore]:
    mutants, profile, seed, thresholds = job
    judge = RivalJudge(profile, seed, thresholds)
    return [score for mutant in mutants if (score := judge.score(mutant)) is not None]


@cache
def _judge() -> clean_score.Judge:
    return clean_score.Judge()


@cache
def _kills() -> clean_score.Kills:
    return clean_score.read_kills()
