"""The interface of the compilers of the compile matrix.

A compiler is one column: it finds the kernels that production would launch for a case on a device, and
compiles each with no such device here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.compiling.devices import Device


@dataclass(frozen=True)
class Job:
    """One kernel as production would launch it, or all of a pass that its compiler takes as one program.

    configuration: block sizes, warps and stages. source: what the compiler needs, in any process; it is
    pickled, and compiled once for all jobs in which its repr is the same.
    """

    kernel: str
    configuration: Mapping[str, int]
    source: Any


@dataclass(frozen=True)
class Binary:
    """The resources of a compiled kernel.

    taken: numbers by name, alike for all binaries of a compiler. What devices.toml limits has its name there.
    notes: what else the compiler said that costs speed. faults: what it said that makes the kernel fail.
    """

    taken: Mapping[str, int]
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiler:
    """One column of the matrix.

    devices: the names of those it compiles for. why_not: why it cannot run in this process, or None.
    jobs: the kernels of a case on a device; may raise. compile: a function of a module, of Job.source; raises
    with the compiler's own words in the first line. packages: the distributions whose versions its results
    depend on.
    """

    name: str
    devices: frozenset[str]
    why_not: Callable[[], str | None]
    jobs: Callable[[Case, Device], Sequence[Job]]
    compile: Callable[[Any], Binary]
    packages: tuple[str, ...] = ()
