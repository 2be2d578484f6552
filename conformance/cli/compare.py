"""The command `attest compare`: what became better or worse between two records."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attest.conformance.cli import options
from attest.conformance.cli.options import Outputs, as_usage_errors
from attest.conformance.files import write_text

if TYPE_CHECKING:
    from attest.conformance.record import RunRecord
    from attest.reports.comparison import Comparison


def compare(
    base: Annotated[Path, typer.Argument(help="The record before the change.")],
    head: Annotated[Path, typer.Argument(help="The record after the change.")],
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
    json: options.ComparisonJson = None,
) -> int:
    """Compare two records; exit 1 if anything became worse."""
    from attest.conformance.cli.console import show
    from attest.conformance.records.lines import open_lines
    from attest.reports.compare import compare_lines
    from attest.reports.render.terminal import print_comparison

    outputs = Outputs(json, junit, markdown, html)
    outputs.spare(base, head)
    with as_usage_errors():
        comparison = compare_lines(open_lines(base), open_lines(head))
    _write(comparison, outputs)
    show(lambda console: print_comparison(comparison, console))
    return 1 if comparison.regressed else 0


def _write(comparison: "Comparison", outputs: Outputs) -> None:
    """Write a comparison in every requested form, each of which imports much that the others do not need."""
    if outputs.json is not None:
        from attest.reports.render.comparison_json import render_json

        write_text(outputs.json, render_json(comparison))
    if outputs.junit is not None:
        from attest.reports.render.comparison_junit import render_junit

        write_text(outputs.junit, render_junit(comparison))
    if outputs.markdown is not None:
        from attest.reports.render.markdown import render_comparison

        write_text(outputs.markdown, render_comparison(comparison))
    if outputs.html is not None:
        from attest.reports.render.comparison_html import render_html

        write_text(outputs.html, render_html(comparison))


def read_run(path: Path) -> "RunRecord":
    """Read a record. Raises UsageError."""
    from attest.conformance.records.record_file import read_record

    with as_usage_errors():
        return read_record(path)
