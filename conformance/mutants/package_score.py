"""Scores mutants of this package's kernels, each in a process of its own that uses an edited copy."""

import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from attest.conformance.mutants.catalogue import Mutant
from attest.conformance.mutants.not_here import NotHereError
from attest.conformance.mutants.planted_package import plant, run_planted
from attest.conformance.mutants.verdict import Score, survivor
from attest.conformance.process.limits import limits

_DIED = 400  # characters of what a process that died wrote at its end


def scored(mutant: Mutant, profile: str, seed: int) -> Score:
    """Return the score of a mutant. Raises NotHereError."""
    plain = survivor(mutant, profile, seed)
    with tempfile.TemporaryDirectory() as folder:
        plant(mutant, Path(folder))
        asked = (mutant.subject, profile, str(seed), mutant.check)
        command = ("-m", "attest.conformance.mutants.killing", *asked)
        try:
            done = run_planted(mutant.subject, Path(folder), *command, seconds=limits()["mutant_seconds"])
        except subprocess.TimeoutExpired:
            return replace(plain, how="time", message=f"did not end within {limits()['mutant_seconds']:g} s")
    if done.returncode != 0:
        return replace(plain, how="crash", message=done.stderr[-_DIED:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "reason" in found:
        raise NotHereError(found["reason"])
    plain = replace(plain, results=found["results"])
    return plain if found["red"] is None else replace(plain, **found["red"])
