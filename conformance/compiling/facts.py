"""The facts of an environment on which the compile matrix depends: those of a run, and its compilers."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attest.conformance.compiling.compilers import all_compilers
from attest.conformance.running.environment import environment


def compile_facts() -> dict[str, Any]:
    """Return the environment of this process, with the versions of all compilers."""
    here, found = environment(), dict[str, str]()
    for package in {package for compiler in all_compilers() for package in compiler.packages}:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {**here, "versions": {**here["versions"], **found}}
