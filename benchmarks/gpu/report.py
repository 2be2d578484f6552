"""Reports of speed: the verdict on each target, and the tables."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.problem import DIRECTIONS, Problem, operations, visible_pairs
from benchmarks.gpu.timing import Absent, Timing

OURS = "ours"  # the kernels that a report judges
PLAIN = "ours, plain"


@dataclass(frozen=True)
class Target:
    """A bound on a ratio of ours to another entry: speed at least, or the cost of a visible pair at most."""

    other: str
    kind: str  # "speed" or "cost"
    bound: float

    def met_by(self, ratio: float) -> bool:
        return ratio >= self.bound if self.kind == "speed" else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.kind == 'speed' else '<='} {self.bound:g}x"


@dataclass(frozen=True)
class Row:
    """What is timed in turns: contenders and their problems by label, of which OURS is judged."""

    name: str
    direction: str
    entries: Mapping[str, tuple[str, Problem]]
    targets: tuple[Target, ...]
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.direction.replace('_', ' + ')}"


@dataclass(frozen=True)
class Result:
    """What one entry came to. difference: from the first contender, if it computed the same problem."""

    samples: tuple[float, ...]  # seconds per call
    difference: float | None = None

    @property
    def seconds(self) -> float:
        return median(self.samples)


@dataclass(frozen=True)
class Judged:
    """One target of a row beside what came of it; no ratio where an entry is absent."""

    target: Target
    ratio: float | None

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "absent"
        return "met" if self.target.met_by(self.ratio) else "missed"


type Results = Mapping[str, Result | Absent]


def read_rows(path: Path, chosen: Sequence[str] = ()) -> tuple[list[Row], Timing, float]:
    """The rows of a file of targets, how to time them, and the largest difference.

    chosen: the contenders to time, OURS among them or not; by default OURS and those that the file names.
    """
    data = tomllib.loads(path.read_text())
    labels = chosen or (OURS, *data["contenders"])
    contenders = {label: data["ours"] if label == OURS else label for label in labels}
    rows = [_peers_row(entry, direction, contenders) for entry in data["peers"] for direction in DIRECTIONS]
    if OURS in contenders:
        features = product(data["features"], DIRECTIONS)
        rows += [_features_row(data["ours"], entry, direction) for entry, direction in features]
    timing = dict(data["timing"])
    largest_difference = timing.pop("largest_difference")
    return rows, Timing(**timing), largest_difference


def _peers_row(entry: Mapping[str, Any], direction: str, contenders: Mapping[str, str]) -> Row:
    problem = Problem(**entry["problem"])
    bounds = entry.get(direction, {}).items() if OURS in contenders else ()
    targets = tuple(Target(peer, "speed", bound) for peer, bound in bounds if peer in contenders)
    entries = {label: (contender, problem) for label, contender in contenders.items()}
    return Row(entry["name"], direction, entries, targets)


def _features_row(ours: str, entry: Mapping[str, Any], direction: str) -> Row:
    entries = {OURS: (ours, Problem(**entry["problem"])), PLAIN: (ours, Problem(**entry["plain"]))}
    targets = (Target(PLAIN, "cost", entry["cost"]),) if "cost" in entry else ()
    return Row(entry["name"], direction, entries, targets, entry["plain_is"])


def judge(row: Row, results: Results) -> list[Judged]:
    """Each target of the row with its ratio."""

    def cost(label: str) -> float | None:
        result = results[label]
        if isinstance(result, Absent):
            return None
        return result.seconds / visible_pairs(row.entries[label][1])

    judged: list[Judged] = []
    for target in row.targets:
        ours, other = cost(OURS), cost(target.other)
        if ours is None or other is None:
            judged.append(Judged(target, None))
        else:
            judged.append(Judged(target, other / ours if target.kind == "speed" else ours / other))
    return judged


def as_data(row: Row, results: Results) -> dict[str, Any]:
    """A row for the JSON file."""
    entries = []
    for label, (contender, problem) in row.entries.items():
        result = results[label]
        about = {"label": label, "contender": contender, "problem": vars(problem)}
        if isinstance(result, Absent):
            entries.append(about | {"absent": result.reason})
            continue
        numbers = {
            "milliseconds": 1e3 * result.seconds,
            "tflops": _tflops(row, label, result),
            "difference": result.difference,
            "samples_milliseconds": [1e3 * sample for sample in result.samples],
        }
        entries.append(about | numbers)
    targets = [vars(it.target) | {"ratio": it.ratio, "verdict": it.verdict} for it in judge(row, results)]
    return {
        "name": row.name,
        "direction": row.direction,
        "note": row.note,
        "entries": entries,
        "targets": targets,
    }


def as_markdown(
    about: Mapping[str, str], measured: Iterable[tuple[Row, Results]], largest_difference: float
) -> str:
    """The whole report: what it ran on, the targets, and every time."""
    measured = list(measured)
    times = [
        _time_cells(row, results, label, largest_difference)
        for row, results in measured
        for label in row.entries
    ]
    parts = (
        "# Speed of the attention kernels",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "Medians of calls in bfloat16, contenders in turns in one process. Operations are counted over the "
        "visible pairs, forward + backward as 3.5 times forward; the gradients are those of query, key and "
        f"value. Difference: ||a - b|| / ||b|| from the first contender, at most {largest_difference:g}. "
        "tokamax runs the configurations of its heuristics, nothing autotuned.",
        "## Targets",
        targets_table(measured),
        "## Times",
        table(("row", "contender", "problem", "ms", "TFLOP/s", "difference"), times),
    )
    return "\n\n".join(parts) + "\n"


def targets_table(measured: Iterable[tuple[Row, Results]]) -> str:
    """One line for each target, the missed ones in capitals, and how many are met."""
    lines, verdicts = [], []
    for row, results in measured:
        ours = results.get(OURS)
        time, tflops = "absent", ""
        if isinstance(ours, Result):
            time, tflops = f"{1e3 * ours.seconds:.3f}", f"{_tflops(row, OURS, ours):.0f}"
        for it in judge(row, results):
            against = f"{it.target.other} ({row.note})" if row.note else it.target.other
            ratio = "" if it.ratio is None else f"{it.ratio:.2f}x"
            verdict = it.verdict.upper() if it.verdict == "missed" else it.verdict
            lines.append((row.title, time, tflops, against, ratio, str(it.target), verdict))
            verdicts.append(it.verdict)
    header = ("row", "ours, ms", "TFLOP/s", "against", "ratio", "target", "verdict")
    return f"{table(header, lines)}\n\n{verdicts.count('met')} of {len(verdicts)} targets met."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, its columns aligned so that it also reads well as it is."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, rule, *rows)
    )


def _time_cells(row: Row, results: Results, label: str, largest_difference: float) -> tuple[str, ...]:
    result, problem = results[label], row.entries[label][1]
    name = f"{label} ({row.note})" if label == PLAIN else label
    if isinstance(result, Absent):
        reason = result.reason.replace("|", "\\|")
        return row.title, name, problem.shape, f"absent: {reason}", "", ""
    difference = "" if result.difference is None else f"{result.difference:.1e}"
    if result.difference is not None and not result.difference <= largest_difference:
        difference += " DIFFERS"
    return (
        row.title,
        name,
        problem.shape,
        f"{1e3 * result.seconds:.3f}",
        f"{_tflops(row, label, result):.0f}",
        difference,
    )


def _tflops(row: Row, label: str, result: Result) -> float:
    return operations(row.entries[label][1], row.direction) / result.seconds / 1e12
