"""The file of a speed benchmark: JSON lines, one for each row, written as soon as it is measured.

The first line is the header: the schema, the environment, and the largest difference. A benchmark that is
stopped leaves what it had measured; begun again on the same device, versions and commit, it measures the
rest. A row keeps the targets that it was measured with.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.targets import Measured, Row, Target, Times, outcomes, tflops
from benchmarks.gpu.timing import Absent
from benchmarks.gpu.workload import Workload

SCHEMA = "attest.speed/1"
# A resumed benchmark has another date than the one before it.
_MAY_DIFFER = ("date",)


@dataclass(frozen=True)
class Report:
    """What a file holds: what was measured on, the largest difference, and the rows with their times."""

    about: Mapping[str, str]
    largest_difference: float
    rows: tuple[tuple[Row, Measured], ...]

    def times(self, row: Row) -> Measured | None:
        """Return what was measured of a row; None if it was not, or was another row by the same name."""
        name = row_name(row)
        return next((measured for known, measured in self.rows if row_name(known) == name), None)


def row_name(row: Row) -> tuple[Any, ...]:
    """Return what was timed, by which a row is known; targets may change."""
    return (row.name, row.direction, tuple(sorted(row.entries.items())))


class RowsFile:
    """A file of rows, to which rows are appended.

    Raises ValueError in one sentence if the file exists and is no such file, or was measured elsewhere.
    """

    def __init__(self, path: Path, about: Mapping[str, str], largest_difference: float) -> None:
        self.path = path
        if path.exists() and path.stat().st_size:
            _refuse_other(path, about)
            _drop_broken_line(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._append({"schema": SCHEMA, "about": dict(about), "largest_difference": largest_difference})

    def add(self, row: Row, measured: Measured) -> None:
        """Append one row."""
        self._append(row_to_json(row, measured))

    def read(self) -> Report:
        """Return everything in the file."""
        return read_report(self.path)

    def _append(self, data: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_report(path: Path) -> Report:
    """Read a file of rows, without a last line that was cut off. Raises ValueError that names the file."""
    first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
    header = _header(first, path)
    try:
        rows = tuple(row_from_json(json.loads(line)) for line in lines)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: broken row: {type(error).__name__}: {error}") from error
    return Report(header["about"], header["largest_difference"], rows)


def row_to_json(row: Row, measured: Measured) -> dict[str, Any]:
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
        }
        entries.append(about | numbers)
    targets = [asdict(it.target) | {"ratio": it.ratio, "outcome": it.word} for it in outcomes(row, measured)]
    return {
        "name": row.name,
        "direction": row.direction,
        "note": row.note,
        "entries": entries,
        "targets": targets,
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
            Absent(entry["absent"]) if absent else Times(tuple(entry["samples_seconds"]), entry["difference"])
        )
    targets = tuple(Target(it["other"], it["kind"], it["bound"]) for it in data["targets"])
    return Row(data["name"], data["direction"], entries, targets, data["note"]), measured


def _switched_on(workload: Workload) -> dict[str, Any]:
    return {name: value for name, value in asdict(workload).items() if value not in (None, False, 0)}


def _header(line: str, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: not a file of rows: its first line is no JSON") from error
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a file of rows: its first line names no schema {SCHEMA}")
    return header


def _refuse_other(path: Path, about: Mapping[str, str]) -> None:
    with path.open(encoding="utf-8") as file:
        before = _header(file.readline(), path)["about"]
    names = [name for name in {**before, **about} if name not in _MAY_DIFFER]
    for name in names:
        if before.get(name) != about.get(name):
            raise ValueError(
                f"{path}: measured with {name} {before.get(name)}, now it is {about.get(name)}: choose "
                "another --out, or move the file away"
            )
    if not about["commit"] or about["commit"].endswith("+dirty"):
        raise ValueError(
            f"{path}: measured with uncommitted code, which may have changed since: choose another --out, or "
            "move the file away"
        )


def _drop_broken_line(path: Path) -> None:
    """Cut off a last line without an end: it was being written when its benchmark was killed."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
