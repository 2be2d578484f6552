"""The file of the benchmark of clusters: what was measured on each host."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attest.conformance.files import write_text
from attest.conformance.typed import convert, decode

REAL, PACED, SHORT = "real", "paced", "short"


@dataclass(frozen=True)
class Spent:
    """The costs of a process. seconds: of processor time. messages, bytes: received and sent by Dask."""

    seconds: float
    messages: int
    bytes: int

    def since(self, before: "Spent") -> "Spent":
        """Return what was spent since an earlier time."""
        return Spent(
            self.seconds - before.seconds, self.messages - before.messages, self.bytes - before.bytes
        )


@dataclass(frozen=True)
class Scheduled:
    """The work of a scheduler. batches: that workers computed. transitions: of tasks between states."""

    batches: int
    transitions: int
    spent: Spent

    def since(self, before: "Scheduled") -> "Scheduled":
        """Return what was done since an earlier time."""
        return Scheduled(
            self.batches - before.batches,
            self.transitions - before.transitions,
            self.spent.since(before.spent),
        )


@dataclass(frozen=True)
class Resting:
    """The costs of an idle scheduler in a second, mostly for heartbeats of its workers."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Run:
    """A run on a cluster, without what a run of one case takes.

    kind: REAL workers, or idle ones. PACED: they wait for each call as long as a real worker takes for it.
    SHORT: they wait so shortly that batches have as many calls as they can. seconds: of the run. lasted: the
    same, with the start of the caller. resting: of the same workers; None where it was not measured.
    """

    kind: str
    workers: int
    results: int
    seconds: float
    lasted: float
    scheduler: Scheduled
    caller: Spent
    resting: Resting | None = None

    @property
    def rate(self) -> float:
        """The results a second."""
        return self.results / self.seconds

    @property
    def scheduler_seconds(self) -> float:
        """The processor time of the scheduler, without that for heartbeats."""
        resting = self.resting.seconds if self.resting else 0.0
        return self.scheduler.spent.seconds - resting * self.lasted

    @property
    def scheduler_bytes(self) -> float:
        """The bytes that the scheduler received and sent, without heartbeats."""
        return self.scheduler.spent.bytes - (self.resting.bytes if self.resting else 0.0) * self.lasted

    def since(self, one_case: "Run") -> "Run":
        """Return a run without what a run of one case spends; its results and its time stay."""
        scheduler, caller = self.scheduler.since(one_case.scheduler), self.caller.since(one_case.caller)
        lasted = self.lasted - one_case.lasted
        return replace(self, lasted=lasted, scheduler=scheduler, caller=caller)


@dataclass(frozen=True)
class Row:
    """Results a second of so many workers, as medians: as processes, and on a cluster.

    ratio: of the two, as a median. runs: all rates by kind. counted: the first run on the cluster.
    """

    workers: int
    processes: float
    cluster: float
    ratio: float
    runs: Mapping[str, Sequence[float]]
    counted: Run


@dataclass(frozen=True)
class Host:
    """The measurements of one host. results_of_a_job: of the calls that are sent together, as a mean."""

    environment: Mapping[str, Any]
    subject: str
    results_of_a_job: float
    rows: tuple[Row, ...]
    idle: tuple[Run, ...]

    @property
    def name(self) -> str:
        """The number of cores and the processor."""
        return f"{self.environment['cores']} cores of {self.environment['processor']}"

    @property
    def can_be_modelled(self) -> bool:
        """Whether there are rows, and runs on idle workers whose batches have two sizes."""
        return bool(self.rows) and {PACED, SHORT} <= {run.kind for run in self.idle}

    @property
    def rate_of_a_worker(self) -> float:
        """The results a second of one worker, by the row with fewest workers."""
        row = min(self.rows, key=lambda row: row.workers)
        return row.cluster / row.workers


def read_hosts(path: Path) -> list[Host]:
    """Read the hosts of a file; none if there is no file. Raises ValueError that begins with its name."""
    if not path.exists():
        return []
    data = decode(path.read_bytes(), dict[str, Any], str(path))
    return [convert(host, Host, str(path)) for host in data["hosts"]]


def merged(*files: Sequence[Host]) -> list[Host]:
    """Return the hosts of several files, rows by workers; of what was measured twice, the later counts."""
    found: dict[str, Host] = {}
    for host in (host for hosts in files for host in hosts):
        before = found.get(host.name, host)
        rows = {row.workers: row for row in (*before.rows, *host.rows)}
        idle = {(run.kind, run.workers): run for run in (*before.idle, *host.idle)}
        ordered = tuple(rows[workers] for workers in sorted(rows))
        found[host.name] = replace(host, rows=ordered, idle=tuple(idle.values()))
    return list(found.values())


def write_hosts(hosts: Sequence[Host], path: Path) -> None:
    """Write hosts to a file."""
    write_text(path, json.dumps({"hosts": [asdict(host) for host in hosts]}, indent=1) + "\n")
