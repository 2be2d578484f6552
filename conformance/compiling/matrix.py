"""The compile matrix: which kernels compile for which devices, and within their limits.

The matrix is kernel x set of features x head_dim x dtype x device, of compile.toml and devices.toml, for each
compiler of `attest.conformance.compiling.compilers`. What does not compile, spills, or takes more of
anything than the device has, fails: these are the configurations of a call that names none. Estimates of what
no kernel can beat stand beside it.
"""

import time
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.cases.features import ALL_FEATURES, DTYPES
from attest.conformance.compiling.compiler import Binary, Compiler, Job
from attest.conformance.compiling.compilers import all_compilers
from attest.conformance.compiling.devices import Device, all_devices
from attest.conformance.compiling.roofline import PASSES, Estimate, estimate
from attest.conformance.process.workers import Job as Task
from attest.conformance.process.workers import Workers, perform
from attest.conformance.running.fit import RequestError
from attest.conformance.running.progress import Progress, Watch
from attest.conformance.text import describe

_SCHEMA = "attest.compile/2"
_MATRIX = Path(__file__).with_name("compile.toml")

# The name of what a case launches, where that cannot even be found out.
_UNKNOWN = "?"

# What devices limit, in words; the names are those of devices.toml and of Binary.taken.
_WORDS = {
    "registers": "registers of a thread",
    "shared_bytes": "bytes of shared memory",
    "tmem_columns": "columns of TMEM",
    "scoped_vmem_bytes": "bytes of scoped VMEM",
    "hbm_bytes": "bytes of HBM",
}
_ESTIMATES = (
    "lower bounds from the peaks that vendors publish, by conformance/compiling/roofline.py; "
    "nothing is measured"
)


@dataclass(frozen=True)
class Narrowing:
    """The selected part of a profile; empty means everything. features: all on in every case."""

    targets: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()

    def keeps(self, target: str, case: Case) -> bool:
        """Return whether the options keep this case on this device."""
        return (
            (not self.targets or target in self.targets)
            and (not self.head_dims or case.head_dim in self.head_dims)
            and (not self.dtypes or case.dtype in self.dtypes)
            and case.features.issuperset(self.features)
        )

    def __str__(self) -> str:
        """Return the options as typed."""
        options = {name.replace("_", "-").removesuffix("s"): values for name, values in vars(self).items()}
        return " ".join(f"--{name} {value}" for name, values in options.items() for value in values)


@dataclass(frozen=True)
class Cell:
    """One place of the matrix. set: of features, by its name in compile.toml."""

    compiler: str
    kernel: str
    target: str
    set: str
    features: tuple[str, ...]
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.compiler} {self.kernel} {self.target} {self.set} {self.dtype} head_dim={self.head_dim}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one compilation: a binary, or an error in one line."""

    binary: Binary | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """A cell, what it was compiled as and what came of it; limits: those of the device."""

    cell: Cell
    configuration: Mapping[str, int]
    outcome: Outcome
    limits: Mapping[str, int]

    @property
    def faults(self) -> tuple[str, ...]:
        """The reasons for failing, in words with numbers; empty if it passes."""
        binary = self.outcome.binary
        if binary is None:
            return (f"does not compile: {self.outcome.error}",)
        found: list[str] = []
        taken = binary.taken
        if taken.get("spill_bytes"):
            found.append(
                f"spills {taken['spill_bytes']} bytes of a thread (stack {taken['stack_bytes']} bytes), "
                f"with {taken['registers']} registers"
            )
        for name, limit in self.limits.items():
            if taken.get(name, 0) > limit:
                words = _WORDS.get(name, name)
                found.append(f"takes {taken[name]} {words}, {self.cell.target} has {limit}")
        return (*found, *binary.faults)

    def to_json(self) -> dict[str, Any]:
        """Return the row of `--json`; what a binary takes is null where there is none."""
        binary = self.outcome.binary
        return {
            **asdict(self.cell),
            "configuration": dict(self.configuration),
            "status": "fail" if self.faults else "pass",
            "faults": list(self.faults),
            "error": self.outcome.error,
            "taken": None if binary is None else dict(binary.taken),
            "notes": [] if binary is None else list(binary.notes),
            "limits": dict(self.limits),
            "seconds": round(self.outcome.seconds, 3),
        }


@dataclass(frozen=True)
class Matrix:
    """All results of a profile. compilations: cells that are the same to a compiler share one.

    left_out: why some devices were not compiled for, a sentence for each compiler that cannot run here.
    """

    profile: str
    narrowed: str
    results: tuple[Result, ...]
    estimates: tuple[Estimate, ...]
    left_out: tuple[str, ...]
    compilations: int
    seconds: float

    @property
    def status(self) -> str:
        """The status, "pass" or "fail"."""
        return "fail" if any(result.faults for result in self.results) else "pass"

    def to_json(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        return {
            "schema": _SCHEMA,
            "status": self.status,
            "profile": self.profile,
            "narrowed": self.narrowed,
            "compilations": self.compilations,
            "seconds": round(self.seconds, 1),
            "left_out": list(self.left_out),
            "results": [result.to_json() for result in self.results],
            "estimates": {
                "what": _ESTIMATES,
                "rows": [estimate.to_json() for estimate in self.estimates],
            },
        }


def compile_matrix(
    profile: str,
    only: Narrowing,
    workers: Workers,
    watch: Watch = lambda _progress: None,
    compilers: Sequence[Compiler] | None = None,
) -> Matrix:
    """Compile a profile; workers 0: in this process; or those of a cluster.

    Raises RequestError if nothing is meant, or if a compiler that is meant cannot run in this process, and
    LostError if a cluster is lost.
    """
    _refuse_unknown(profile, only)
    start = time.monotonic()
    try:
        chosen, left_out = _able(all_compilers() if compilers is None else compilers, only)
    except ImportError as error:  # Triton is for Linux alone
        raise RequestError(f"kernels cannot be compiled here: {error}") from error
    wanted = [
        (compiler, all_devices()[target], name, case)
        for target, name, case in cases_of(profile)
        for compiler in chosen
        if target in compiler.devices and only.keeps(target, case)
    ]
    planned = list(_planned(wanted, only, watch))
    if not planned:
        raise RequestError(
            f"nothing fits {only} in the profile {profile}: see conformance/compiling/compile.toml"
        )
    jobs = {_key(compiler, job): (compiler, job) for compiler, _, job in planned if isinstance(job, Job)}
    outcomes: dict[str, Outcome] = {}
    red = 0
    with closing(_compiled(jobs, workers)) as compiled:
        for key, outcome in compiled:
            outcomes[key] = outcome
            red += outcome.binary is None
            watch(Progress("compiling", len(outcomes), len(jobs), red))
    results = [
        Result(cell, job.configuration, outcomes[_key(compiler, job)], all_devices()[cell.target].limits)
        if isinstance(job, Job)
        else Result(cell, {}, job, all_devices()[cell.target].limits)
        for compiler, cell, job in planned
    ]
    return Matrix(
        profile,
        str(only),
        tuple(results),
        tuple(estimate(device, name, case, which) for _, device, name, case in wanted for which in PASSES),
        left_out,
        len(jobs),
        time.monotonic() - start,
    )


def _refuse_unknown(profile: str, only: Narrowing) -> None:
    for option, names, known in (
        ("--profile", (profile,), _settings()["profiles"]),
        ("--target", only.targets, all_devices()),
        ("--feature", only.features, ALL_FEATURES),
        ("--dtype", only.dtypes, DTYPES),
    ):
        for name in names:
            if name not in known:
                raise RequestError(f"{option}: got {name!r}, expected one of {', '.join(known)}")


type _Wanted = Sequence[tuple[Compiler, Device, str, Case]]


def _able(compilers: Sequence[Compiler], only: Narrowing) -> tuple[Sequence[Compiler], tuple[str, ...]]:
    """Return the compilers that can run here, and why the others cannot.

    Raises RequestError if none can, or if one that cannot is requested by one of its devices.
    """
    able = [compiler for compiler in compilers if compiler.why_not() is None]
    left_out: list[str] = []
    for compiler in compilers:
        if compiler in able:
            continue
        sentence = f"{compiler.name} cannot compile: {compiler.why_not()}"
        if not able or compiler.devices.intersection(only.targets):
            raise RequestError(sentence)
        if not only.targets:
            left_out.append(f"not compiled for {', '.join(sorted(compiler.devices))}: {sentence}")
    return able, tuple(left_out)


def _planned(
    wanted: _Wanted, only: Narrowing, watch: Watch
) -> Iterator[tuple[Compiler, Cell, Job | Outcome]]:
    """Yield every cell with its job, or the error of finding one. Raises RequestError for unknown kernels."""
    kernels: set[str] = set()
    for done, (compiler, device, name, case) in enumerate(wanted):
        watch(Progress("tracing", done, len(wanted), 0))
        place = (device.name, name, tuple(sorted(case.features)), case.head_dim, case.dtype)
        try:
            jobs = compiler.jobs(case, device)
        except Exception as error:  # kernels are code that may be wrong
            unlaunched = Outcome(error=f"its launch raised {describe(error)}")
            yield compiler, Cell(compiler.name, _UNKNOWN, *place), unlaunched
            continue
        for job in jobs:
            kernels.add(job.kernel)
            if not only.kernels or job.kernel in only.kernels:
                yield compiler, Cell(compiler.name, job.kernel, *place), job
    unknown = sorted(set(only.kernels) - kernels)
    if kernels and unknown:
        raise RequestError(f"--kernel: got {unknown[0]!r}, expected one of {', '.join(sorted(kernels))}")


def cases_of(profile: str) -> Iterator[tuple[str, str, Case]]:
    """Yield (device, set of features, case) of a profile, each once."""
    settings = _settings()
    sets: Mapping[str, Mapping[str, Any]] = settings["sets"]
    found: dict[tuple[str, str, Case], None] = {}
    for grid in settings["profiles"][profile]:
        without = frozenset(grid.get("without", ()))
        for target in grid.get("targets", all_devices()):
            for name in grid.get("sets", sets):
                for head_dim in grid["head_dims"]:
                    for dtype in grid.get("dtypes", DTYPES):
                        problem = {**settings["problem"], **sets[name], **grid.get("problem", {})}
                        fields = {**problem, "head_dim": head_dim, "dtype": dtype}
                        case = case_from_json(fields)
                        if case.features.isdisjoint(without):
                            found[target, name, case] = None
    yield from found


def _compiled(
    jobs: Mapping[str, tuple[Compiler, Job]], workers: Workers
) -> Generator[tuple[str, Outcome], None, None]:
    """Yield outcomes by key, as they come. A compiler that kills its process costs no other compilation."""
    limit = _settings()["seconds"]
    tasks = (Task("", _attempt, (key, compiler.compile, job.source)) for key, (compiler, job) in jobs.items())
    with closing(perform(tasks, {}, workers, limit)) as outcomes:
        for outcome in outcomes:
            key, *_ = outcome.job.argument
            seconds = limit if outcome.timed_out else 0.0
            error = outcome.fault.replace("the process died", "the compiler died")
            yield key, outcome.value or Outcome(error=error, seconds=seconds)


def _attempt(_subject: None, argument: tuple[str, Callable[[Any], Binary], Any]) -> Outcome:
    _key, compile, source = argument
    start = time.monotonic()
    try:
        return Outcome(compile(source), seconds=time.monotonic() - start)
    except Exception as error:  # whatever a compiler raises is its result
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome(error=lines[0], seconds=time.monotonic() - start)


def _key(compiler: Compiler, job: Job) -> str:
    return f"{compiler.name} {job.source!r}"


@cache
def _settings() -> dict[str, Any]:
    return tomllib.loads(_MATRIX.read_text())
