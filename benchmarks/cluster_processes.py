"""The processes of the benchmark of clusters: a scheduler and a caller that count, and idle workers.

Each is started with COMMAND and a name: `scheduler FOLDER`, `idle FOLDER ADDRESS WORKERS SECONDS` or
`caller FILE ARGUMENT ...`. Idle workers answer each call after so many seconds, with measurements of a
baseline: what the caller and the scheduler do is that of a run on real workers.
"""

import asyncio
import json
import sys
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from dask import config
from distributed import Client, Scheduler, Worker
from distributed.comm import tcp
from distributed.diagnostics.plugin import SchedulerPlugin

from attest.conformance.cluster import worker as in_worker
from attest.conformance.cluster.local_process import QUIET, end_with_caller
from attest.conformance.files import write_text
from attest.conformance.process.pool import Job, Outcome
from attest.conformance.process.settings import settle
from attest.conformance.record import Result, Verdict
from attest.conformance.records.record_file import read_record
from attest.conformance.running.choice import first_try
from benchmarks.cluster_record import Resting, Scheduled, Spent

COMMAND = "from benchmarks.cluster_processes import main; main()"
_BASELINE = Path(__file__).parents[1] / "reports/data/baselines/nvidia-h200/standard/pallas.mosaic_gpu.jsonl"
_RESTING_SECONDS = 5.0
_HEADER_BYTES = 8  # of a message, as its length


@dataclass
class Traffic:
    """The messages and bytes that this process has received and sent, through Dask's connections."""

    messages: int = 0
    bytes: int = 0


class Computed(SchedulerPlugin):
    """The number of batches that workers have computed: Dask reports each step of a task to its plugins."""

    def __init__(self) -> None:
        self.count = 0

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Count a task whose value is there."""
        self.count += finish == "memory"


TRAFFIC = Traffic()
COMPUTED = Computed()


def count_traffic() -> None:
    """Let Dask's connections of this process count in TRAFFIC."""
    write, read, read_bytes = tcp.TCP.write, tcp.TCP.read, tcp.read_bytes_rw

    async def counted_write(self: Any, *arguments: Any, **options: Any) -> int:
        size = await write(self, *arguments, **options)
        TRAFFIC.messages += 1
        TRAFFIC.bytes += size
        return size

    async def counted_read(self: Any, *arguments: Any, **options: Any) -> Any:
        message = await read(self, *arguments, **options)
        TRAFFIC.messages += 1
        TRAFFIC.bytes += _HEADER_BYTES
        return message

    async def counted_read_bytes(stream: Any, size: int) -> Any:
        frame = await read_bytes(stream, size)
        TRAFFIC.bytes += size
        return frame

    tcp.TCP.write, tcp.TCP.read, tcp.read_bytes_rw = counted_write, counted_read, counted_read_bytes


def spent() -> Spent:
    """Return what this process has spent since it started."""
    return Spent(time.process_time(), TRAFFIC.messages, TRAFFIC.bytes)


def scheduled(dask_scheduler: Any) -> Scheduled:
    """Return what the scheduler of this process has done since it started."""
    return Scheduled(COMPUTED.count, dask_scheduler.transition_counter, spent())


def scheduled_at(address: str) -> Scheduled:
    """Return what the scheduler at an address has done since it started."""
    with Client(address, set_as_default=False) as client:
        found: Any = client.run_on_scheduler(scheduled)
        return found


def resting_at(address: str) -> Resting:
    """Return what the scheduler at an address spends in a second in which nothing runs."""
    with Client(address, set_as_default=False) as client:
        before: Any = client.run_on_scheduler(scheduled)
        time.sleep(_RESTING_SECONDS)
        after: Any = client.run_on_scheduler(scheduled)
    spent = after.since(before).spent
    return Resting(spent.seconds / _RESTING_SECONDS, spent.bytes / _RESTING_SECONDS)


def main() -> None:
    """Run the process that the arguments name."""
    kind, *arguments = sys.argv[1:]
    if kind == "caller":
        sys.exit(_call(Path(arguments[0]), arguments[1:]))
    threading.Thread(target=end_with_caller, daemon=True).start()
    config.set(QUIET)
    folder = Path(arguments[0])
    if kind == "scheduler":
        count_traffic()
        asyncio.run(_schedule(folder))
    asyncio.run(_idle(folder, arguments[1], int(arguments[2]), float(arguments[3])))


def _call(file: Path, arguments: list[str]) -> int:
    """Run `attest`, and write what this process has spent."""
    from attest.conformance.cli.commands import main as attest

    count_traffic()
    status = attest(arguments)
    write_text(file, json.dumps(asdict(spent())))
    return status


async def _schedule(folder: Path) -> None:
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        scheduler.add_plugin(COMPUTED)
        write_text(folder / "address", scheduler.address)
        await scheduler.finished()


async def _idle(folder: Path, address: str, workers: int, seconds: float) -> None:
    """Run workers of one thread each, whose calls take so many seconds."""
    settle()
    in_worker.describe = _describe
    in_worker.run_batch = partial(_answers, seconds)
    async with AsyncExitStack() as stack:
        for number in range(workers):
            scratch = folder / f"idle-{number}"
            scratch.mkdir()
            await stack.enter_async_context(
                Worker(
                    address,
                    nthreads=1,
                    host="127.0.0.1",
                    name=f"idle-{number}",
                    local_directory=str(scratch),
                    memory_limit=0,
                )
            )
        write_text(folder / "ready", "")
        await asyncio.Event().wait()


def _describe(_names: object, facts: in_worker.Facts) -> in_worker.Description:
    return in_worker.Description("", _found(facts), {})


@cache
def _found(facts: in_worker.Facts) -> dict[str, Any]:
    """Return the facts of this process, which do not change."""
    return facts()


def _answers(seconds: float, jobs: tuple[Job, ...], _timeout: float) -> list[Outcome]:
    """Return results of all calls of some jobs, after their time."""
    return [_answer(call, seconds) for job in jobs for call in job.calls]


def _answer(call: Job, seconds: float) -> Outcome:
    draw, checks = call.argument
    case = first_try(draw)
    time.sleep(seconds)
    if case is None:
        return Outcome(call, [])
    canned = _canned()
    return Outcome(call, [replace(canned[check], subject=call.subject, case=case) for check in checks])


@cache
def _canned() -> dict[str, Result]:
    """Return a result of each check of the baseline, one with the most measurements."""
    found: dict[str, Result] = {}
    for result in read_record(_BASELINE).results:
        most = found.get(result.check)
        if result.verdict is Verdict.PASS and (
            most is None or len(result.measurements) > len(most.measurements)
        ):
            found[result.check] = result
    return found
