"""CPU seconds until `attest check` shows the first failure of a wrong kernel, and until it ends.

    python3 -m benchmarks.wrong_kernels --out FOLDER

The kernels are those of tests/wrong_kernels, each with one mistake; the run has one worker. It also counts
the lines that a reader needs until the mistake is named: those that hold all texts that mistakes.toml lists.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import typer

from benchmarks import runner, targets
from benchmarks.record import Entry, Measured, Row, Samples, Target
from benchmarks.report import VALUE, Layout
from benchmarks.runner import Benchmark, Out, Rows
from benchmarks.timing import Prepared

_FIRST, _WHOLE, _LINES = "first failure", "whole run", "named"
_MISTAKES = Path(__file__).parents[1] / "tests" / "wrong_kernels" / "mistakes.toml"
_TEXT = (
    "CPU seconds of `attest check` with one worker, of all its processes, on a kernel with one mistake. "
    "`named`: the lines of its report until the mistake is named."
)


def main(out: Out, rows: Rows = "") -> None:
    """Measure the run of each wrong kernel, and report it."""
    runner.run(benchmark(), out, rows)


def benchmark() -> Benchmark:
    """Return the benchmark of all mistakes."""
    most = targets.read(targets.CPU)["wrong_kernels"]
    rows: list[Row] = []
    for name in _mistakes():
        entries = {label: Entry("attest check") for label in (_FIRST, _WHOLE)}
        bounds = tuple(
            Target("", "value", most[key], (label,))
            for label, key in ((_FIRST, "first_failure_seconds"), (_WHOLE, "whole_run_seconds"))
        )
        rows.append(Row(name, "", entries, bounds, unit="CPU s"))
        lines = Target("", "value", most["lines"], (_LINES,))
        rows.append(Row(f"{name}, lines", "", {_LINES: Entry("attest check")}, (lines,), unit="lines"))
    layout = Layout("A wrong kernel, until its mistake is named", _TEXT, (VALUE,))
    return Benchmark("wrong_kernels", "wrong_kernels", rows, layout, measure, platform="cpu")


def measure(row: Row, _prepared: Prepared) -> Measured:
    """Return the measurements of a row; both rows of a mistake are of one run."""
    mistake = row.name.partition(",")[0]
    first, whole, printed = _checked(mistake)
    if row.unit == "lines":
        # The name of the kernel gives its mistake away.
        return {_LINES: Samples((_lines(printed.replace(mistake, ""), _mistakes()[mistake]),))}
    return {_FIRST: Samples((first,)), _WHOLE: Samples((whole,))}


@cache
def _mistakes() -> dict[str, Sequence[str]]:
    """Return the texts that name each mistake."""
    return {name: table["shown"] for name, table in tomllib.loads(_MISTAKES.read_text()).items()}


@cache
def _checked(mistake: str) -> tuple[float, float, str]:
    """Run `attest check`; return the CPU seconds until its first failure and until its end, and its report.

    Raises RuntimeError if it finds no failure.
    """
    check = [sys.executable, "-m", "attest", "check", f"tests.wrong_kernels.subjects:{mistake}", "-n", "1"]
    first: float | None = None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as report:
        seconds = Path(folder) / "seconds"
        command = [sys.executable, "-m", "benchmarks.all_processes", str(seconds), *check]
        # With this variable set, each process would compile all modules anew.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(
            command, stdout=report, stderr=subprocess.PIPE, text=True, start_new_session=True, env=kept
        )
        assert process.stderr is not None
        for line in process.stderr:
            if first is None and "first failure" in line:
                first = _session_seconds(process.pid)
        process.wait()
        report.seek(0)
        printed = report.read()
        whole = float(seconds.read_text())
    if first is None:
        raise RuntimeError(f"{mistake}: attest check found no failure:\n{printed}")
    return first, whole, printed


def _session_seconds(session: int) -> float:
    """Return the CPU seconds of the processes of a session so far, and of their children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _lines(printed: str, shown: Sequence[str]) -> float:
    """Return how many lines of a report hold all texts; inf if it lacks one."""
    lines = printed.splitlines()
    found = (n for n in range(1, len(lines) + 1) if all(text in "\n".join(lines[:n]) for text in shown))
    return float(next(found, float("inf")))


if __name__ == "__main__":
    typer.run(main)
