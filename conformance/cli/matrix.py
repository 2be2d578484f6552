"""The command `attest matrix`: implementations beside the clauses, from their records."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attest.conformance.cli.options import Outputs, UsageError, as_usage_errors
from attest.conformance.files import write_text

if TYPE_CHECKING:
    from attest.conformance.subject import Subject
    from attest.reports.matrix import Matrix, NotRun

# The records of the project, which no wheel has.
COMMITTED = Path(__file__).absolute().parents[3] / "reports" / "data" / "matrix"
_ENDING = "*.jsonl.gz"


def matrix(
    records: Annotated[
        list[Path] | None, typer.Argument(help="Records; by default those of the project.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the matrix as JSON here.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the matrix as a page here.")] = None,
) -> int:
    """Show which clauses each implementation meets, by its version, device and dtypes."""
    from attest.conformance.cli.console import show
    from attest.reports.render.matrix_html import render_html
    from attest.reports.render.matrix_json import render_json
    from attest.reports.render.matrix_text import print_matrix

    outputs = Outputs(json=json, html=html)
    files = records or committed()
    outputs.spare(*files)
    found = matrix_of_files(files)
    for path, render in ((json, render_json), (html, render_html)):
        if path is not None:
            write_text(path, render(found))
    if json is None and html is None:
        show(lambda console: print_matrix(found, console))
    return 0


def committed() -> list[Path]:
    """Return the records of the project, by name. Raises UsageError where there are none."""
    found = sorted(COMMITTED.glob(_ENDING))
    if not found:
        raise UsageError(
            f"there are no records in {COMMITTED}: give some that `attest check --json RECORD.jsonl.gz` wrote"
        )
    return found


def matrix_of_files(files: list[Path]) -> "Matrix":
    """Return the matrix of records. Raises UsageError."""
    from attest.conformance.records.lines import open_lines
    from attest.reports.matrix import matrix_of

    with as_usage_errors():
        return matrix_of((open_lines(path) for path in files), known_subjects())


def known_subjects() -> "tuple[NotRun, ...]":
    """Return the Subjects of attest and its peers by name; those of other packages differ by machine."""
    from attest.conformance.running.declared import declared_clauses
    from attest.reports.matrix import OURS, NotRun

    return tuple(
        NotRun(
            name,
            subject.name,
            subject.distribution or OURS,
            subject.backend,
            subject.interpreter,
            subject.dtypes,
            tuple(declared_clauses(subject)),
        )
        for name, subject in sorted(_own_subjects().items())
    )


def _own_subjects() -> "dict[str, Subject]":
    """Return every Subject of the project by the name that finds it."""
    from attest.conformance import peers, subjects
    from attest.conformance.subject import listed_in, modules_of

    named = [
        each for package in (peers, subjects) for module in modules_of(package) for each in module.SUBJECTS
    ]
    return {subject.name: subject for subject in named} | listed_in(peers, "APART", "UNCONFIRMED")
