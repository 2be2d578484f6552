"""The rows of a speed benchmark in its file: one line for each, with its targets and every sample."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import LinesFile, read_lines
from benchmarks.gpu.state import State
from benchmarks.gpu.targets import Measured, Row, Target, Times, outcomes, tflops
from benchmarks.gpu.timing import Absent
from benchmarks.gpu.workload import Workload

SCHEMA = "attest.speed/1"


@dataclass(frozen=True)
class Report:
    """What a file holds: what was measured on, the largest difference, and the rows with their times.

    states: of the GPU during a row, by `row_name`, where it was read.
    """

    about: Mapping[str, str]
    largest_difference: float
    rows: tuple[tuple[Row, Measured], ...]
    states: Mapping[tuple[Any, ...], State] = field(default_factory=dict[tuple[Any, ...], State])

    def times(self, row: Row) -> Measured | None:
        """Return what was measured of a row; None if it was not, or was another row by the same name."""
        name = row_name(row)
        return next((measured for known, measured in self.rows if row_name(known) == name), None)


def row_name(row: Row) -> tuple[Any, ...]:
    """Return what was timed, by which a row is known; targets may change."""
    return (row.name, row.direction, tuple(sorted(row.entries.items())))


class RowsFile:
    """A file of rows, to which rows are appended; a row keeps the targets that it was measured with.

    Raises ValueError in one sentence if the file exists and is no such file, or was measured elsewhere.
    """

    def __init__(self, path: Path, about: Mapping[str, str], largest_difference: float) -> None:
        header = {"schema": SCHEMA, "about": dict(about), "largest_difference": largest_difference}
        self._file = LinesFile(path, header)
        self.path = path

    def add(self, row: Row, measured: Measured, state: State | None = None) -> None:
        """Append one row, and the state of the GPU during it."""
        self._file.add(row_to_json(row, measured, state))

    def read(self) -> Report:
        """Return everything in the file."""
        return read_report(self.path)


def read_report(path: Path) -> Report:
    """Read a file of rows. Raises ValueError that names the file."""
    header, lines = read_lines(path, SCHEMA)
    try:
        rows = tuple(row_from_json(line) for line in lines)
        states = {
            row_name(row): State(tuple(line["state"]["mhz"]), tuple(line["state"]["watts"]))
            for line, (row, _) in zip(lines, rows, strict=True)
            if line.get("state")
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: broken row: {type(error).__name__}: {error}") from error
    return Report(header["about"], header["largest_difference"], rows, states)


def row_to_json(row: Row, measured: Measured, state: State | None = None) -> dict[str, Any]:
    """Return a row as its line holds it; what is at its default in a workload is left out."""
    entries: list[dict[str, Any]] = []
    for label, (contender, workload) in row.entries.items():
        times = measured[label]
        about = {"label": label, "contender": contender, "workload": _switched_on(workload)}
        if isinstance(times, Absent):
            entries.append(about | {"absent": times.reason})
            continue
        numbers = {
            "milliseconds": 1e3 * times.seconds,
            "tflops": tflops(row, label, times),
            "difference": times.difference,
            "samples_seconds": list(times.samples),
            "by_device": times.by_device,
        }
        entries.append(about | numbers)
    targets = [asdict(it.target) | {"ratio": it.ratio, "outcome": it.word} for it in outcomes(row, measured)]
    return {
        "name": row.name,
        "direction": row.direction,
        "note": row.note,
        "entries": entries,
        "targets": targets,
        "state": None if state is None else asdict(state),
    }


def row_from_json(data: Mapping[str, Any]) -> tuple[Row, Measured]:
    """Return the row and the times of a line; numbers that follow from the samples are not read."""
    entries: dict[str, tuple[str, Workload]] = {}
    measured: dict[str, Times | Absent] = {}
    for entry in data["entries"]:
        label = entry["label"]
        entries[label] = (entry["contender"], Workload(**entry["workload"]))
        absent = "absent" in entry
        measured[label] = (
            Absent(entry["absent"])
            if absent
            else Times(tuple(entry["samples_seconds"]), entry["difference"], entry.get("by_device", False))
        )
    targets = tuple(Target(it["other"], it["kind"], it["bound"]) for it in data["targets"])
    return Row(data["name"], data["direction"], entries, targets, data["note"]), measured


def _switched_on(workload: Workload) -> dict[str, Any]:
    return {name: value for name, value in asdict(workload).items() if value not in (None, False, 0)}
