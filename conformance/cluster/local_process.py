"""A scheduler or a worker of a local cluster, as a process that ends when the caller does.

python -m attest.conformance.cluster.local_process scheduler FOLDER
python -m attest.conformance.cluster.local_process worker FOLDER ADDRESS NUMBER
"""

import asyncio
import os
import sys
import threading
from pathlib import Path

from dask import config
from distributed import Scheduler, Worker

from attest.conformance.files import write_text

# What nobody looks at here, and what takes a share of the processor from the kernels.
QUIET = {"distributed.worker.profile.enabled": False, "distributed.admin.system-monitor.interval": "10s"}


async def _scheduler(folder: Path) -> None:
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        write_text(folder / "address", scheduler.address)
        await scheduler.finished()


async def _worker(folder: Path, address: str, number: str) -> None:
    scratch = folder / number
    scratch.mkdir()
    async with Worker(
        address, nthreads=1, host="127.0.0.1", name=number, local_directory=str(scratch), memory_limit=0
    ) as worker:
        await worker.finished()


def end_with_caller() -> None:
    """End this process when the caller does."""
    sys.stdin.buffer.read()  # nothing is written: it returns when the caller's end closes
    os._exit(0)


def main() -> None:
    """Run what the arguments ask for until it ends, or the caller does."""
    threading.Thread(target=end_with_caller, daemon=True).start()
    config.set(QUIET)
    work = {"scheduler": _scheduler, "worker": _worker}[sys.argv[1]]
    asyncio.run(work(Path(sys.argv[2]), *sys.argv[3:]))
