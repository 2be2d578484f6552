"""Scores defects of what judges: the project's own tests must notice each of them.

The tests that an entry names run on a copy of the package with the defect. A wheel does not have them.
"""

import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from attest.conformance.mutants.catalogue import Mutant
from attest.conformance.mutants.not_here import NotHereError
from attest.conformance.mutants.planted_package import plant, run_planted
from attest.conformance.mutants.verdict import Score, survivor
from attest.conformance.process.limits import limits

# What a score of these defects names in the place of a profile, and its seed: no case is drawn.
PROFILE, SEED = "tests", 0

_SOURCE = Path(__file__).parents[3]
_NEEDED = ("tests", "pyproject.toml")
_OPTIONS = ("-x", "-q", "-rf", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
_VARIABLES = {"JAX_PLATFORMS": "cpu", "HYPOTHESIS_PROFILE": "ci"}
_FAILED, _PASSED = 1, 0  # what pytest returns
_FIRST_FAILURE = re.compile(r"^FAILED (.+?)(?: - (.*))?$", re.MULTILINE)
_DIED = 400  # characters of what pytest wrote at its end


def scored(mutant: Mutant) -> Score:
    """Return the score of a defect. Raises NotHereError where there are no tests.

    Raises ValueError if the tests fail without the defect, or do not exist.
    """
    if not _passes(mutant.test):
        raise ValueError(f"{mutant.name}: {mutant.test} does not pass without the defect")
    plain = survivor(mutant, PROFILE, SEED, results=1)
    try:
        done = _tested(mutant)
    except subprocess.TimeoutExpired:
        return replace(plain, how="time", message=f"did not end within {limits()['mutant_seconds']:g} s")
    if done.returncode == _PASSED:
        return plain
    failure = _FIRST_FAILURE.search(done.stdout)
    if done.returncode == _FAILED and failure is not None:
        return replace(plain, how="wrong", check=failure[1], message=failure[2] or "")
    return replace(plain, how="crash", check=mutant.test, message=(done.stdout + done.stderr)[-_DIED:])


@cache
def _passes(test: str) -> bool:
    """Return whether a file of tests passes without a defect."""
    return _tested(Mutant(group="judges", change="", test=test)).returncode == _PASSED


def _tested(mutant: Mutant) -> subprocess.CompletedProcess[str]:
    """Run the tests on a copy of the package with the defect.

    Raises NotHereError for an installed wheel, and subprocess.TimeoutExpired.
    """
    if not all((_SOURCE / name).exists() for name in _NEEDED):
        raise NotHereError(
            "needs the project's tests, which no wheel has: run it in a checkout of the source"
        )
    with tempfile.TemporaryDirectory() as folder:
        plant(mutant, Path(folder))
        shutil.copytree(
            _SOURCE / "tests", Path(folder) / "tests", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(_SOURCE / "pyproject.toml", folder)
        command = ("-m", "pytest", *_OPTIONS, mutant.test)
        seconds = limits()["mutant_seconds"]
        return run_planted("", Path(folder), *command, seconds=seconds, **_VARIABLES)
