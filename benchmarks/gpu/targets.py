"""Rows of a speed benchmark and their targets: what is timed side by side, and which ratios are aimed at."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.timing import Absent, Timing
from benchmarks.gpu.workload import DIRECTIONS, Workload, operations, visible_pairs

OURS = "ours"  # the kernels that a report is about
PLAIN = "ours, plain"
MODELS = Path(__file__).parents[1] / "gpu_targets" / "models.toml"


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


def titled(name: str, direction: str) -> str:
    """Return the title of a row: its name and its direction in words."""
    return f"{name}, {direction.replace('_', ' + ')}"


@dataclass(frozen=True)
class Row:
    """What is timed in turns: contenders and their workloads by label, of which OURS has the targets."""

    name: str
    direction: str
    entries: Mapping[str, tuple[str, Workload]]
    targets: tuple[Target, ...]
    note: str = ""

    @property
    def title(self) -> str:
        return titled(self.name, self.direction)


@dataclass(frozen=True)
class Times:
    """The times of one entry: seconds per call, by sample.

    difference: ||a - b|| / ||b|| from the first contender, None for itself and for another workload. It
    shows a contender that computes something else; `attest check` decides whether a kernel is right.
    by_device: whether they are times of the device, without the dispatch.
    """

    samples: tuple[float, ...]
    difference: float | None = None
    by_device: bool = False

    @property
    def seconds(self) -> float:
        return median(self.samples)


@dataclass(frozen=True)
class Outcome:
    """One target of a row and the ratio that was measured; None where an entry is absent."""

    target: Target
    ratio: float | None

    @property
    def word(self) -> str:
        if self.ratio is None:
            return "absent"
        return "met" if self.target.met_by(self.ratio) else "missed"


type Measured = Mapping[str, Times | Absent]  # of one row, by label


def read_rows(
    path: Path, chosen: Sequence[str] = (), models: Path = MODELS
) -> tuple[list[Row], Timing, float]:
    """Return the rows of a file of targets, how to time them, and the largest difference.

    chosen: the contenders to time, OURS among them or not; by default OURS and those that the file names.
    models: the file of the models' workloads, on which the same contenders are timed. A file of targets has
        none for them, or the same for all in its table `models`; or says `models = false` and leaves them.
    """
    data = tomllib.loads(path.read_text())
    labels = chosen or (OURS, *data["contenders"])
    contenders = {label: data["ours"] if label == OURS else label for label in labels}
    beside_peers = list(data.get("peers", ()))
    if (bounds := data.get("models", {})) is not False:
        beside_peers += [bounds | entry for entry in read_models(models)]
    rows = [_peers_row(entry, direction, contenders) for entry in beside_peers for direction in DIRECTIONS]
    if OURS in contenders:
        features = product(data.get("features", ()), DIRECTIONS)
        rows += [_features_row(data["ours"], entry, direction) for entry, direction in features]
    timing = dict(data["timing"])
    largest_difference = timing.pop("largest_difference")
    return rows, Timing(**timing), largest_difference


def read_models(path: Path = MODELS) -> list[dict[str, Any]]:
    """Return the workloads that models have, as entries of a file of targets."""
    return tomllib.loads(path.read_text())["models"]


def _peers_row(entry: Mapping[str, Any], direction: str, contenders: Mapping[str, str]) -> Row:
    workload = Workload(**entry["workload"])
    bounds = entry.get(direction, {}).items() if OURS in contenders else ()
    targets = tuple(Target(peer, "speed", bound) for peer, bound in bounds if peer in contenders)
    entries = {label: (contender, workload) for label, contender in contenders.items()}
    return Row(entry["name"], direction, entries, targets)


def _features_row(ours: str, entry: Mapping[str, Any], direction: str) -> Row:
    entries = {OURS: (ours, Workload(**entry["workload"])), PLAIN: (ours, Workload(**entry["plain"]))}
    targets = (Target(PLAIN, "cost", entry["cost"]),) if "cost" in entry else ()
    return Row(entry["name"], direction, entries, targets, entry["plain_is"])


def outcomes(row: Row, measured: Measured) -> list[Outcome]:
    """Return each target of the row with its ratio."""

    def cost(label: str) -> float | None:
        times = measured[label]
        if isinstance(times, Absent):
            return None
        return times.seconds / visible_pairs(row.entries[label][1])

    found: list[Outcome] = []
    for target in row.targets:
        ours, other = cost(OURS), cost(target.other)
        if ours is None or other is None:
            found.append(Outcome(target, None))
        else:
            found.append(Outcome(target, other / ours if target.kind == "speed" else ours / other))
    return found


def tflops(row: Row, label: str, times: Times) -> float:
    """Return the speed of an entry in 10**12 operations a second."""
    return operations(row.entries[label][1], row.direction) / times.seconds / 1e12
