"""A benchmark in several processes that compile at the same time and time one after the other.

Lowering a kernel is Python, so threads of one process lower one after the other. Nothing is timed before
every process has compiled all of its rows: compilers would slow short calls down.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

# After so many seconds the processes that have compiled no longer wait for the others.
_PATIENCE = 600
_LOOK_EVERY = 0.05


def run_parts(module: str, arguments: Sequence[str], parts: int, folder: Path) -> list[Path]:
    """Run a module once for each part, at the same time; return the folders of those that succeeded.

    A process is given the arguments, its part as `--part i/n`, the folder where they meet as `--meet` and its
    own folder as `--out`. What a process prints is printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    outs = part_folders(folder, parts)
    runs = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", module, *arguments),
                *("--part", f"{i + 1}/{parts}", "--meet", str(folder), "--out", str(out)),
            ],
            env=environment,
        )
        for i, out in enumerate(outs)
    ]
    return [out for out, run in zip(outs, runs, strict=True) if run.wait() == 0]


def part_folders(folder: Path, parts: int) -> list[Path]:
    """Return the folder of the results of each part."""
    return [folder / f"part{i + 1}" for i in range(parts)]


def part_of[T](items: Sequence[T], part: str) -> list[T]:
    """Return every n-th item from the i-th on, of a part `i/n`."""
    i, n = map(int, part.split("/"))
    return list(items[i - 1 :: n])


def wait_for_all(folder: Path, part: str) -> None:
    """Wait until every part has called this, or for a long time."""
    i, n = map(int, part.split("/"))
    (folder / f"ready{i}").touch()
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and not all((folder / f"ready{j + 1}").exists() for j in range(n)):
        time.sleep(_LOOK_EVERY)


@contextmanager
def turn(folder: Path) -> Generator[None]:
    """Hold the GPU against the other parts."""
    with (folder / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
