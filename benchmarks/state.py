"""The clock and the power of the GPU while it is timed, as nvidia-smi reads them."""

import subprocess
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.record import State

_EVERY_MILLISECONDS = 50
_QUERY = (
    "nvidia-smi",
    "--id=0",
    "--query-gpu=clocks.sm,power.draw",
    "--format=csv,noheader,nounits",
    f"--loop-ms={_EVERY_MILLISECONDS}",
)


@dataclass
class Watch:
    """The readings of `watched`: None until it ends, and where there is no nvidia-smi or no reading."""

    state: State | None = None


@contextmanager
def watched() -> Generator[Watch]:
    """Read clock and power of the first GPU until the block ends; the watch then has the state."""
    watch = Watch()
    try:
        reader = subprocess.Popen(_QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        yield watch
        return
    try:
        yield watch
    finally:
        reader.terminate()
        lines, _ = reader.communicate()
        watch.state = parse(lines.splitlines())


def parse(lines: Iterable[str]) -> State | None:
    """Return the state from lines of `clock, power`; lines that have no two numbers do not count."""
    found: list[tuple[float, float]] = []
    for line in lines:
        try:
            clock, power = (float(cell) for cell in line.split(","))
        except ValueError:
            continue
        found.append((clock, power))
    if not found:
        return None
    clocks, powers = zip(*found, strict=True)
    return State((min(clocks), max(clocks)), (min(powers), max(powers)))
