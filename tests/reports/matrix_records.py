"""Hand-made records for the matrix: kernels of the distribution `toys` in several versions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.record import Result, Verdict
from attest.conformance.records.lines import RecordLines, lines_of
from attest.reports.matrix import Column, Matrix, NotRun, matrix_of
from tests.reports.records import case, measurement, result, run

SUBJECT = "toys:KERNEL"
CLAUSES = ("S1", "S2", "S6", "S14", "S16", "S20")
WRONG = measurement(worst_ratio=50.0, broken=("bound", "semantics"))
LINK = "docs/findings/toys.md#a-bias"


def judged(
    verdict: Verdict = Verdict.PASS,
    seed: int = 0,
    check: str = "forward",
    own: Sequence[str] = ("S1", "S16"),
    ratio: float = 0.4,
    message: str = "",
    link: str = "",
    **fields: Any,
) -> Result:
    """A result whose clauses are those of its check and of its case's features, as the checks name them."""
    drawn = case(seed, **fields)
    clauses = dict.fromkeys([*own, *(ALL_FEATURES[name].clause for name in sorted(drawn.features))])
    wrong = verdict in (Verdict.FAIL, Verdict.XFAIL)
    numbers = (WRONG if wrong else measurement(worst_ratio=ratio),)
    found = result(verdict, *numbers, asked=drawn, subject=SUBJECT, check=check, message=message, link=link)
    return replace(found, clauses=tuple(clauses))


def expected(seed: int, reason: str = "a bias is lost", **fields: Any) -> Result:
    """An expected failure."""
    message = f"expected: {reason}; found: outside the error model: out (bound)"
    return judged(Verdict.XFAIL, seed, message=message, link=LINK, **fields)


PASSING = tuple(judged(seed=seed) for seed in range(20))


def record(
    *results: Result,
    version: str = "1.0",
    commit: str = "c0ffee" * 6 + "beef",
    clauses: Sequence[str] | None = CLAUSES,
    file: str = "toys.jsonl",
    **others: Any,
) -> RecordLines:
    """A record of one kernel, as a file of lines."""
    declared = {
        "name": "toys.attention",
        "interpreter": "",
        "features": ["bias", "causal"],
        "dtypes": ["float32", "bfloat16"],
        "clauses": list(clauses or ()),
        "dialect": {"causal": "top_left"},
    }
    environment = {
        "backend": "cpu",
        "device": "cpu",
        "commit": commit,
        "date": "2026-11-27",
        "versions": {"jax": "0.11.2", "attest-attention": "0.1.0", "numpy": "2.4"},
        "distributions": {SUBJECT: {"name": "toys", "version": version}},
        **({} if clauses is None else {"declarations": {SUBJECT: declared}}),
    } | others.pop("environment", {})
    return lines_of(run(*results, environment=environment, **others), f"folder/{file}")


def only(*results: Result, **others: Any) -> Column:
    """The column of one record."""
    (column,) = matrix_of([record(*results, **others)]).columns
    return column


OTHER = NotRun("more:TOY", "toys.other", "toys", "gpu", "Triton", ("float32",), ("S1", "S16"))


def example() -> Matrix:
    """Two versions of one kernel, of which the newer one is worse; a third by another suite; one not run."""
    biased = [expected(seed, bias="bhq") for seed in range(30, 34)]
    causal = [judged(seed=n, causal=True, ratio=n / 100, dtype="float32") for n in range(40, 44)]
    broken = [judged(Verdict.FAIL, seed, causal=True, dtype="float32") for seed in range(50, 54)]
    return matrix_of(
        [
            record(*PASSING, *causal, file="old.jsonl"),
            record(*PASSING, *biased, *broken, version="1.1", file="new.jsonl"),
            record(*PASSING[:3], version="0.9", file="other.jsonl", narrowed="--examples 3"),
        ],
        [OTHER],
    )
