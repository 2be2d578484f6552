"""Tests that need Triton's interpreter: how they are marked, and how they run where it was not asked for."""

import pytest

from attest.kernels.triton.target import INTERPRETED
from tests.kernels.alone import run_alone

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(INTERPRETED, reason="runs in a process without TRITON_INTERPRET=1")


def run_interpreted(file: str) -> None:
    """Runs the tests of a file in a process of its own: the choice is made where a kernel is defined."""
    run_alone(file, {"TRITON_INTERPRET": "1"}, seconds=600)
