"""Results and records of runs, by subject, check and case; `records/` reads and writes them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from attest.conformance.cases.case import Case
from attest.reference.oracle import GRADIENT_OUTPUTS, OUTPUTS

# The checks that compare one compiled call with the oracle. Those that do so under a transformation, on a
# mesh or in another way of calling fail with them.
ACCURACY = ("forward", "lse", "gradients")

_NOTHING_JUDGED = "nothing was judged: no case matches the options"


class Verdict(StrEnum):
    """The outcome of a check of a subject on a case."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"  # declared and properly refused
    INCONCLUSIVE = "INCONCLUSIVE"  # the case cannot tell right from wrong
    TIMEOUT = "TIMEOUT"  # did not finish in time; the message names the phase
    ERROR = "ERROR"  # the check could not be carried out
    XFAIL = "XFAIL"  # expected, with a reason
    XPASS = "XPASS"  # expected to fail, but did not

    @property
    def red(self) -> bool:
        """Whether one such verdict fails a run."""
        return self in (Verdict.FAIL, Verdict.TIMEOUT, Verdict.ERROR, Verdict.XPASS)


@dataclass(frozen=True)
class Element:
    """One element of an output: where it is, and what was got and expected, in decimal and in hex."""

    index: tuple[int, ...]
    got: float
    expected: float
    got_hex: str
    expected_hex: str


@dataclass(frozen=True)
class Measurement:
    """The distance of one output from the oracle: numbers only.

    output: out, lse, dquery, dkey, dvalue, dbias or dsoftmax_aux. elements: how many were judged.
    worst_ratio: the largest err / bound. rms_ratio: rms(err) / rms(std). largest_z: of err / std.
    bias_t: the signed statistic. broken: the judgements that failed: bound, rms, z, bias; and "semantics"
    where no loss of precision explains so large an error.
    worst: the element of the largest err / bound.
    wrong: how many of the `size` elements lie outside their bound. where: the places of these, one text an
        axis that has both right and wrong places, such as "query 14 of 34". fingerprints: what the wrong
        values have in common, such as "every value is one of bfloat16".
    """

    output: str
    elements: int
    worst_ratio: float
    rms_ratio: float
    largest_z: float
    bias_t: float
    broken: tuple[str, ...] = ()
    worst: Element | None = None
    wrong: int = 0
    size: int = 0
    where: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A picture of one head of a case: which keys each query row sees, and how far off its weights are.

    batch, head: which head. rows, keys: how many it has. first_row, first_key: where the part that is shown
    begins. query_block, key_block: the block sizes that the kernel declares, 0 where it works in one piece.
    differ: how many of all pairs are visible and should not be, or the other way round.
    seen: a text for each row, a character for each key: # visible, . hidden, ! visible but should be hidden,
        ? hidden but should be visible.
    errors: the same of the errors of the weights: . within the bound, 0 to 9 the power of ten of err / bound,
        x not finite.
    """

    batch: int
    head: int
    rows: int
    keys: int
    first_row: int
    first_key: int
    query_block: int
    key_block: int
    differ: int
    seen: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def wrong_weights(self) -> bool:
        """Whether a weight that is shown is outside its bound."""
        return any(set(row) - {"."} for row in self.errors)


@dataclass(frozen=True)
class Result:
    """One verdict.

    clauses: the clauses that the check tests on this case. message: what is wrong, or why it was not judged.
    minimal: whether `case` is the smallest failing one that shrinking found; shrunk_from: the id of the
        failing case that it began with. cut: whether the search was cut off by the clock, so that another
        machine may find a simpler one.
    picture: of a minimal result with wrong visibility or weights, if there was time to draw it.
    phase: where the task hung or its process died, one of PHASES of process/phases.py; else empty.
    link: the public report behind an expectation. breaks: the clauses that the expectation names as broken.
    seconds: how long the check took, with what it computed first for those after it; 0 if that is not known.
        Two results are equal whatever they took.
    several_blocks: of a red verdict, whether the tiling cuts the queries or the keys of the case into blocks,
        and each that it cuts into two or more.
    """

    subject: str
    check: str
    clauses: tuple[str, ...]
    case: Case
    verdict: Verdict
    measurements: tuple[Measurement, ...] = ()
    message: str = ""
    minimal: bool = False
    shrunk_from: str = ""
    phase: str = ""
    link: str = ""
    cut: bool = False
    picture: Picture | None = None
    seconds: float = field(default=0.0, compare=False)
    several_blocks: bool = False
    breaks: tuple[str, ...] = ()

    @property
    def semantic(self) -> bool:
        """Whether a failure is one of meaning, not of precision: no rounding explains it."""
        broken = {name for measurement in self.measurements for name in measurement.broken}
        return "semantics" in broken or (self.verdict is Verdict.FAIL and not broken)

    @property
    def drawn(self) -> bool:
        """True if the run planned the case, False if only a search for a simpler one found it."""
        return not self.minimal or self.shrunk_from == self.case.id

    @property
    def key(self) -> tuple[str, str, str]:
        """Subject, check and case: what names a result in a run."""
        return (self.subject, self.check, self.case.id)

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        """The order of results in a record."""
        return (self.subject, self.check, self.case.id, self.verdict)


@dataclass(frozen=True)
class JudgedCall:
    """The results of one call. key: of the call in the plan; empty for a search for a simpler case."""

    key: str
    results: tuple[Result, ...]


@dataclass(frozen=True)
class RunRecord:
    """All that one run found.

    profile, seed, shard: what was requested. complete: False if the run was cut short, `note` says why.
    problems: what fails the run beyond single verdicts, such as stale expectations.
    narrowed: the options that narrowed the run to less than its profile, as typed; empty for all of it.
    environment: device, versions, flags, commit.
    left_out: the checks that did not run: one text for each subject and reason, which names both.
    seconds: of the run, of several shards together; 0 if they are not known. Two records are equal whatever
        they took.
    """

    profile: str
    seed: int
    results: tuple[Result, ...] = ()
    shard: tuple[int, int] = (1, 1)
    complete: bool = True
    note: str = ""
    problems: tuple[str, ...] = ()
    narrowed: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def whole(self) -> bool:
        """Whether this is all of a profile: not cut short, not narrowed, and not one shard of several."""
        return self.complete and not self.narrowed and self.shard == (1, 1)

    @property
    def nothing(self) -> bool:
        """Whether nothing was judged; one shard of several may happen to be empty."""
        return not self.results and self.shard == (1, 1)

    @property
    def status(self) -> str:
        """The status, "pass" or "fail": red verdicts, problems, an early end or a run of nothing fail."""
        return status_of(self, len(self.results), any_red(self.results))

    @property
    def counts(self) -> dict[str, int]:
        """The number of results of each verdict."""
        found = Counter(result.verdict.value for result in self.results)
        return {verdict.value: found[verdict.value] for verdict in Verdict}


def in_order(outputs: Iterable[str]) -> list[str]:
    """Return names of outputs in the order of the oracle; those of other makers' records come last."""
    known = OUTPUTS + GRADIENT_OUTPUTS
    return sorted(outputs, key=lambda name: (known.index(name) if name in known else len(known), name))


def status_of(run: RunRecord, judged: int, red: bool) -> str:
    """Return the status of a run. judged: how many results it has. red: whether one of them fails it."""
    nothing = not judged and run.shard == (1, 1)
    return "fail" if red or run.problems or not run.complete or nothing else "pass"


def any_red(results: Iterable[Result]) -> bool:
    """Return whether one of the results fails a run by itself."""
    return any(result.verdict.red for result in results)


def with_problems(record: RunRecord, problems: Iterable[str], judged: int = 0) -> RunRecord:
    """Return the record with further problems, and with that of a complete run which judged nothing.

    judged: how many results the run has that the record lacks.
    """
    found = {*record.problems, *problems}
    if record.complete and record.nothing and not judged:
        found.add(_NOTHING_JUDGED)
    return replace(record, problems=tuple(sorted(found)))


def settled(results: Iterable[Result]) -> tuple[Result, ...]:
    """Return results in order, without those failures that shrinking found to be minimal already."""
    every = tuple(results)
    minimal = {result.key for result in every if result.minimal}
    kept = (result for result in every if result.minimal or not (_failed(result) and result.key in minimal))
    return tuple(sorted(kept, key=lambda result: result.sort_key))


def to_shrink(results: Iterable[Result]) -> dict[tuple[str, str, bool], Result]:
    """Return the simplest failure of each subject and check, one of meaning and one of precision.

    What hung or died is not among them: a search would do so, too. Nor is what follows from another failure.
    """
    failed = [result for result in results if _failed(result) and not result.phase]
    shown = {(r.subject, symptom) for r in failed if r.check in ACCURACY for symptom in _symptoms(r)}
    chosen: dict[tuple[str, str, bool], Result] = {}
    for result in sorted(failed, key=_simplicity):
        if result.check in ACCURACY or (result.subject, _symptoms(result)[0]) not in shown:
            chosen.setdefault((result.subject, result.check, result.semantic), result)
    return dict(sorted(chosen.items()))


def _symptoms(result: Result) -> tuple[str, ...]:
    """Return what shows that a failure is the same under another check; the first is the failure's own.

    A kernel that is wrong is also imprecise, and one that raises an exception raises it again.
    """
    if not result.measurements:
        return (result.message.partition("\n")[0],)
    return ("wrong", "imprecise") if result.semantic else ("imprecise",)


def merge_records(records: Iterable[RunRecord]) -> RunRecord:
    """Return one record of all the shards of one run.

    Raises ValueError if they are of different runs, or a shard is missing or given twice.
    """
    parts = sorted(records, key=lambda record: record.shard)
    header = merge_headers(parts)
    results = [result for part in parts for result in part.results]
    merged = shrunk_once(results)
    kept = (stays for result in results if (stays := merged.of(result)) is not None)
    return with_problems(replace(header, results=tuple(sorted(kept, key=lambda each: each.sort_key))), ())


def merge_headers(parts: Sequence[RunRecord]) -> RunRecord:
    """Return the record of all the shards of one run, sorted by their numbers, without its results.

    Raises ValueError as `merge_records` does.
    """
    if not parts:
        raise ValueError("no records to merge")
    first = parts[0]
    for part in parts[1:]:
        for name in ("profile", "seed", "narrowed"):
            if getattr(part, name) != getattr(first, name):
                raise ValueError(f"{name}: got {getattr(part, name)!r}, expected {getattr(first, name)!r}")
    shards = [part.shard for part in parts]
    expected = [(number, first.shard[1]) for number in range(1, first.shard[1] + 1)]
    if shards != expected:
        raise ValueError(f"shards: got {_shards(shards)}, expected {_shards(expected)}")
    complete = all(part.complete for part in parts)
    note = "; ".join(f"shard {_shards([part.shard])}: {part.note}" for part in parts if part.note)
    left_out = tuple(sorted({text for part in parts for text in part.left_out}))
    return replace(
        first,
        results=(),
        shard=(1, 1),
        complete=complete,
        note=note,
        problems=tuple(sorted({problem for part in parts for problem in part.problems})),
        left_out=left_out,
        seconds=round(sum(part.seconds for part in parts), 3),
    )


@dataclass(frozen=True)
class ShrunkOnce:
    """The searches of all shards that are also those of one run: only its own simplest failures stay shrunk.

    begun: the keys of the failures with which a search begins. minimal: those of the failures where one ends.
    """

    begun: frozenset[tuple[str, str, str]]
    minimal: frozenset[tuple[str, str, str]] = frozenset()

    def of(self, result: Result) -> Result | None:
        """Return a result of a shard as the run has it; None if the run does not have it.

        A case that was drawn stays, as an ordinary failure, where a search from another one is the run's.
        """
        kept = self.searched(result)
        twice = kept is not None and not kept.minimal and _failed(kept) and kept.key in self.minimal
        return None if twice else kept

    def searched(self, result: Result) -> Result | None:
        """Return the same, also for a failure that is where another search ends."""
        if not result.shrunk_from or (result.subject, result.check, result.shrunk_from) in self.begun:
            return result
        return _as_drawn(result) if result.shrunk_from == result.case.id and result.minimal else None


def shrunk_once(results: Iterable[Result]) -> ShrunkOnce:
    """Return which searches stay, of the results of all shards, or of those that are `decisive`."""
    every = tuple(results)
    drawn = (_as_drawn(result) if result.shrunk_from == result.case.id else result for result in every)
    chosen = to_shrink(result for result in drawn if not result.minimal)
    only = ShrunkOnce(frozenset(first.key for first in chosen.values()))
    kept = (only.searched(result) for result in every)
    return replace(only, minimal=frozenset(each.key for each in kept if each is not None and each.minimal))


def decisive(verdict: str, minimal: bool, shrunk_from: str) -> bool:
    """Return whether a result of a shard may be another in the run's record, or decides about one that is."""
    return verdict == Verdict.FAIL or minimal or bool(shrunk_from)


def _as_drawn(result: Result) -> Result:
    return replace(result, minimal=False, shrunk_from="", picture=None)


def _failed(result: Result) -> bool:
    return result.verdict is Verdict.FAIL


def _simplicity(result: Result) -> tuple[int, int, str]:
    case = result.case
    return case.batch * (case.q_len + case.kv_len), len(case.features), case.id


def _shards(shards: list[tuple[int, int]]) -> str:
    return ", ".join(f"{number}/{count}" for number, count in shards)
