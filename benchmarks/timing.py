"""Timing of contenders side by side: in turns, calls back to back, an error kept as a reason.

In turns, a change of the clocks hits all contenders alike; each turn has another order, as a call also pays
for what the one before it left to threads. Back to back, the device never waits for the next dispatch, so
that the time of a call is that of its kernels.
"""

import math
import os
import random
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from attest.conformance.running import environment as run_environment
from attest.conformance.tuning.workload import Inputs, Workload, draw
from benchmarks.record import SECONDS, Absent, Entry, Measured, Row, Run, Samples
from benchmarks.workload import ready

REASON_LENGTH = 160  # of an error, enough to recognize it in a table
# ptxas is a process of its own, so that threads run it in parallel.
COMPILE_THREADS = min(8, os.cpu_count() or 1)

# Those whose versions a record names.
_DISTRIBUTIONS = ("jax", "jaxlib", "triton", "jax-triton", "nvidia-cudnn-cu13", "tokamax", "ejkernel")

# cuDNN captures a CUDA graph when it compiles; modules that other threads load meanwhile break the capture.
COMPILED_ALONE = frozenset({"cudnn"})

type Call = Callable[[], Any]
type Prepared = Mapping[tuple[Entry, str], Call | Absent]  # by entry and direction
# What a contender computes of a workload in a direction; raises where it cannot.
type Program = Callable[[str, Workload, str], Callable[[Inputs], Any]]


@dataclass(frozen=True)
class Timing:
    """samples of each contender; each makes calls until it lasts sample_seconds.

    device_time_below: seconds of a call below which the device's own time counts, as a call's dispatch takes
    longer than its kernels. cpu_time: whether the CPU time of this process counts, which varies less on a
    busy machine than time by the clock.
    """

    samples: int
    sample_seconds: float
    device_time_below: float = 0.0
    cpu_time: bool = False


def attempt[T](make: Callable[[], T]) -> T | Absent:
    """Return what `make` returns, or its error: a contender that fails is a row, not the end."""
    try:
        return make()
    except Exception as error:
        lines = (line.strip() for line in str(error).splitlines())
        first = next((line for line in lines if line), "no message")
        return Absent(f"{type(error).__name__}: {first}"[:REASON_LENGTH])


def prepare(
    rows: Sequence[Row],
    program: Program,
    *,
    draw_inputs: Callable[[Entry, Workload], Inputs] = lambda _, workload: draw(workload),
    make_ready: Callable[[Callable[[Inputs], Any], Inputs], Call] = ready,
    alone: Collection[str] = COMPILED_ALONE,
) -> Prepared:
    """Compile every program that rows of seconds need, once.

    draw_inputs: makes the inputs, shared by all contenders with the workload on as many devices. make_ready:
    compiles a program for inputs. alone: the contenders that no thread compiles beside others.
    """
    keys = dict.fromkeys(
        (entry, row.direction) for row in rows if row.unit == SECONDS for entry in row.entries.values()
    )
    inputs: dict[tuple[Workload, int], Inputs] = {}
    absent: dict[tuple[Entry, str], Absent] = {}
    makes: dict[tuple[Entry, str], Callable[[], Call]] = {}
    for entry, direction in keys:
        workload = entry.call()
        function = attempt(partial(program, entry.contender, workload, direction))
        if isinstance(function, Absent):
            absent[entry, direction] = function
            continue
        if (workload, entry.devices) not in inputs:
            inputs[workload, entry.devices] = draw_inputs(entry, workload)
        makes[entry, direction] = partial(make_ready, function, inputs[workload, entry.devices])
    done = {key: attempt(make) for key, make in makes.items() if key[0].contender in alone}
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        others = {key: pool.submit(attempt, make) for key, make in makes.items() if key not in done}
    return absent | done | {key: it.result() for key, it in others.items()}


def measure(row: Row, prepared: Prepared, timing: Timing) -> Measured:
    """Time every entry of the row, absent ones included."""
    chosen = {label: prepared[entry, row.direction] for label, entry in row.entries.items()}
    runs = {label: run for label, run in chosen.items() if not isinstance(run, Absent)}
    times = in_turns(runs, timing)
    shortest = min((median(it) for it in times.values() if not isinstance(it, Absent)), default=math.inf)
    by_device = shortest < timing.device_time_below
    if by_device:
        times = {label: attempt(partial(device_seconds, run, timing)) for label, run in runs.items()}
    found: dict[str, Samples | Absent] = {
        label: run for label, run in chosen.items() if isinstance(run, Absent)
    }
    firsts: dict[Workload | None, str] = {}
    for label, values in times.items():
        if isinstance(values, Absent):
            found[label] = values
            continue
        first = firsts.setdefault(row.entries[label].workload, label)
        apart = None if first == label else attempt(partial(difference, runs[label], runs[first]))
        found[label] = apart if isinstance(apart, Absent) else Samples(values, apart, by_device)
    return found


def measure_each(row: Row, take: Callable[[Row, Entry], Sequence[float]]) -> Measured:
    """Return what `take` finds of every entry, one after the other, or why there is nothing."""

    def samples(entry: Entry) -> Samples:
        values = tuple(take(row, entry))
        # JSON has neither NaN nor inf.
        if not all(map(math.isfinite, values)):
            raise ValueError("a value is not finite")
        return Samples(values)

    return {label: attempt(partial(samples, entry)) for label, entry in row.entries.items()}


def difference(theirs: Call, ours: Call) -> float:
    """Return the largest ||a - b|| / ||b|| among the outputs or gradients of two calls."""
    return float(_difference(theirs(), ours()))


@jax.jit
def _difference(theirs: Any, ours: Any) -> jax.Array:

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    largest = jnp.max(jnp.array(jax.tree.leaves(jax.tree.map(one, theirs, ours))))
    # JSON has neither NaN nor inf.
    return jnp.minimum(jnp.nan_to_num(largest, nan=jnp.inf), jnp.finfo(jnp.float32).max)


def seconds(run: Call, calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call, of so many back to back."""
    out: Any = None
    start = clock()
    for _ in range(calls):
        out = run()
    jax.block_until_ready(out)
    return (clock() - start) / calls


def in_turns[K](runs: Mapping[K, Call], timing: Timing) -> dict[K, tuple[float, ...] | Absent]:
    """Return samples of seconds per call of each, one of each in every round."""
    clock = time.process_time if timing.cpu_time else time.perf_counter
    calls = {name: attempt(partial(_calls_per_sample, run, timing)) for name, run in runs.items()}
    taken: dict[K, list[float]] = {name: [] for name in runs}
    failed = {name: count for name, count in calls.items() if isinstance(count, Absent)}
    order, dice = list(runs), random.Random(0)
    for _ in range(timing.samples):
        dice.shuffle(order)
        for name in order:
            count = calls[name]
            if name in failed or isinstance(count, Absent):
                continue
            sample = attempt(partial(seconds, runs[name], count, clock))
            if isinstance(sample, Absent):
                failed[name] = sample
            else:
                taken[name].append(sample)
    return {name: failed.get(name, tuple(samples)) for name, samples in taken.items()}


def device_seconds(run: Call, timing: Timing) -> tuple[float, ...]:
    """Return samples of the seconds that the kernels and copies of one call take on a GPU, by JAX's profiler.

    Raises RuntimeError where the profiler saw no GPU.
    """
    return tuple(_profiled(run, calls=20) for _ in range(timing.samples))


def _profiled(run: Call, calls: int) -> float:
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


def _calls_per_sample(run: Call, timing: Timing) -> int:
    seconds(run, 1)  # warms the clocks and the caches up
    return max(1, math.ceil(timing.sample_seconds / seconds(run, 1)))


def this_run() -> Run:
    """Return the date, the commit, the device, its driver, and the version of each distribution.

    The commit is that of the checkout, or ATTEST_COMMIT where the files were copied without their history.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = attempt(partial(subprocess.check_output, query, text=True))
    about = run_environment.environment()
    found = {name: attempt(partial(version, name)) for name in _DISTRIBUTIONS}
    return Run(
        datetime.now(UTC).isoformat(timespec="seconds"),
        about["commit"],
        about["processor"] if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        {
            "driver": "unknown" if isinstance(driver, Absent) else driver.splitlines()[0],
            "devices": str(jax.local_device_count()),
            **{name: "not installed" if isinstance(it, Absent) else it for name, it in found.items()},
        },
    )
