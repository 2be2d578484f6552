"""Measures the speed of runs on a local cluster, and what limits a cluster of many workers.

    python -m benchmarks.cluster --workers 1 --workers 2 --idle 50 --json FILE --figure FILE.svg

--workers N: `attest check --workers N` and `attest check` on a cluster of N workers judge the same cases in
turn. A rate is results a second, by the time in the record: without the start of the cluster.
--idle N: `attest check` on N workers that do nothing but wait as long as a real worker takes for a call. They
show what the scheduler and the caller can handle.
FILE holds what was measured on each host. A later command adds to it, also from the files of other hosts, and
without --workers and --idle only draws and prints what is there.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attest.conformance.cluster.local import COMMAND as WORKER
from attest.conformance.files import write_text
from attest.conformance.records.record_file import read_record
from attest.conformance.running.environment import environment
from attest.conformance.running.plan import Restriction, load_profile, tasks
from attest.conformance.subject import find
from attest.conformance.typed import decode
from benchmarks.cluster_figure import figure
from benchmarks.cluster_processes import COMMAND, resting_at, scheduled_at
from benchmarks.cluster_record import (
    PACED,
    REAL,
    SHORT,
    Host,
    Row,
    Run,
    Spent,
    merged,
    read_hosts,
    write_hosts,
)
from benchmarks.cluster_report import tables

_CHECKS = ("forward", "gradients")
_PROFILE = "quick"
# A run on idle workers lasts about so long.
_IDLE_SECONDS = 20
# The workers and the seconds of a call with which batches have as many calls as they can: the caller draws
# more than these judge.
_SHORT_WORKERS, _SHORT_SECONDS = 8, 0.04
_START_SECONDS = 300.0


def main(
    workers: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of workers; repeatable.")] = None,
    idle: Annotated[
        list[int] | None, typer.Option(min=1, help="Numbers of idle workers; repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    examples: Annotated[int, typer.Option(min=2, help="Cases of each run.")] = 48,
    subject: str = "xla.flash_attention",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Add the measurements to this file.")
    ] = None,
    other: Annotated[list[Path] | None, typer.Option(help="Add those of this file; repeatable.")] = None,
    figure_path: Annotated[Path | None, typer.Option("--figure", help="Draw an SVG here.")] = None,
) -> None:
    """Measure, print the tables, and write the file and the figure."""
    here = environment()
    # A commit during the measurements would make workers that start later unlike the caller.
    os.environ["ATTEST_COMMIT"] = here["commit"]
    hosts = merged(*(read_hosts(path) for path in (*([json_path] if json_path else ()), *(other or ()))))
    host = Host(here, subject, 0.0, (), ())
    known = next((each for each in hosts if each.name == host.name), host)
    if idle and not (workers or known.rows):
        raise SystemExit("--idle: expected with --workers, or with a file that has a row of this host")
    if workers or idle:
        host = replace(host, results_of_a_job=_results_of_a_job(subject, examples))
    for measured in _measured(host, known, workers or (), idle or (), examples, repeats):
        hosts = merged(hosts, [measured])
        if json_path is not None:
            write_hosts(hosts, json_path)
    for each in hosts:
        print(f"{each.name}, {each.subject}\n\n{tables(each)}\n")
    if json_path is not None:
        write_hosts(hosts, json_path)
    if figure_path is not None:
        write_text(figure_path, figure(hosts))


def _measured(
    host: Host, known: Host, workers: Sequence[int], idle: Sequence[int], examples: int, repeats: int
) -> Generator[Host]:
    """Yield a host with each of its measurements, as soon as it is made. known: what is there already."""
    rows: list[Row] = []
    for count in workers:
        rows.append(_row(host.subject, examples, count, repeats))
        yield replace(host, rows=(rows[-1],))
    if not idle:
        return
    (with_rows,) = merged([known], [replace(host, rows=tuple(rows))])
    pace = len(_CHECKS) / with_rows.rate_of_a_worker
    yield replace(host, idle=(_idle_run(host.subject, SHORT, _SHORT_WORKERS, _SHORT_SECONDS),))
    for count in idle:
        yield replace(host, idle=(_idle_run(host.subject, PACED, count, pace),))


def _results_of_a_job(subject: str, examples: int) -> float:
    planned = tasks(find(subject), load_profile(_PROFILE), 0, Restriction(checks=_CHECKS, examples=examples))
    return statistics.mean(sum(len(checks) for _, checks in task.draws) for task in planned)


def _row(subject: str, examples: int, workers: int, repeats: int) -> Row:
    """Return the rates of some workers as processes and on a cluster, medians of runs that alternate."""
    rates: dict[str, list[float]] = {"processes": [], "cluster": []}
    counted: list[Run] = []
    for _ in range(repeats):
        rates["processes"].append(_rate(subject, examples, workers))
        with _cluster(workers, None) as address:
            counted.append(_run(address, subject, examples, REAL, workers))
        rates["cluster"].append(counted[-1].rate)
    with _cluster(workers, None) as address:
        one = _run(address, subject, 1, REAL, workers)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratios = [ours / base for ours, base in zip(rates["cluster"], rates["processes"], strict=True)]
    ratio = statistics.median(ratios)
    return Row(workers, medians["processes"], medians["cluster"], ratio, rates, counted[0].since(one))


def _idle_run(subject: str, kind: str, workers: int, call_seconds: float) -> Run:
    """Return a run on workers that only wait."""
    cases = int(workers * _IDLE_SECONDS / call_seconds)
    with _cluster(workers, call_seconds) as address:
        one, resting = _run(address, subject, 1, kind, workers), resting_at(address)
        return replace(_run(address, subject, cases, kind, workers).since(one), resting=resting)


def _rate(subject: str, examples: int, workers: int) -> float:
    """Return the results a second of one run without a cluster."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.json"
        options = ("--workers", str(workers))
        results, seconds = _finished(record, "-m", "attest", *_check(subject, examples, record, options))
        return results / seconds


def _run(address: str, subject: str, examples: int, kind: str, workers: int) -> Run:
    """Return a run on the cluster at an address, with all that it took."""
    with tempfile.TemporaryDirectory() as folder:
        record, spent = Path(folder) / "run.json", Path(folder) / "spent.json"
        before, began = scheduled_at(address), time.monotonic()
        command = _check(subject, examples, record, ("--cluster", address))
        results, seconds = _finished(record, "-c", COMMAND, "caller", str(spent), *command)
        scheduler, lasted = scheduled_at(address).since(before), time.monotonic() - began
        caller = decode(spent.read_bytes(), Spent, str(spent))
        return Run(kind, workers, results, seconds, lasted, scheduler, caller)


def _check(subject: str, examples: int, record: Path, options: Sequence[str]) -> list[str]:
    checks = [word for check in _CHECKS for word in ("--check", check)]
    narrowed = ["--profile", _PROFILE, "--examples", str(examples), *checks]
    return ["check", subject, *narrowed, *options, "--json", str(record)]


def _finished(record: Path, *command: str) -> tuple[int, float]:
    """Do a run, and return its results and its seconds."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    found = read_record(record)
    print(f"{found.seconds} s of {time.monotonic() - began:.1f} s: {' '.join(command)}", file=sys.stderr)
    return len(found.results), found.seconds


@contextmanager
def _cluster(workers: int, call_seconds: float | None) -> Generator[str]:
    """Give the address of a scheduler that counts, with real workers, or with some that only wait."""
    with tempfile.TemporaryDirectory() as folder:
        scratch, started = Path(folder), list["subprocess.Popen[bytes]"]()
        try:
            started.append(_started(COMMAND, "scheduler", folder))
            _wait_for(scratch / "address", started[-1])
            address = (scratch / "address").read_text()
            if call_seconds is None:
                for number in range(workers):
                    started.append(_started(WORKER, "worker", folder, address, str(number)))
            else:
                started.append(_started(COMMAND, "idle", folder, address, str(workers), str(call_seconds)))
                _wait_for(scratch / "ready", started[-1])
            yield address
        finally:
            for process in started:
                process.kill()
                process.communicate()


def _started(command: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait_for(file: Path, process: "subprocess.Popen[bytes]") -> None:
    ends = time.monotonic() + _START_SECONDS
    while not file.exists():
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"{process.args}: did not start")
        time.sleep(0.05)


if __name__ == "__main__":
    typer.run(main)
