"""The command as a process of its own, for what only a process can show: signals, streams and sudden ends."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

# A module of the user's own: a kernel that is stuck in the second shape, and one that is right.
SCRIPT = """
import time
from pathlib import Path
from attest.conformance import Subject
from tests import toys

def _slowly(query, key, value, *, causal=False):
    with Path("calls").open("a") as calls:
        print(*query.shape, *key.shape, *value.shape, file=calls)
    if len(set(Path("calls").read_text().splitlines())) > 1:
        Path("stuck").touch()
        time.sleep(600)
    return toys.right.call(query, key, value, causal=causal)

slow = Subject("mine.slow", _slowly)
right = Subject("mine.right", toys.right.call, features=frozenset({"causal"}))
"""


def started(folder: Path, *arguments: object, shell: str = "", **options: Any) -> subprocess.Popen[str]:
    """`python -m attest` in a folder with the module `mine`. shell: what follows on a shell's line."""
    (folder / "mine.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command: Any = [sys.executable, "-m", "attest", *map(str, arguments)]
    if shell:
        command = ["sh", "-c", f'"$@" {shell}', "sh", *command]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, cwd=folder, env=environment, **options)


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a process does."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
