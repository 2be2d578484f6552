"""Tests that need Triton's interpreter: how they are marked, and how they run where it was not asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.triton.launch import INTERPRETED

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(INTERPRETED, reason="runs in a process without TRITON_INTERPRET=1")


def run_interpreted(file: str) -> None:
    """Runs the tests of a file in a process of its own: the choice is made where a kernel is defined."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
