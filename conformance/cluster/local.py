"""A cluster of this machine alone: a scheduler and workers as processes, which end with the caller."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from attest.conformance.process.settings import WorkerError

COMMAND = "from attest.conformance.cluster.local_process import main; main()"
_START_SECONDS = 120.0
_END_SECONDS = 10.0


class LocalCluster:
    """A scheduler and some workers of one thread each. Raises WorkerError if they do not start.

    address: of the scheduler. folder: for their logs and scratch files.
    """

    def __init__(self, workers: int, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self.address = self._start_scheduler()
            for number in range(workers):
                self._start("worker", self.address, str(number))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _start_scheduler(self) -> str:
        """Start the scheduler and return the address that it writes to its file."""
        process, file = self._start("scheduler"), self._folder / "address"
        ends = time.monotonic() + _START_SECONDS
        while not file.exists():
            if process.poll() is not None or time.monotonic() > ends:
                log = (self._folder / "scheduler.log").read_text(errors="replace")
                last = (log.strip().splitlines() or ["it wrote nothing"])[-1]
                raise WorkerError(f"--cluster local: the scheduler does not start: {last}")
            time.sleep(0.05)
        return file.read_text()

    def _start(self, kind: str, *words: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
        with (self._folder / f"{'-'.join((kind, *words[1:]))}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, kind, str(self._folder), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self._folder)},
                process_group=0,  # Ctrl-C is the caller's
            )
        self._processes.append(process)
        return process
