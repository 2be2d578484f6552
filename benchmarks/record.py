"""The record of a benchmark: what it ran on, and rows of contenders with their samples and targets.

Its file has JSON lines: a header with the schema and the run, and one line for each row, written when the row
is measured. A benchmark that is stopped leaves what it had measured; begun again on the same device, versions
and commit, it measures the rest.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from attest.conformance.tuning.workload import Workload
from benchmarks.workload import operations, visible_pairs

SCHEMA = "attest.benchmark/1"
# Earlier reports of speed: their rows have the same form.
_SPEED = "attest.speed/1"

OURS = "ours"  # the label of what a benchmark is about
SECONDS = "seconds"


@dataclass(frozen=True)
class Run:
    """The date, commit and device of a benchmark. versions: of the driver and distributions; also devices."""

    date: str
    commit: str
    device: str
    versions: Mapping[str, str]

    def about(self) -> dict[str, str]:
        """Return everything by its name."""
        return {"date": self.date, "commit": self.commit, "device": self.device, **self.versions}


@dataclass(frozen=True)
class State:
    """The lowest and highest readings of the GPU: of the clock of the multiprocessors, and of the power."""

    mhz: tuple[float, float]
    watts: tuple[float, float]

    def __str__(self) -> str:
        (slow, fast), (low, high) = self.mhz, self.watts
        return f"{slow:.0f} to {fast:.0f} MHz, {low:.0f} to {high:.0f} W"


@dataclass(frozen=True)
class Absent:
    """Why there is no result."""

    reason: str


@dataclass(frozen=True)
class Samples:
    """The measurements of one entry, in the unit of its row: most often seconds per call.

    difference: ||a - b|| / ||b|| from the first contender on the same workload, None for that one itself. It
    shows a contender that computes something else; `attest check` decides whether a kernel is right.
    by_device: whether they are times of the device, without the dispatch.
    """

    values: tuple[float, ...]
    difference: float | None = None
    by_device: bool = False

    @property
    def median(self) -> float:
        return median(self.values)


type Measured = Mapping[str, Samples | Absent]  # of one row, by label


@dataclass(frozen=True)
class Entry:
    """A contender and its workload, where it has one, on so many devices."""

    contender: str
    workload: Workload | None = None
    devices: int = 1

    def call(self) -> Workload:
        """Return the workload. Raises ValueError where there is none."""
        if self.workload is None:
            raise ValueError(f"{self.contender}: expected a workload, got none")
        return self.workload


@dataclass(frozen=True)
class Target:
    """A bound on a ratio of ours to another entry, or on our value.

    kind: "speed", at least so many times that of the other; "cost" of a visible pair, at most so many times;
    "value", at most. other: the label of the other entry. of: the labels of ours, of which the best counts.
    """

    other: str
    kind: str
    bound: float
    of: tuple[str, ...] = (OURS,)

    def met_by(self, ratio: float) -> bool:
        return ratio >= self.bound if self.kind == "speed" else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.kind == 'speed' else '<='} {self.bound:g}{'' if self.kind == 'value' else 'x'}"


@dataclass(frozen=True)
class Row:
    """Contenders that are measured side by side, and their workloads, by label."""

    name: str
    direction: str
    entries: Mapping[str, Entry]
    targets: tuple[Target, ...] = ()
    note: str = ""
    unit: str = SECONDS

    @property
    def title(self) -> str:
        """The name, and the direction in words."""
        return f"{self.name}, {self.direction.replace('_', ' + ')}" if self.direction else self.name

    @property
    def key(self) -> tuple[Any, ...]:
        """The name, direction, unit and entries, by which a row is known; targets may change."""
        return self.name, self.direction, self.unit, tuple(sorted(self.entries.items(), key=lambda it: it[0]))


@dataclass(frozen=True)
class Result:
    """The measurements of a row, and the state of the GPU meanwhile, where it was read."""

    row: Row
    measured: Measured
    state: State | None = None

    def value(self, label: str) -> float | None:
        """Return the median of an entry; None if it is absent."""
        found = self.measured.get(label)
        return found.median if isinstance(found, Samples) else None

    def ratio(self, target: Target) -> float | None:
        """Return what a target is compared with; None where an entry is absent."""
        if target.kind == "value":
            return min((it for label in target.of if (it := self.value(label)) is not None), default=None)
        other = self._cost(target.other)
        ours = min((it for label in target.of if (it := self._cost(label)) is not None), default=None)
        if ours is None or other is None:
            return None
        return other / ours if target.kind == "speed" else ours / other

    def outcome(self, target: Target) -> str:
        """Return whether a target is met: "met", "missed" or "absent"."""
        ratio = self.ratio(target)
        return "absent" if ratio is None else "met" if target.met_by(ratio) else "missed"

    def tflops(self, label: str) -> float | None:
        """Return the speed of an entry on each of its devices, in 10**12 operations a second."""
        value, entry = self.value(label), self.row.entries[label]
        if value is None or entry.workload is None:
            return None
        return operations(entry.workload, self.row.direction) / value / entry.devices / 1e12

    def _cost(self, label: str) -> float | None:
        """The value of a visible pair, times the devices."""
        value, entry = self.value(label), self.row.entries[label]
        if value is None:
            return None
        return value * entry.devices / (visible_pairs(entry.workload) if entry.workload else 1)


@dataclass(frozen=True)
class Report:
    """The contents of a file: the run, and the results of rows."""

    run: Run
    results: tuple[Result, ...]

    def of(self, row: Row) -> Result | None:
        """Return the result of a row; None if it was not measured, or was another row by the same name."""
        return next((it for it in self.results if it.row.key == row.key), None)


class ReportFile:
    """A file of results, to which results are appended; a row keeps the targets that it was measured with.

    Raises ValueError in one sentence if the file exists and is of another schema, or was measured elsewhere.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path = path
        if path.exists() and path.stat().st_size:
            _refuse_other(path, run)
            _drop_broken_line(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._append({"schema": SCHEMA, "about": run.about()})

    def add(self, result: Result) -> None:
        """Append one result, and hand it to the disk."""
        self._append(result_to_json(result))

    def read(self) -> Report:
        """Return everything in the file."""
        return read_report(self.path)

    def _append(self, data: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_report(path: Path) -> Report:
    """Return the report of a file, without a last line that was cut off. Raises ValueError that names it."""
    first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
    run = _run(first, path)
    try:
        return Report(run, tuple(result_from_json(json.loads(line)) for line in lines))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: broken row: {type(error).__name__}: {error}") from error


def result_to_json(result: Result) -> dict[str, Any]:
    """Return a result as its line holds it; what is at its default in a workload is left out."""
    row = result.row
    entries: list[dict[str, Any]] = []
    for label, entry in row.entries.items():
        about: dict[str, Any] = {"label": label, "contender": entry.contender, "devices": entry.devices}
        if entry.workload is not None:
            about["workload"] = entry.workload.switched_on
        found = result.measured[label]
        if isinstance(found, Absent):
            entries.append(about | {"absent": found.reason})
            continue
        if row.unit == SECONDS:
            about |= {"milliseconds": 1e3 * found.median, "tflops": result.tflops(label)}
        entries.append(
            about
            | {"samples": list(found.values), "difference": found.difference, "by_device": found.by_device}
        )
    return {
        "name": row.name,
        "direction": row.direction,
        "note": row.note,
        "unit": row.unit,
        "entries": entries,
        "targets": [
            asdict(it) | {"ratio": result.ratio(it), "outcome": result.outcome(it)} for it in row.targets
        ],
        "state": None if result.state is None else asdict(result.state),
    }


def result_from_json(data: Mapping[str, Any]) -> Result:
    """Return the result of a line; numbers that follow from the samples are not read."""
    entries: dict[str, Entry] = {}
    measured: dict[str, Samples | Absent] = {}
    for it in data["entries"]:
        workload = Workload(**it["workload"]) if "workload" in it else None
        entries[it["label"]] = Entry(it["contender"], workload, it.get("devices", 1))
        if "absent" in it:
            measured[it["label"]] = Absent(it["absent"])
        else:
            values = it["samples"] if "samples" in it else it["samples_seconds"]
            measured[it["label"]] = Samples(tuple(values), it["difference"], it.get("by_device", False))
    targets = tuple(
        Target(it["other"], it["kind"], it["bound"], tuple(it.get("of", (OURS,)))) for it in data["targets"]
    )
    row = Row(data["name"], data["direction"], entries, targets, data["note"], data.get("unit", SECONDS))
    state = data.get("state")
    return Result(row, measured, state and State(tuple(state["mhz"]), tuple(state["watts"])))


def _run(line: str, path: Path) -> Run:
    """Return the run of a header, whose versions are by their names beside the rest."""
    try:
        header = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: its first line is no JSON, expected a header of {SCHEMA}") from error
    if not isinstance(header, dict) or header.get("schema") not in (SCHEMA, _SPEED):
        raise ValueError(f"{path}: its first line is no header of {SCHEMA}")
    about: dict[str, str] = dict(header["about"])
    return Run(about.pop("date"), about.pop("commit"), about.pop("device"), about)


def _refuse_other(path: Path, run: Run) -> None:
    with path.open(encoding="utf-8") as file:
        before, now = _run(file.readline(), path).about(), run.about()
    for name in {**before, **now}:
        # A resumed benchmark has another date than the one before it.
        if name != "date" and before.get(name) != now.get(name):
            raise ValueError(
                f"{path}: measured with {name} {before.get(name)}, now it is {now.get(name)}: choose another "
                "--out, or move the file away"
            )
    if not run.commit or run.commit.endswith("+dirty"):
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
