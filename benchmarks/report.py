"""Reports of benchmarks in Markdown: the run, the targets, geometric means, every value, clock and power."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.record import OURS, SECONDS, Absent, Report, Result, Samples


@dataclass(frozen=True)
class Column:
    """A column of the table of values: the text of an entry, by its label."""

    name: str
    cell: Callable[[Result, str, Samples], str]


@dataclass(frozen=True)
class Layout:
    """The heading of a report, a paragraph on what was measured, and the columns of its table of values.

    best: a table of a benchmark that has no targets.
    """

    title: str
    text: str
    columns: tuple[Column, ...]
    best: Callable[[Sequence[Result]], str] | None = None


def _milliseconds(_result: Result, _label: str, found: Samples) -> str:
    return f"{1e3 * found.median:.3f}" + (" (device)" if found.by_device else "")


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: seconds as milliseconds."""
    return f"{1e3 * value:.3f} ms" if unit == SECONDS else f"{value:.4g} {unit}"


VALUE = Column("value", lambda result, _, found: quantity(found.median, result.row.unit))
MILLISECONDS = Column("ms", _milliseconds)
TFLOPS = Column("TFLOP/s", lambda result, label, _: f"{result.tflops(label) or 0:.0f}")


def difference_column(largest: float) -> Column:
    """Return the column of differences from the first contender, which marks those above the largest."""

    def cell(_result: Result, _label: str, found: Samples) -> str:
        apart = found.difference
        return "" if apart is None else f"{apart:.1e}" + ("" if apart <= largest else " DIFFERS")

    return Column("difference", cell)


def as_markdown(report: Report, layout: Layout) -> str:
    """Return the whole report."""
    values = [
        _value_cells(result, label, layout) for result in report.results for label in result.row.entries
    ]
    states = [(result.row.title, str(result.state)) for result in report.results if result.state]
    means = _means(report.results)
    parts = [
        f"# {layout.title}",
        "\n".join(f"- {name}: {value}" for name, value in report.run.about().items()),
        layout.text,
    ]
    if summary := summarized(report, layout):
        parts += ["## Targets" if layout.best is None else "## Best", summary]
    if means:
        parts += [
            "## Geometric means",
            "Of the contender's time over ours, over all rows that have both; above 1 ours are ahead.",
            table(("direction", "against", "mean", "least", "rows"), means),
        ]
    header = ("row", "contender", "workload", *(column.name for column in layout.columns))
    parts += ["## Values", table(header, values)]
    if states:
        parts += [
            "## Clock and power",
            "The lowest and highest readings of nvidia-smi while the contenders of a row were timed.",
            table(("row", "state"), states),
        ]
    return "\n\n".join(parts) + "\n"


def summarized(report: Report, layout: Layout) -> str:
    """Return the table of targets, or of what is best; nothing where there is neither."""
    if layout.best is not None:
        return layout.best(report.results)
    return targets_table(report.results) if any(it.row.targets for it in report.results) else ""


def targets_table(results: Iterable[Result]) -> str:
    """Return one line for each target, the missed ones in capitals, and how many are met."""
    lines: list[tuple[str, ...]] = []
    words: list[str] = []
    for result in results:
        row = result.row
        for target in row.targets:
            values = [it for label in target.of if (it := result.value(label)) is not None]
            ratio, word = result.ratio(target), result.outcome(target)
            note = f" ({row.note})" if row.note else ""
            lines.append(
                (
                    row.title,
                    target.of[0] if len(target.of) == 1 else "the best of " + ", ".join(target.of),
                    quantity(min(values), row.unit) if values else "absent",
                    f"{target.other}{note}",
                    "" if ratio is None or target.kind == "value" else f"{ratio:.2f}x",
                    str(target),
                    word.upper() if word == "missed" else word,
                )
            )
            words.append(word)
    header = ("row", "contender", "value", "against", "ratio", "target", "outcome")
    return f"{table(header, lines)}\n\n{words.count('met')} of {len(words)} targets met."


def _means(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Return the geometric mean of each contender's value over ours, by direction, and of the least one."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for result in results:
        values = {label: it for label in result.row.entries if (it := result.value(label)) is not None}
        ours = values.pop(OURS, None)
        if ours is None or result.row.note or not values or result.row.unit != SECONDS:
            continue
        for label, value in (values | {"the fastest of them": min(values.values())}).items():
            ratios.setdefault((result.row.direction, label), []).append(value / ours)
    return [
        (direction, label, f"{geometric_mean(found):.2f}x", f"{min(found):.2f}x", str(len(found)))
        for (direction, label), found in sorted(ratios.items())
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, its columns aligned so that it also reads well as it is."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, rule, *rows)
    )


def _value_cells(result: Result, label: str, layout: Layout) -> tuple[str, ...]:
    row, found = result.row, result.measured[label]
    workload = row.entries[label].workload
    shown = f"{label} ({row.note})" if row.note and label != OURS else label
    if isinstance(found, Absent):
        # A bar would end the cell.
        cells = ["absent: " + found.reason.replace("|", "\\|"), *[""] * (len(layout.columns) - 1)]
    else:
        cells = [column.cell(result, label, found) for column in layout.columns]
    return row.title, shown, "" if workload is None else workload.shape, *cells
