"""Reports of speed in Markdown: the targets, and every time."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from benchmarks.gpu.rows import Report, row_name
from benchmarks.gpu.targets import OURS, PLAIN, Measured, Row, Times, outcomes, tflops
from benchmarks.gpu.timing import Absent


def as_markdown(report: Report) -> str:
    """Return the whole report: what it ran on, the targets, and every time."""
    times = [
        _time_cells(row, measured, label, report.largest_difference)
        for row, measured in report.rows
        for label in row.entries
    ]
    parts = (
        "# Speed of the attention kernels",
        "\n".join(f"- {name}: {value}" for name, value in report.about.items()),
        "Medians of calls in bfloat16, contenders in turns in one process. Workloads are batch x queries x "
        "keys, query heads on key heads, head dim/value dim. Operations are counted over the visible pairs, "
        "forward + backward as 3.5 times forward; the gradients are those of query, key and value. "
        f"Difference: ||a - b|| / ||b|| from the first contender, at most {report.largest_difference:g}. "
        "tokamax runs the configurations of its heuristics, nothing autotuned. Times marked (device) are "
        "those of the kernels alone, by JAX's profiler, as the dispatch of such a call takes longer.",
        "## Targets",
        targets_table(report.rows),
        "## Geometric means",
        "Of the contender's time over ours, over all rows that have both; above 1 ours are ahead.",
        means_table(report.rows),
        "## Times",
        table(("row", "contender", "workload", "ms", "TFLOP/s", "difference"), times),
        *_states(report),
    )
    return "\n\n".join(parts) + "\n"


def targets_table(rows: Iterable[tuple[Row, Measured]]) -> str:
    """Return one line for each target, the missed ones in capitals, and how many are met."""
    lines, words = [], []
    for row, measured in rows:
        ours = measured.get(OURS)
        time, speed = "absent", ""
        if isinstance(ours, Times):
            time, speed = f"{1e3 * ours.seconds:.3f}", f"{tflops(row, OURS, ours):.0f}"
        for it in outcomes(row, measured):
            against = f"{it.target.other} ({row.note})" if row.note else it.target.other
            ratio = "" if it.ratio is None else f"{it.ratio:.2f}x"
            word = it.word.upper() if it.word == "missed" else it.word
            lines.append((row.title, time, speed, against, ratio, str(it.target), word))
            words.append(it.word)
    header = ("row", "ours, ms", "TFLOP/s", "against", "ratio", "target", "outcome")
    return f"{table(header, lines)}\n\n{words.count('met')} of {len(words)} targets met."


def means_table(rows: Iterable[tuple[Row, Measured]]) -> str:
    """Return the geometric mean of each contender's time over ours, by direction, and that of the fastest."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row, measured in rows:
        ours = measured.get(OURS)
        others = {label: it.seconds for label, it in measured.items() if isinstance(it, Times)}
        if not isinstance(ours, Times) or row.note or len(others) == 1:
            continue
        del others[OURS]
        for label, seconds in (others | {"the fastest of them": min(others.values())}).items():
            ratios.setdefault((row.direction, label), []).append(seconds / ours.seconds)
    lines = [
        (direction, label, f"{geometric_mean(found):.2f}x", f"{min(found):.2f}x", str(len(found)))
        for (direction, label), found in sorted(ratios.items())
    ]
    return table(("direction", "against", "mean", "least", "rows"), lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, its columns aligned so that it also reads well as it is."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, rule, *rows)
    )


def absent_cell(absent: Absent) -> str:
    """Return the reason as a cell of a table, in which a bar would end it."""
    return "absent: " + absent.reason.replace("|", "\\|")


def _states(report: Report) -> tuple[str, ...]:
    """The section on clock and power, if any was read."""
    lines = [
        (row.title, str(report.states[row_name(row)]))
        for row, _ in report.rows
        if row_name(row) in report.states
    ]
    if not lines:
        return ()
    return (
        "## Clock and power",
        "The lowest and highest readings of nvidia-smi while the contenders of a row were timed.",
        table(("row", "state"), lines),
    )


def _time_cells(row: Row, measured: Measured, label: str, largest_difference: float) -> tuple[str, ...]:
    times, workload = measured[label], row.entries[label][1]
    name = f"{label} ({row.note})" if label == PLAIN else label
    if isinstance(times, Absent):
        return row.title, name, workload.shape, absent_cell(times), "", ""
    difference = "" if times.difference is None else f"{times.difference:.1e}"
    if times.difference is not None and not times.difference <= largest_difference:
        difference += " DIFFERS"
    return (
        row.title,
        name,
        workload.shape,
        f"{1e3 * times.seconds:.3f}" + (" (device)" if times.by_device else ""),
        f"{tflops(row, label, times):.0f}",
        difference,
    )
