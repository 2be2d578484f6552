"""The options of the command line, and the checks of their values."""

import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attest.conformance.files import is_special, refusal, same_file
from attest.conformance.text import describe

if TYPE_CHECKING:
    from attest.conformance.running.plan import Restriction
    from attest.conformance.running.runner import Request
    from attest.conformance.subject import Subject

# Processes that a run starts at once, at most: more of them end a machine before they end a run.
_MOST_WORKERS = 1024
# More digits than the number of a shard can need.
_SHARD_DIGITS = 9

SubjectName = Annotated[str, typer.Argument(help="A name from `attest list`, or module:attribute.")]
SubjectPatterns = Annotated[
    list[str] | None,
    typer.Option("--subject", help="Test only these: names, or patterns such as 'operation.*'; repeatable."),
]
Profile = Annotated[str, typer.Option(help="How many cases: quick, standard, nightly or production.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random cases.")]
Shard = Annotated[str, typer.Option(help="i/n: run part i of n; `attest merge` joins their records.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--workers",
        min=0,
        max=_MOST_WORKERS,
        show_default="the number of cores; 1 on an accelerator",
        help="Number of worker processes. 0: run in this process, without --timeout.",
    ),
]
CompileWorkers = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--workers",
        min=0,
        max=_MOST_WORKERS,
        show_default="the number of cores",
        help="Number of processes.",
    ),
]
Script = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Run nothing: write a script that reproduces the case without attest to PATH; - prints it.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(show_default="120", help="Seconds for all checks of one case; beyond it, TIMEOUT."),
]
Baseline = Annotated[
    Path | None,
    typer.Option(help="A record; the run fails if its errors are worse than those of this record."),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the record here: as JSON lines to FILE.jsonl, compressed to FILE.jsonl.gz, else as one"
        " object. During a run, the results so far are in FILE.journal.",
    ),
]
ComparisonJson = Annotated[
    Path | None, typer.Option("--json", help="Write the comparison as JSON here, for programs.")
]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="Stop at the first verdict that fails the run.")]
Shrink = Annotated[
    bool, typer.Option("--shrink/--no-shrink", help="Search a simpler case for what fails, for 30 s at most.")
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="After so long begin nothing more, and say what was not tested.",
    ),
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ADDRESS",
        help="Run on the workers of a Dask scheduler, or on a cluster that is started here: local:8.",
    ),
]
Mixed = Annotated[
    bool, typer.Option("--mixed", help="With --cluster, also use workers with another processor.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RECORD",
        help="Judge the rest of the run that was to write this record and was cut short.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        help="Print each expected failure, the slowest checks and features, and all that was skipped.",
    ),
]
Junit = Annotated[Path | None, typer.Option(help="Write a JUnit XML report here.")]
Markdown = Annotated[Path | None, typer.Option(help="Write a Markdown report here.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML report here.")]
Sarif = Annotated[Path | None, typer.Option(help="Write a SARIF report here.")]
Expectations = Annotated[
    list[Path] | None,
    typer.Option(help="A TOML file of expected failures, or a folder of such files; repeatable."),
]
Features = Annotated[
    list[str] | None, typer.Option("--feature", help="Use only cases with this feature; repeatable.")
]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="Use only this dtype; repeatable.")]
Checks = Annotated[list[str] | None, typer.Option("--check", help="Run only this check; repeatable.")]
Examples = Annotated[
    int | None, typer.Option(min=1, help="Draw this many cases, instead of the profile's number.")
]


PASSED, FAILED, USAGE = 0, 1, 2  # exit statuses


class UsageError(Exception):
    """The command line is wrong; the message is one sentence."""


@contextmanager
def as_usage_errors() -> Generator[None, None, None]:
    """Turn errors in names and files of the command line into usage errors.

    A module that ends the process when it is imported is a usage error, too.
    """
    try:
        yield
    except LookupError as error:
        raise UsageError(str(error.args[0])) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise UsageError(f"a subject cannot be loaded: its module raised {describe(error)}") from error


@dataclass(frozen=True)
class Outputs:
    """The files to write, each checked before any work is done. Raises UsageError."""

    json: Path | None = None
    junit: Path | None = None
    markdown: Path | None = None
    html: Path | None = None
    sarif: Path | None = None
    table: Path | None = None
    kills: Path | None = None
    csv: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        named = self.named
        for name, path in named:
            reason = refusal(path)
            if reason is not None:
                raise UsageError(f"{name} {path}: {reason}")
        if self.json is not None:
            from attest.conformance.records.journal import journal_path

            named = (*named, ("the journal of --json", journal_path(self.json)))
        for (name, path), (other, taken) in combinations(named, 2):
            if same_file(path, taken) and not is_special(path):
                raise UsageError(f"{name} {path} and {other} {taken} are the same file: name two")

    @property
    def named(self) -> tuple[tuple[str, Path], ...]:
        """The options and files that are given."""
        return tuple((f"--{name}", path) for name, path in vars(self).items() if path is not None)

    def spare(self, *inputs: Path) -> None:
        """Raise UsageError if one of the files is also an input."""
        for name, path in self.named:
            for read in inputs:
                if same_file(path, read):
                    raise UsageError(f"{name} {path}: is an input, too, and would be lost: name another file")


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a run on a cluster. Raises UsageError.

    address: of a scheduler, or local:N; None for no cluster. mixed: whether processors may differ.
    """

    address: str | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.mixed and self.address is None:
            raise UsageError("--mixed: expected with --cluster")
        if self.address is not None and find_spec("distributed") is None:
            raise UsageError(
                "--cluster needs Dask: install it with `pip install 'attest-attention[cluster]'`"
            )

    def refuse_workers(self, workers: int | None) -> None:
        """Raise UsageError if a number of processes is given beside a cluster."""
        if self.address is not None and workers is not None:
            raise UsageError("--cluster and -n: a cluster has workers of its own: give one of both")


@dataclass(frozen=True)
class RunOptions:
    """The options that every run has."""

    profile: str = "quick"
    seed: int = 0
    shard: str = "1/1"
    workers: int | None = None
    timeout: float | None = None
    expectations: Sequence[Path] | None = None
    fail_fast: bool = False
    shrink: bool = True
    budget: float | None = None
    cluster: ClusterOptions = ClusterOptions()

    def request(self, subjects: "dict[str, Subject]", skipped: Any = None, **narrowing: Any) -> "Request":
        """Return the request of these options. Raises UsageError."""
        from attest.conformance.process.limits import limits
        from attest.conformance.running.declared import declarations, distributions
        from attest.conformance.running.environment import declared_blocks, environment, kernel_files, today
        from attest.conformance.running.expectations import load_expectations
        from attest.conformance.running.gate import why_not_here
        from attest.conformance.running.plan import load_profile
        from attest.conformance.running.runner import Request

        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise UsageError(f"--timeout: got {self.timeout:g}, expected a number of seconds above 0")
        if self.budget is not None and not 0 < self.budget < float("inf"):
            raise UsageError(f"--budget: got {self.budget:g}, expected a number of seconds above 0")
        with as_usage_errors():
            expectations = load_expectations(self.expectations or ())
            profile = load_profile(self.profile)
        self.cluster.refuse_workers(self.workers)
        here = environment()
        for name, subject in subjects.items():
            with as_usage_errors():
                reason = why_not_here(subject, here["backend"])
            if reason is not None and not (self.cluster.address and subject.backend == "gpu"):
                raise UsageError(f"{name} cannot run here: {reason}")
        return Request(
            subjects=subjects,
            profile=profile,
            seed=self.seed,
            shard=_parse_shard(self.shard),
            workers=_default_workers(here["backend"]) if self.workers is None else self.workers,
            timeout=self.timeout or profile.task_seconds or limits()["task_seconds"],
            fail_fast=self.fail_fast,
            shrink=self.shrink,
            budget=float("inf") if self.budget is None else self.budget,
            expectations=expectations,
            environment={
                **here,
                "date": today(),
                "skipped": dict(skipped or {}),
                "block_sizes": declared_blocks(subjects),
                "kernel_files": kernel_files(subjects),
                "declarations": declarations(subjects),
                "distributions": distributions(subjects),
            },
            **narrowing,
        )


def restriction(
    features: Sequence[str], dtypes: Sequence[str], checks: Sequence[str], examples: int | None
) -> "tuple[Restriction, str]":
    """Return the restriction of a run, and the same as typed. Raises UsageError."""
    from attest.conformance.cases.features import ALL_FEATURES, DTYPES
    from attest.conformance.running.plan import Restriction

    for option, names, known in (("--feature", features, ALL_FEATURES), ("--dtype", dtypes, DTYPES)):
        for name in names:
            if name not in known:
                raise UsageError(f"{option}: got {name!r}, expected one of {', '.join(known)}")
    words = [f"--feature {name}" for name in sorted(set(features))]
    words += [f"--dtype {name}" for name in dtypes]
    words += [f"--check {name}" for name in checks]
    words += [] if examples is None else [f"--examples {examples}"]
    return Restriction(frozenset(features), tuple(dtypes), tuple(checks), examples), " ".join(words)


def _parse_shard(text: str) -> tuple[int, int]:
    form = re.fullmatch(f"([0-9]{{1,{_SHARD_DIGITS}}})/([0-9]{{1,{_SHARD_DIGITS}}})", text)
    if form is not None and 1 <= int(form[1]) <= int(form[2]):
        return int(form[1]), int(form[2])
    raise UsageError(f"--shard: got {text!r}, expected i/n with 1 <= i <= n, such as 2/3")


def _default_workers(backend: str) -> int:
    """Return the number of cores; 1 on an accelerator, whose memory several workers would share."""
    return (os.cpu_count() or 1) if backend == "cpu" else 1
