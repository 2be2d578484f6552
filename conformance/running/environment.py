"""The environment of a run: device, versions, flags, commit and date.

The date is here because the environment is the part of a record, besides `seconds`, that two runs of the
same kernels need not share. The date of the commit is not enough: other libraries change after it.
"""

import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from attest.conformance.subject import Subject
from attest.conformance.user_function import plain_function

_OURS = "attest-attention"  # attest alone is another project on PyPI
_PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "hypothesis", "triton", "jax-triton")
# The folder that the running package lies in: of a checkout, or of installed packages.
_HOME = Path(__file__).absolute().parents[3]
# A git hook sets these, and git then takes every folder for a part of the hook's repository.
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
_FLAGS = ("XLA_", "JAX_", "TRITON_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ATTEST_BLOCKS")
_GIT_SECONDS = 10.0
# Facts of the environment on which the results of a run depend.
FACTS = ("backend", "device", "platform", "processor", "python", "versions", "flags", "commit")


def environment() -> dict[str, Any]:
    """Return the facts that may differ between two runs of the same kernels, for their records."""
    devices = jax.devices()
    return {
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "versions": _versions(),
        "flags": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_FLAGS)},
        "commit": commit(_HOME),
    }


def differing(got: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str] = FACTS) -> list[str]:
    """Return a clause for each fact that differs between two environments."""
    found: list[str] = []
    for name in names:
        one, other = got.get(name), expected.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inner = differing(one, other, sorted(one.keys() | other.keys()))
            found += [f"{name}: {clause}" for clause in inner]
        elif one != other:
            found.append(f"{name}: got {one!r}, expected {other!r}")
    return found


def today() -> str:
    """Return the date of a run: the day by UTC, so that it says nothing about a place."""
    return datetime.now(UTC).date().isoformat()


def declared_blocks(subjects: Mapping[str, Subject]) -> dict[str, str]:
    """Return the block sizes that subjects declare, queries x keys, by name; those of production are last."""
    return {
        name: ", ".join(
            f"{tiling.query_block or 'all'}x{tiling.key_block or 'all'}" for tiling in subject.tilings
        )
        for name, subject in subjects.items()
    }


def kernel_files(subjects: Mapping[str, Subject]) -> dict[str, str]:
    """Return the file of each subject's function by name, or else that of its `module:attribute`.

    A file below the current folder is relative to it, as in a repository.
    """
    found = {name: _file_of(subject.call) or _file_of_module(name) for name, subject in subjects.items()}
    return {name: _relative(file) for name, file in found.items() if file}


def _file_of(call: Callable[..., Any]) -> str:
    code = getattr(plain_function(call), "__code__", None)
    file = code.co_filename if code is not None else ""
    return file if os.path.isfile(file) else ""


def _file_of_module(name: str) -> str:
    module, colon, _ = name.partition(":")
    return (getattr(sys.modules.get(module), "__file__", None) or "") if colon else ""


def _relative(file: str) -> str:
    path, here = Path(file).resolve(), Path.cwd().resolve()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()


def _versions() -> dict[str, str]:
    found = {name: installed_version(name) for name in _PACKAGES} | {_OURS: own_version(_HOME)}
    return {name: number for name, number in found.items() if number is not None}


def installed_version(package: str) -> str | None:
    """Return the version of a distribution in this environment; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def own_version(home: Path) -> str | None:
    """Return the version of attest in a folder: of the checkout there, or of the installed distribution.

    A checkout comes first, since another version may be installed beside it.
    """
    project = _project(home)
    return installed_version(_OURS) if project is None else str(project.get("version", ""))


def _project(home: Path) -> dict[str, Any] | None:
    """Return the table `project` of the checkout of attest in a folder; None if there is no checkout."""
    try:
        project = tomllib.loads((home / "pyproject.toml").read_text()).get("project", {})
    except (OSError, ValueError):
        return None
    return project if project.get("name") == _OURS else None


def _processor() -> str:
    """Return the model of the processor if the system has it: its instructions decide the last bits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def commit(home: Path) -> str:
    """Return the commit of the checkout of attest in a folder, "+dirty" if files differ from it; "" for none.

    Packages that are installed inside a repository, or copied into it, have no commit: it would be another
    project's. The variable ATTEST_COMMIT holds it where the files were copied without their history.
    """
    copied = os.environ.get("ATTEST_COMMIT", "")
    if copied or _project(home) is None:
        return copied
    top, _, head = _git(home, ("rev-parse", "--show-toplevel", "HEAD")).partition("\n")
    if not head or not os.path.samefile(top, home):
        return ""
    return f"{head}+dirty" if _git(home, ("status", "--porcelain", "--untracked-files=no")) else head


def _git(folder: Path, arguments: Sequence[str]) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    try:
        done = subprocess.run(
            # A repository can make `git status` run a program, which may be somebody else's.
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            env=variables,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
