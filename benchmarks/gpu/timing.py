"""Timing of device work: contenders in turns, calls back to back, an error kept as a reason.

In turns, a change of the clocks hits all contenders alike. Back to back, the device never waits for the next
dispatch, so that the time of a call is that of its kernels.
"""

import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.profiler import ProfileData

from attest.conformance.running import environment as run_environment

REASON_LENGTH = 160  # of an error, enough to recognize it in a table
# ptxas is a process of its own, so that threads run it in parallel.
COMPILE_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Absent:
    """Why there is no result."""

    reason: str


@dataclass(frozen=True)
class Timing:
    """samples of each contender; each makes calls until it lasts sample_seconds.

    device_time_below: seconds of a call below which the device's own time counts, as a call's dispatch takes
    longer than its kernels.
    """

    samples: int
    sample_seconds: float
    device_time_below: float = 0.0


def attempt[T](make: Callable[[], T]) -> T | Absent:
    """Return what `make` returns, or its error: a contender that fails is a row, not the end."""
    try:
        return make()
    except Exception as error:
        lines = (line.strip() for line in str(error).splitlines())
        first = next((line for line in lines if line), "no message")
        return Absent(f"{type(error).__name__}: {first}"[:REASON_LENGTH])


def attempt_all[K, T](makes: Mapping[K, Callable[[], T]]) -> dict[K, T | Absent]:
    """Attempt all of them, in threads: for compilation."""
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        return dict(zip(makes, pool.map(attempt, makes.values()), strict=True))


def seconds(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one call, of so many back to back."""
    start = time.perf_counter()
    for _ in range(calls):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def in_turns[K](runs: Mapping[K, Callable[[], Any]], timing: Timing) -> dict[K, tuple[float, ...] | Absent]:
    """Return samples of seconds per call of each, one of each in every round."""
    calls = {name: attempt(partial(_calls_per_sample, run, timing)) for name, run in runs.items()}
    taken: dict[K, list[float]] = {name: [] for name in runs}
    failed = {name: count for name, count in calls.items() if isinstance(count, Absent)}
    for _ in range(timing.samples):
        for name, run in runs.items():
            if name in failed:
                continue
            sample = attempt(partial(seconds, run, calls[name]))
            if isinstance(sample, Absent):
                failed[name] = sample
            else:
                taken[name].append(sample)
    return {name: failed.get(name, tuple(samples)) for name, samples in taken.items()}


def device_seconds(run: Callable[[], Any], timing: Timing) -> tuple[float, ...]:
    """Return samples of the seconds that the kernels and copies of one call take on a GPU, by JAX's profiler.

    Raises RuntimeError where the profiler saw no GPU.
    """
    return tuple(_profiled(run, calls=20) for _ in range(timing.samples))


def _profiled(run: Callable[[], Any], calls: int) -> float:
    jax.block_until_ready(run())
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(calls)])
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = ProfileData.from_file(str(file)).planes
        taken = [
            event.duration_ns
            for plane in planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    if not taken:
        raise RuntimeError("JAX's profiler saw no kernel on a GPU")
    return 1e-9 * sum(taken) / calls


def _calls_per_sample(run: Callable[[], Any], timing: Timing) -> int:
    seconds(run, 1)  # warms the clocks and the caches up
    return math.ceil(timing.sample_seconds / seconds(run, 1))


def environment(distributions: Iterable[str]) -> dict[str, str]:
    """Return the date, the commit, the device, its driver, and the version of each distribution.

    The commit is that of the checkout, or ATTEST_COMMIT where the files were copied without their history.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = attempt(partial(subprocess.check_output, query, text=True))
    found = {name: attempt(partial(version, name)) for name in distributions}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": run_environment.environment()["commit"],
        "device": jax.devices()[0].device_kind,
        "driver": "unknown" if isinstance(driver, Absent) else driver.splitlines()[0],
        **{name: "not installed" if isinstance(it, Absent) else it for name, it in found.items()},
    }


def need_gpu(program: str) -> None:
    """End the program in one sentence where JAX has no GPU."""
    if jax.default_backend() != "gpu":
        raise SystemExit(f"{program} needs a GPU, and JAX runs on {jax.default_backend()} here.")
