"""The command `attest compare`: what became better or worse between two records."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attest.conformance.cli import options
from attest.conformance.cli.options import Outputs, as_usage_errors
from attest.conformance.files import write_text

if TYPE_CHECKING:
    from attest.conformance.record import RunRecord


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
    from attest.reports.render.comparison_html import render_html
    from attest.reports.render.comparison_json import render_json
    from attest.reports.render.comparison_junit import render_junit
    from attest.reports.render.markdown import render_comparison
    from attest.reports.render.terminal import print_comparison

    Outputs(json, junit, markdown, html).spare(base, head)
    with as_usage_errors():
        comparison = compare_lines(open_lines(base), open_lines(head))
    for path, render in (
        (json, render_json),
        (junit, render_junit),
        (markdown, render_comparison),
        (html, render_html),
    ):
        if path is not None:
            write_text(path, render(comparison))
    show(lambda console: print_comparison(comparison, console))
    return 1 if comparison.regressed else 0


def read_run(path: Path) -> "RunRecord":
    """Read a record. Raises UsageError."""
    from attest.conformance.records.record_file import read_record

    with as_usage_errors():
        return read_record(path)
