"""The command `attest report`, and reports of records that are too large to be shown whole."""

from pathlib import Path
from typing import TYPE_CHECKING

from attest.conformance.cli.console import show
from attest.conformance.cli.judging import complained, written
from attest.conformance.cli.options import FAILED, PASSED, Outputs, UsageError, as_usage_errors
from attest.conformance.files import FileError, write_text
from attest.conformance.records.lines import open_lines
from attest.conformance.sizes import sizes

if TYPE_CHECKING:
    from attest.reports.summary import Summary

# These grow with the number of failures alone. The others list every result, or draw all measurements.
_OF_ANY_SIZE = ("--json", "--markdown")


def report_file(record: Path, outputs: Outputs, verbose: bool) -> int:
    """Print a record, or write its reports; return the exit status. Raises UsageError."""
    from attest.reports.summary import summarise_lines

    with as_usage_errors():
        lines = open_lines(record)
        refuse_reports(outputs, lines.count)
        if any(name not in _OF_ANY_SIZE for name, _ in outputs.named):
            faults = written(lines.whole(), outputs)
            return complained("; ".join(faults), FAILED) if faults else PASSED
        return show_summary(summarise_lines(lines), outputs.markdown, outputs == Outputs(), verbose)


def refuse_reports(outputs: Outputs, count: int) -> None:
    """Raise UsageError for reports that cannot show so many results."""
    most = sizes().shown_results
    for name, path in outputs.named:
        if name not in _OF_ANY_SIZE and count > most:
            raise UsageError(
                f"{name} {path}: there are {count} results, and such a report shows {most} at most:"
                f" give only {' or '.join(_OF_ANY_SIZE)}"
            )


def show_summary(summary: "Summary", markdown: Path | None, printed: bool, verbose: bool) -> int:
    """Write a summary as Markdown, if that is asked for, and print it; return the exit status."""
    from attest.reports.render.markdown import render_summary
    from attest.reports.render.terminal import print_summary

    try:
        if markdown is not None:
            write_text(markdown, render_summary(summary))
    except FileError as error:
        return complained(str(error), FAILED)
    if printed:
        show(lambda console: print_summary(summary, console, verbose))
    return PASSED
