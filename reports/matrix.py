"""The conformance matrix: implementations, each in one version on one device, beside the clauses.

Columns that were made by one commit of attest with one profile and one seed are aligned: they differ by their
implementations alone. Those of the suite of most columns are marked as aligned; others are accepted.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from attest.conformance.cases.features import DTYPES
from attest.conformance.record import Result, RunRecord
from attest.conformance.records.lines import RecordLines
from attest.conformance.text import sentence
from attest.reports.matrix_cells import Cell, Declared, State, cells_of
from attest.reports.matrix_lines import lines_in
from attest.reports.words import setting

OURS = "attest-attention"
_COMMIT = 12  # characters
_PROCESSOR = "CPU"

# States, before and now, of a cell that is worse than in the version before. What was not run says nothing.
_WORSE = {
    (State.PASSES, State.FAILS),
    (State.PASSES, State.INCONCLUSIVE),
    (State.PASSES, State.NOT_SUPPORTED),
    (State.INCONCLUSIVE, State.FAILS),
}


@dataclass(frozen=True, order=True)
class Suite:
    """The suite of a column: the commit of attest, and the options that choose the cases.

    narrowed: the options that narrowed the run, as typed; with the shard, if it is one of several.
    """

    commit: str
    profile: str
    seed: int
    narrowed: str = ""

    @property
    def words(self) -> str:
        """The suite in a few words."""
        narrowed = f", {self.narrowed}" if self.narrowed else ""
        commit = self.commit[:_COMMIT] or "unknown"
        return f"commit {commit}, profile {self.profile}, seed {self.seed}{narrowed}"


@dataclass(frozen=True)
class Implementation:
    """An implementation in one version on one device.

    name: of the Subject. distribution, version: of what it is a part of; "" if that is not known.
    device: "CPU", or the name of a GPU. interpreter: whose interpreter runs it there; "" for none.
    """

    name: str
    distribution: str
    version: str
    device: str
    interpreter: str = ""

    @property
    def place(self) -> str:
        """The device, and the interpreter that runs the kernel on it."""
        return f"{self.device}, {self.interpreter} interpreter" if self.interpreter else self.device

    @property
    def release(self) -> str:
        """The distribution and its version."""
        return f"{self.distribution} {self.version or 'of unknown version'}"


@dataclass(frozen=True)
class Column:
    """One column. id: names it in links.

    subject: its name in the record. record: the name of the file. complete: whether its run ended by itself.
    problems: what failed that run beyond single results, such as stale expectations.
    results: how many there are. unattributed: failures that break no known clause. versions: of JAX and its
    compiler. previous: the column of the version before. worse: by clause, what is worse there than in
    `previous`: "" for the cell, and the dtypes that fail now and did not.
    """

    id: str
    of: Implementation
    suite: Suite
    subject: str
    record: str
    date: str
    complete: bool
    problems: tuple[str, ...]
    results: int
    declared: Declared
    cells: Mapping[str, Cell]
    unattributed: tuple[Result, ...]
    versions: Mapping[str, str]
    previous: "Column | None" = None
    worse: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True)
class NotRun:
    """A Subject without a record. name: finds it. backend: where it runs."""

    name: str
    title: str
    distribution: str
    backend: str
    interpreter: str
    dtypes: tuple[str, ...]
    clauses: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """All columns in order, and the Subjects that have none."""

    columns: tuple[Column, ...]
    not_run: tuple[NotRun, ...]

    @property
    def suites(self) -> tuple[Suite, ...]:
        """The suites, the one of most columns first."""
        counted = Counter(column.suite for column in self.columns)
        return tuple(sorted(counted, key=lambda suite: (-counted[suite], suite)))

    def aligned(self, column: Column) -> bool:
        """Return whether a column has the suite of most columns."""
        return column.suite == self.suites[0]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of all columns, in order."""
        return tuple(dict.fromkeys(d for column in self.columns for d in column.declared.dtypes))

    @property
    def places(self) -> tuple[str, ...]:
        """The devices of all columns, sorted."""
        return tuple(sorted({column.of.place for column in self.columns}))


def matrix_of(records: Iterable[RecordLines], known: Iterable[NotRun] = ()) -> Matrix:
    """Return the matrix of records. known: all Subjects, of which those without a record are not run.

    Raises ValueError with one sentence for a broken record, and for two of one implementation, version,
    device and suite.
    """
    found = [(column, record.where) for record in records for column in _columns(record)]
    found.sort(key=lambda each: _order(each[0]))
    for (of, suite), group in groupby(found, key=lambda each: (each[0].of, each[0].suite)):
        first, *others = (where for _, where in group)
        if others:
            what = f"{of.name} of {of.release} on {of.place} by {suite.words}"
            raise ValueError(sentence(f"{others[0]}: {what} is in {first}, too: give one of them"))
    columns = [column for column, _ in found]
    judged = {name for column in columns for name in (column.subject, column.of.name)}
    return Matrix(
        tuple(_with_regressions(_with_ids(columns))),
        tuple(each for each in known if not {each.name, each.title} & judged),
    )


def _order(column: Column) -> tuple[Any, ...]:
    of = column.of
    return of.name, of.place, of.distribution, _natural(of.version), column.date, column.suite


def _natural(version: str) -> list[tuple[int, str]]:
    """Return a version so that numbers in it are compared as numbers; a suffix such as rc1 comes first."""
    parts = re.findall(r"[0-9]+|[a-z]+", version.partition(" ")[0].lower())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts] + [(0, "")]


def _columns(record: RecordLines) -> Iterator[Column]:
    """Yield a column for each subject of a record, whose results are sorted by subject."""
    header = record.header
    for subject, lines in groupby(lines_in(record), key=lambda line: line.subject):
        declared = _declared(header, subject)
        own = list(lines)
        cells, unattributed = cells_of(own, declared)
        yield Column(
            id="",
            of=_implementation(header, subject),
            suite=_suite(header),
            subject=subject,
            record=Path(record.where).name,
            date=str(header.environment.get("date", "")),
            complete=header.complete,
            problems=header.problems,
            results=len(own),
            declared=declared,
            cells=cells,
            unattributed=unattributed,
            versions={
                name: str(number)
                for name, number in setting(header, "versions").items()
                if name in ("jax", "jaxlib", OURS)
            },
        )


def _suite(run: RunRecord) -> Suite:
    number, count = run.shard
    narrowed = [run.narrowed] if run.narrowed else []
    narrowed += [f"shard {number}/{count}"] if count > 1 else []
    return Suite(str(run.environment.get("commit", "")), run.profile, run.seed, ", ".join(narrowed))


def _implementation(run: RunRecord, subject: str) -> Implementation:
    distribution = _table(run, "distributions", subject)
    if distribution:
        release = str(distribution.get("name", "")), str(distribution.get("version", ""))
    else:
        commit = str(run.environment.get("commit", ""))[:_COMMIT]
        version = str(setting(run, "versions").get(OURS, ""))
        release = OURS, f"{version} at {commit}" if commit else version
    declared = _table(run, "declarations", subject)
    gpu = setting(run, "gpu_workers")
    backend = gpu.get("backend", run.environment.get("backend", ""))
    device = str(gpu.get("device", run.environment.get("device", "")))
    return Implementation(
        str(declared.get("name", subject)),
        *release,
        _PROCESSOR if backend == "cpu" else device,
        str(declared.get("interpreter", "")),
    )


def _declared(run: RunRecord, subject: str) -> Declared:
    found = _table(run, "declarations", subject)
    if not found:
        return Declared()
    return Declared(
        tuple(dtype for dtype in DTYPES if dtype in found.get("dtypes", ())),
        tuple(found.get("features", ())),
        frozenset(found.get("clauses", ())),
        {name: str(value) for name, value in found.get("dialect", {}).items()},
    )


def _table(run: RunRecord, name: str, subject: str) -> Mapping[str, Any]:
    found: Any = setting(run, name).get(subject)
    return cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {}


def _with_ids(columns: Sequence[Column]) -> Iterator[Column]:
    met: Counter[str] = Counter()
    for column in columns:
        of = column.of
        words = f"{of.name} {of.version.partition(' ')[0]} {of.place}".lower()
        name = re.sub(r"[^a-z0-9._]+", "-", words).strip("-")
        met[name] += 1
        yield replace(column, id=name if met[name] == 1 else f"{name}-{met[name]}")


def _with_regressions(columns: Iterable[Column]) -> Iterator[Column]:
    """Yield columns with the version before each, and with what is worse than there."""
    for _, group in groupby(columns, key=lambda column: (column.of.name, column.of.place)):
        before: Column | None = None
        last: Column | None = None
        for column in group:
            if last is not None and last.of != column.of:
                before = last
            worse = {} if before is None else _worse(before, column)
            last = replace(column, previous=before, worse=worse)
            yield last


def _worse(before: Column, after: Column) -> dict[str, tuple[str, ...]]:
    """Return what is worse by clause: "" for the cell, and the dtypes that fail now and did not."""
    found: dict[str, tuple[str, ...]] = {}
    for clause, cell in after.cells.items():
        was = before.cells[clause]
        worse = [""] if (was.whole.state, cell.whole.state) in _WORSE else []
        for dtype in (name for name in cell.dtypes if name in was.dtypes):
            pair = was.dtypes[dtype].state, cell.dtypes[dtype].state
            worse += [dtype] if pair in _WORSE and pair[1] is State.FAILS else []
        if worse:
            found[clause] = tuple(worse)
    return found
