"""The versions of packages in other environments."""

import subprocess
from functools import cache

from attest.conformance.bridge.client import variables_there

_PROGRAM = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
_SECONDS = 60.0


@cache
def version_there(python: str, distribution: str) -> str:
    """Return the version of a distribution in the environment of an interpreter; "" if it is not known."""
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM, distribution],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=variables_there(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
