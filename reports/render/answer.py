"""The answer of a query of a store: as a table on a terminal, and as CSV."""

import csv
import io
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attest.conformance.text import plural, printable

_DIGITS = 4  # significant, on a terminal


def print_answer(columns: Sequence[str], rows: Sequence[Sequence[Any]], console: Console) -> None:
    """Print the rows as a table, and how many there are."""
    texts = [[printable(_shown(value)) for value in row] for row in rows]
    widths = [max(map(len, (column, *cells))) for column, *cells in zip(columns, *texts, strict=True)]
    if sum(widths) + 2 * len(widths) > console.width:
        _print_apart(columns, texts, console)
    elif texts:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column)
        for cells in texts:
            table.add_row(*map(Text, cells))
        console.print(table)
    console.print(plural(len(rows), "row"), markup=False)


def _print_apart(columns: Sequence[str], texts: Sequence[Sequence[str]], console: Console) -> None:
    """Print each row as lines of its own, which can be copied: the console is too narrow for a table."""
    for cells in texts:
        for column, cell in zip(columns, cells, strict=True):
            console.print(f"{column}: {cell}", markup=False, soft_wrap=True)
        console.print()


def render_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the rows as CSV, the names of the columns first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)
