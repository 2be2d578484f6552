"""Clusters of real processes, and the command on them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from attest.conformance.cluster.local import COMMAND
from attest.conformance.files import FileError
from attest.conformance.records.journal import journal_path
from tests.conformance.cli.processes import ROOT

# A kernel that takes its time, and one that ends the worker of the cluster on several batch entries.
MINE = """
import os, time
from dataclasses import replace
import psutil
from tests import toys

def _steady(query, key, value, **options):
    time.sleep(float(os.environ.get("TEST_PAUSE", "0.2")))
    return toys.right.call(query, key, value, **options)

def _deadly(query, key, value, **options):
    if query.shape[0] > 1:
        for process in psutil.Process().parents():
            if "worker" in process.cmdline():
                process.kill()
                time.sleep(60)
    return toys.right.call(query, key, value, **options)

steady = replace(toys.right, name="mine.steady", call=_steady)
deadly = replace(toys.right, name="mine.deadly", call=_deadly)
"""


class Processes:
    """The processes of a test, in a folder with the module `mine`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        (folder / "mine.py").write_text(MINE)

    def started(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Python with some arguments."""
        path = os.pathsep.join([variables.pop("first", ""), str(self.folder), str(ROOT)]).strip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env={**environment, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def attest(self, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        """The command."""
        return self.started("-m", "attest", *map(str, arguments), **variables)

    def scheduler(self, *workers: dict[str, str]) -> str:
        """The address of a scheduler with workers that have these variables."""
        scratch = self.folder / "cluster"
        scratch.mkdir()
        self.started("-P", "-c", COMMAND, "scheduler", str(scratch))
        until((scratch / "address").exists)
        address = (scratch / "address").read_text()
        for number, variables in enumerate(workers):
            self.started("-P", "-c", COMMAND, "worker", str(scratch), address, str(number), **variables)
        return address

    def end(self) -> None:
        """Kill what runs."""
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """The processes of a test, which end with it."""
    found = Processes(tmp_path)
    yield found
    found.end()


def until(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for something."""
    ends = time.monotonic() + 300
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.05)


def calls_in(record: Path) -> int:
    """The number of calls that a run has judged, by its journal."""
    try:
        return max(journal_path(record).read_text().count("\n") - 1, 0)
    except (OSError, FileError):
        return 0


def members(process: subprocess.Popen[str], kind: str) -> list[psutil.Process]:
    """The schedulers or workers of the local cluster of a command."""
    return [child for child in psutil.Process(process.pid).children() if kind in child.cmdline()]


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
