"""What a query of a store found: a table on a terminal, CSV, and a plot as SVG."""

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attest.conformance.text import plural, printable

_STYLE: dict[Any, Any] = {"svg.hashsalt": "attest", "svg.fonttype": "none", "font.size": 8.0}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
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


def render_plot(title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[datetime, float]]]) -> str:
    """Return the lines over time as SVG: points by name, each (day, value)."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for name, points in lines.items():
            days: Any = [day for day, _ in points]
            axes.plot(days, [value for _, value in points], marker="o", label=name)
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.tick_params(axis="x", rotation=30)
        if lines:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=_NO_METADATA)
    return out.getvalue()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)
