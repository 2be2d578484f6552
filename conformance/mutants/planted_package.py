"""Copies of this package with a mutant's edits made, and processes that use them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from attest.conformance.mutants.catalogue import Mutant, planted_text

_PACKAGE = Path(__file__).parents[2]
# Of a CPU, for subjects that spread a sequence over them.
_DEVICES = 8


def plant(mutant: Mutant, folder: Path) -> Path:
    """Make the package `attest` in a folder, with the mutant's edits; return the folder of the package.

    The parts that the edits name are copied, the others are links. Raises ValueError if an edit does not fit.
    """
    home = folder / "attest"
    home.mkdir(parents=True, exist_ok=True)
    copied = {edit.file.partition("/")[0] for edit in mutant.edits}
    for part in _PACKAGE.iterdir():
        if part.name in copied:
            shutil.copytree(
                part, home / part.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
            )
        elif part.name != "__pycache__" and not (home / part.name).is_symlink():
            (home / part.name).symlink_to(part.resolve())
    for file in {edit.file for edit in mutant.edits}:
        path = home / file
        path.write_text(planted_text(path.read_text(encoding="utf-8"), file, mutant), encoding="utf-8")
    return home


def environment(subject: str, folder: Path) -> dict[str, str]:
    """Return the environment of a process that uses the package in a folder, and where a subject can run."""
    path = os.pathsep.join([str(folder), str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    found = {
        **os.environ,
        "PYTHONPATH": path,
        "NO_COLOR": "1",
        "TRITON_INTERPRET": "1" if subject == "triton.interpret" else "0",
        "PJRT_NPROC": "8",  # what the interpreter of TPU kernels needs
    }
    ring = subject.startswith("ring.")
    if "interpret" in subject or ring:
        found["JAX_PLATFORMS"] = "cpu"  # also on a machine that has a GPU
    if ring:
        found["PJRT_NPROC"] = "64"  # eight for each device, whose exchanges wait in threads
        # First, since XLA reads none after a word that is no flag.
        flags = f"--xla_force_host_platform_device_count={_DEVICES} {os.environ.get('XLA_FLAGS', '')}"
        found["XLA_FLAGS"] = flags.strip()
    return found


def run_planted(
    subject: str, folder: Path, *arguments: str, seconds: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the package in a folder. Raises subprocess.TimeoutExpired after so many seconds.

    subject: that must be able to run; empty for none. variables: of the environment, besides.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment(subject, folder), **variables},
        capture_output=True,
        check=False,
        text=True,
        timeout=seconds,
    )
