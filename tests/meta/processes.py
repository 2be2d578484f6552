"""Python on the project as a process of its own, in somebody else's folder."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a folder, whose modules come before the project's; `variables` of the environment."""
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", **variables},
        capture_output=True,
        check=False,
        text=True,
    )


def besides_progress(stderr: str) -> list[str]:
    """The lines but those that tell how far a command is, which depend on how fast the machine is."""
    return [line for line in stderr.splitlines() if " tasks done after " not in line]


def tokens(case: dict[str, Any]) -> int:
    """The queries and keys of a case as JSON."""
    return case.get("q_len", 1) + case.get("kv_len", 1)
