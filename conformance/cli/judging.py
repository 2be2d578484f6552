"""A run of the command line: its journal, its progress, its files and its exit status."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attest.conformance.cli.options import (
    FAILED,
    PASSED,
    ClusterOptions,
    Outputs,
    UsageError,
    as_usage_errors,
)
from attest.conformance.files import FileError, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from attest.conformance.record import Result, RunRecord
    from attest.conformance.records.journal import Journal
    from attest.conformance.running.runner import Request


def judge(
    request: "Request",
    outputs: Outputs,
    cluster: ClusterOptions,
    resume: Path | None = None,
    base: "RunRecord | None" = None,
    problems: Sequence[str] = (),
    verbose: bool = False,
) -> int:
    """Judge a request, keep its journal, and conclude; return the exit status. Raises UsageError."""
    from attest.conformance.cli.on_cluster import connected
    from attest.conformance.cli.watching import watching
    from attest.conformance.record import with_problems
    from attest.conformance.running.fit import RequestError, refuse_unfit
    from attest.conformance.running.gate import with_policy
    from attest.conformance.running.runner import run

    journal = None
    try:
        for subject in request.subjects.values():
            refuse_unfit(subject, request.profile, request.only)
        if request.workers == 0 and len(request.subjects) > 1:
            complained("-n 0 runs all subjects in one process, where one can spoil those after it", PASSED)
        with watching() as watch, connected(request, cluster, watch.say) as here:
            here = _resumed(here, resume)
            journal = _begun(here, outputs.json)

            def keep(results: "Sequence[Result]", key: str) -> None:
                if journal is not None:
                    journal.add(results, key)
                watch.results(results)

            found = run(here, watch.progress, keep)
    except RequestError as error:
        if journal is not None:
            journal.remove()
        raise UsageError(str(error)) from error
    found = with_policy(with_problems(found, problems), request.expectations)
    return conclude(found, outputs, base, journal, verbose)


def _resumed(request: "Request", record: Path | None) -> "Request":
    """Return a request with what an earlier part of its run has judged. Raises UsageError."""
    from attest.conformance.cli.resuming import before
    from attest.conformance.running.runner import empty_record

    if record is None:
        return request
    with as_usage_errors():
        return replace(request, before=before(record, empty_record(request)))


def _begun(request: "Request", record: Path | None) -> "Journal | None":
    """Begin the journal of a run whose record goes to a file."""
    from attest.conformance.files import is_special
    from attest.conformance.process.limits import limits
    from attest.conformance.records.journal import Journal, journal_path
    from attest.conformance.running.runner import empty_record

    if record is None or is_special(record):
        return None
    before = request.before.calls
    return Journal(journal_path(record), empty_record(request), limits()["sync_seconds"], before)


def conclude(
    record: "RunRecord",
    outputs: Outputs,
    base: "RunRecord | None" = None,
    journal: "Journal | None" = None,
    verbose: bool = False,
) -> int:
    """Write and print a record; return the exit status. One failed write does not prevent the others."""
    from attest.conformance.cli.console import show
    from attest.conformance.record import with_problems
    from attest.reports.compare import compare_records
    from attest.reports.render.terminal import print_comparison, print_run

    prints: list[Callable[[Console], None]] = [lambda console: print_run(record, console, verbose)]
    if base is not None and record.complete:
        comparison = compare_records(base, record)
        record = with_problems(record, ("worse than the baseline",) if comparison.regressed else ())
        prints.insert(0, lambda console: print_comparison(comparison, console))
    faults = written(record, outputs)
    if journal is not None and not faults and record.complete:
        journal.remove()
    elif journal is not None:
        journal.close()
        faults += [journal.contents] if faults else []
    try:
        show(*prints)
    except FileError as error:
        faults.append(str(error))
    if not record.complete:
        compared = "" if base is None else "; not compared with the baseline"
        where = f"; the results so far are in {outputs.json}" if outputs.json and not faults else ""
        where += f", and --resume {outputs.json} judges the rest" if where and journal is not None else ""
        faults.insert(0, f"{record.note}{compared}{where}")
    if faults:
        return complained("; ".join(faults), FAILED)
    if journal is not None and journal.fault:
        complained(f"{journal.fault}, so the run continued without a journal", FAILED)
    return PASSED if record.status == "pass" else FAILED


def written(record: "RunRecord", outputs: Outputs) -> list[str]:
    """Write the record in every requested form; return a sentence for each form that could not be written."""
    from attest.conformance.records.record_file import write_record
    from attest.reports.render import html, junit, markdown, sarif

    def as_text(render: "Callable[[RunRecord], str]") -> "Callable[[RunRecord, Path], None]":
        return lambda record, path: write_text(path, render(record))

    faults: list[str] = []
    for path, write in (
        (outputs.json, write_record),
        (outputs.junit, as_text(junit.render_run)),
        (outputs.markdown, as_text(markdown.render_run)),
        (outputs.html, as_text(html.render_run)),
        (outputs.sarif, as_text(sarif.render_run)),
    ):
        if path is not None:
            try:
                write(record, path)
            except FileError as error:
                faults.append(str(error))
    return faults


def complained(sentence: str, status: int) -> int:
    """Print a sentence on stderr, and return the exit status."""
    from attest.conformance.cli.console import complain

    complain(sentence)
    return status
