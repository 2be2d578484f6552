"""Rows and targets, from the files of targets: what is measured side by side, and what is aimed at."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from attest.conformance.tuning.workload import Workload
from benchmarks.contenders import CONTENDERS
from benchmarks.record import OURS, Entry, Row, Target
from benchmarks.timing import Timing
from benchmarks.workload import DIRECTIONS

PLAIN = "ours, plain"
FOLDER = Path(__file__).parent / "gpu_targets"
CPU = Path(__file__).parent / "targets.toml"
MODELS = FOLDER / "models.toml"
# What is compiled to be timed, and how long compiling takes.
TO_COMPILE = "seconds to compile"


def read(path: Path) -> dict[str, Any]:
    """Return the data of a file of targets."""
    return tomllib.loads(path.read_text())


def read_rows(
    path: Path, chosen: Sequence[str] = (), models: Path = MODELS
) -> tuple[list[Row], Timing, float]:
    """Return the rows of a file of targets of speed, how to time them, and the largest difference.

    chosen: the contenders to time, OURS among them or not; by default OURS and those that the file names.
    models: the file of the models' workloads, on which the same contenders are timed. A file of targets has
        none for them, or the same for all in its table `models`; or says `models = false` and leaves them.
    Raises ValueError for a contender that there is not.
    """
    data = read(path)
    known = (OURS, *CONTENDERS)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"--contenders {', '.join(unknown)}: expected some of {', '.join(known)}.")
    contenders = {
        label: data["ours"] if label == OURS else label for label in chosen or (OURS, *data["contenders"])
    }
    beside_peers = list(data.get("peers", ()))
    if (bounds := data.get("models", {})) is not False:
        beside_peers += [bounds | entry for entry in read(models)["models"]]
    rows = rows_of(
        beside_peers, contenders, lambda bounds: [Target(peer, "speed", it) for peer, it in bounds.items()]
    )
    if OURS in contenders:
        features = product(data.get("features", ()), DIRECTIONS)
        rows += [_features_row(data["ours"], entry, direction) for entry, direction in features]
    timing = dict(data["timing"])
    largest_difference = timing.pop("largest_difference")
    return rows, Timing(**timing), largest_difference


def read_programs(path: Path = FOLDER / "compile.toml") -> list[Row]:
    """Return the rows of compile times: targets are ratios to the peer's seconds, or seconds."""
    data = read(path)
    ours, *others = data["contenders"]

    def targets(bounds: Mapping[str, float]) -> list[Target]:
        if "seconds" in bounds:
            return [Target("", "value", bounds["seconds"])]
        return [Target(data["peer"], "cost", bounds["most"])]

    return rows_of(data["programs"], {OURS: ours, **{it: it for it in others}}, targets, unit=TO_COMPILE)


def rows_of(
    entries: Sequence[Mapping[str, Any]],
    contenders: Mapping[str, str],
    targets: Callable[[Mapping[str, float]], Sequence[Target]],
    **options: Any,
) -> list[Row]:
    """Return a row for each entry and direction, of contenders by label; its bounds become targets.

    An entry may name another contender as OURS. Targets of contenders that are left out are left out, too.
    """
    rows: list[Row] = []
    for entry, direction in product(entries, DIRECTIONS):
        workload = Workload(**entry["workload"])
        found = targets(entry.get(direction, {})) if OURS in contenders else ()
        own = {OURS: entry["ours"]} if "ours" in entry and OURS in contenders else {}
        rows.append(
            Row(
                entry["name"],
                direction,
                {label: Entry(contender, workload) for label, contender in {**contenders, **own}.items()},
                tuple(it for it in found if it.other in (*contenders, "")),
                **options,
            )
        )
    return rows


def _features_row(ours: str, entry: Mapping[str, Any], direction: str) -> Row:
    entries = {
        OURS: Entry(entry.get("ours", ours), Workload(**entry["workload"])),
        PLAIN: Entry(ours, Workload(**entry["plain"])),
    }
    targets = (Target(PLAIN, "cost", entry["cost"]),) if "cost" in entry else ()
    return Row(entry["name"], direction, entries, targets, entry["plain_is"])
