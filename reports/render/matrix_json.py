"""The matrix as JSON, `attest.matrix/1`: its fields, as types, from which its JSON Schema is made."""

import math
from typing import Literal

import msgspec

from attest.conformance.clauses import CLAUSES
from attest.conformance.judging.failure import replay_line
from attest.conformance.record import Result, Verdict
from attest.reports.matrix import Column, Matrix, NotRun
from attest.reports.matrix_cells import Cell, Part, State, found_words
from attest.reports.words import one_line

SCHEMA = "attest.matrix/1"

Number = float | Literal["nan", "inf"]


class _Data(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object with these fields and no others."""


class SuiteData(_Data):
    """A Suite, and how many columns it has."""

    commit: str
    profile: str
    seed: int
    narrowed: str
    columns: int


class PartData(_Data):
    """A Part: how many results of each verdict there are, and failures that break other clauses."""

    state: State
    counts: dict[str, int]
    elsewhere: int


class WorstData(_Data):
    """The largest err/bound, with its output, check and case."""

    ratio: Number
    output: str
    check: str
    case_id: str
    dtype: str
    verdict: str


class EvidenceData(_Data):
    """A result, the first line of its message, and the command that judges it again."""

    check: str
    case_id: str
    verdict: str
    message: str
    replay: str


class KnownData(_Data):
    """An expected failure."""

    link: str
    reason: str
    results: int


class CellData(PartData):
    """A Cell. worse: what is worse than in `previous`: "" for the cell, and the dtypes that fail now."""

    dtypes: dict[str, PartData]
    worst: WorstData | None
    evidence: EvidenceData | None
    known: tuple[KnownData, ...]
    refused: int
    worse: tuple[str, ...]


class ColumnData(_Data):
    """A Column. suite: an index of `suites`. previous: the id of the version before; "" for none."""

    id: str
    implementation: str
    distribution: str
    version: str
    device: str
    interpreter: str
    suite: int
    aligned: bool
    date: str
    record: str
    subject: str
    complete: bool
    problems: tuple[str, ...]
    results: int
    unattributed: int
    versions: dict[str, str]
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    dialect: dict[str, str]
    previous: str
    cells: dict[str, CellData]


class NotRunData(_Data):
    """A NotRun. cells: the state of each clause."""

    subject: str
    implementation: str
    distribution: str
    backend: str
    interpreter: str
    dtypes: tuple[str, ...]
    cells: dict[str, State]


class MatrixData(_Data):
    """A Matrix. clauses: the sentence of each."""

    schema: Literal["attest.matrix/1"]
    clauses: dict[str, str]
    suites: tuple[SuiteData, ...]
    columns: tuple[ColumnData, ...]
    not_run: tuple[NotRunData, ...]


def render_json(matrix: Matrix) -> str:
    """Return the matrix as JSON; numbers that are not finite are the texts "inf" and "nan"."""
    suites = matrix.suites
    data = MatrixData(
        schema=SCHEMA,
        clauses=dict(CLAUSES),
        suites=tuple(
            SuiteData(
                commit=suite.commit,
                profile=suite.profile,
                seed=suite.seed,
                narrowed=suite.narrowed,
                columns=sum(column.suite == suite for column in matrix.columns),
            )
            for suite in suites
        ),
        columns=tuple(
            _column(column, suites.index(column.suite), matrix.aligned(column)) for column in matrix.columns
        ),
        not_run=tuple(map(_not_run, matrix.not_run)),
    )
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"


def _column(column: Column, suite: int, aligned: bool) -> ColumnData:
    of = column.of
    return ColumnData(
        id=column.id,
        implementation=of.name,
        distribution=of.distribution,
        version=of.version,
        device=of.device,
        interpreter=of.interpreter,
        suite=suite,
        aligned=aligned,
        date=column.date,
        record=column.record,
        subject=column.subject,
        complete=column.complete,
        problems=column.problems,
        results=column.results,
        unattributed=len(column.unattributed),
        versions=dict(column.versions),
        dtypes=column.declared.dtypes,
        features=column.declared.features,
        dialect=dict(column.declared.dialect),
        previous="" if column.previous is None else column.previous.id,
        cells={clause: _cell(cell, column.worse.get(clause, ())) for clause, cell in column.cells.items()},
    )


def _cell(cell: Cell, worse: tuple[str, ...]) -> CellData:
    whole = _part(cell.whole)
    return CellData(
        state=whole.state,
        counts=whole.counts,
        elsewhere=whole.elsewhere,
        dtypes={dtype: _part(part) for dtype, part in cell.dtypes.items()},
        worst=_worst(cell),
        evidence=None if cell.evidence is None else _evidence(cell.evidence),
        known=tuple(KnownData(link=k.link, reason=k.reason, results=k.results) for k in cell.known),
        refused=cell.refused,
        worse=worse,
    )


def _part(part: Part) -> PartData:
    counts = {verdict.value: part.counts[verdict] for verdict in Verdict if verdict in part.counts}
    return PartData(state=part.state, counts=counts, elsewhere=part.elsewhere)


def _worst(cell: Cell) -> WorstData | None:
    worst = cell.worst
    if worst is None:
        return None
    return WorstData(
        ratio=_number(worst.ratio),
        output=worst.output,
        check=worst.result.check,
        case_id=worst.result.case.id,
        dtype=worst.result.case.dtype,
        verdict=worst.result.verdict.value,
    )


def _number(ratio: float) -> Number:
    if math.isnan(ratio):
        return "nan"
    return ratio if math.isfinite(ratio) else "inf"


def _evidence(result: Result) -> EvidenceData:
    return EvidenceData(
        check=result.check,
        case_id=result.case.id,
        verdict=result.verdict.value,
        message=one_line(found_words(result), 400),
        replay=replay_line(result),
    )


def _not_run(subject: NotRun) -> NotRunData:
    return NotRunData(
        subject=subject.name,
        implementation=subject.title,
        distribution=subject.distribution,
        backend=subject.backend,
        interpreter=subject.interpreter,
        dtypes=subject.dtypes,
        cells={
            clause: State.NOT_RUN if clause in subject.clauses else State.NOT_SUPPORTED for clause in CLAUSES
        },
    )
