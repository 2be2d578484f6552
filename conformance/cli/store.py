"""The commands `attest store add` and `attest query`: many runs as tables, and queries of them."""

from collections import deque
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attest.conformance.cli.options import Outputs, UsageError, as_usage_errors
from attest.conformance.files import write_text

if TYPE_CHECKING:
    from attest.conformance.store.ask import Answer, Query

store_commands = typer.Typer(help="Keep many runs as tables for `attest query`.")

Folder = Annotated[Path, typer.Argument(metavar="STORE", help="The folder of the store.")]
Records = Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Records of complete runs.")]
Day = Annotated[
    datetime | None,
    typer.Option(
        formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"],
        show_default="now",
        help="When the runs were made, in UTC; queries go by it.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="[QUERY]", help="A ready query; without one they are listed.")]
Sql = Annotated[
    str, typer.Option(metavar="SQL", help="Run this query instead, on the tables runs and results.")
]
Subject = Annotated[str, typer.Option(help="Of these subjects: a name, or a pattern with * and ?.")]
Output = Annotated[str, typer.Option(help="Of these outputs, such as dquery: a name, or a pattern.")]
Csv = Annotated[Path | None, typer.Option(help="Write the answer as CSV here.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the answer here, as SVG.")]


@store_commands.command("add")
def add_records(store: Folder, records: Records, day: Day = None) -> int:
    """Add records to a store; one that it has is not added again."""
    from attest.conformance.cli.console import print_text
    from attest.conformance.records.lines import open_lines
    from attest.conformance.store.add import add

    _need_duckdb()
    with as_usage_errors():
        found = [(path, open_lines(path)) for path in records]
        for _, lines in found:  # none is added if one is damaged
            deque(lines, maxlen=0)
    for path, lines in found:
        if not lines.header.complete:
            raise UsageError(f"{path}: its run was cut short, so it is not added: {lines.header.note}")
    at = datetime.now(UTC) if day is None else day
    for path, lines in found:
        with as_usage_errors():
            run = add(store, lines, at)
        print_text(f"{path}: the store has it already" if run is None else f"{path}: added as run {run}")
    return 0


def query(
    store: Folder,
    name: Name = "",
    sql: Sql = "",
    subject: Subject = "*",
    output: Output = "*",
    csv: Csv = None,
    plot: Plot = None,
) -> int:
    """Print the answer to a ready query, or to one in SQL; without a query list the ready ones."""
    Outputs(csv=csv, plot=plot)
    from attest.conformance.cli.console import print_text, show
    from attest.conformance.store.ask import ask, queries
    from attest.conformance.text import nearest
    from attest.reports.render.answer import print_answer, render_csv

    _need_duckdb()
    if not name and not sql:
        print_text("\n".join(f"{known}: {each.words}" for known, each in queries().items()))
        return 0
    if name and sql:
        raise UsageError(f"--sql: there is the query {name}, too: give one of them")
    if name and name not in queries():
        raise UsageError(f"no query is called {name!r}: {nearest(name, queries(), ', '.join(queries()))}")
    chosen = queries().get(name)
    if plot is not None and (chosen is None or not chosen.x):
        drawn = ", ".join(known for known, each in queries().items() if each.x)
        raise UsageError(f"--plot {plot}: only these queries have one: {drawn}")
    with as_usage_errors():
        answer = ask(store, chosen.sql if chosen else sql, subject, output)
    if csv is not None:
        write_text(csv, render_csv(answer.columns, answer.rows))
    if plot is not None and chosen is not None:
        from attest.reports.render.trend import render_plot

        write_text(plot, render_plot(chosen.words, chosen.x, chosen.y, _lines(answer, chosen)))
    show(lambda console: print_answer(answer.columns, answer.rows, console))
    return 0


def _lines(answer: "Answer", chosen: "Query") -> dict[str, list[tuple[datetime, float]]]:
    """Return the points of each line of a plot, by its name."""
    lines: dict[str, list[tuple[datetime, float]]] = {}
    names = zip(*(answer.of(column) for column in chosen.line), strict=True)
    for name, x, y in zip(names, answer.of(chosen.x), answer.of(chosen.y), strict=True):
        lines.setdefault(" ".join(map(str, name)), []).append((x, y))
    return lines


def _need_duckdb() -> None:
    if find_spec("duckdb") is None:
        raise UsageError("a store needs DuckDB: pip install 'attest-attention[store]'")
