"""Tests that need a process started with certain variables, which run in one of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_alone(file: str, variables: Mapping[str, str], seconds: int, devices: int = 2) -> None:
    """Runs the tests of a file in a process of some devices that has the variables; fails where they do."""
    # First, since XLA reads none after a word that is no flag.
    flags = f"--xla_force_host_platform_device_count={devices} {os.environ.get('XLA_FLAGS', '')}".strip()
    environment = {**os.environ, "XLA_FLAGS": flags, **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
