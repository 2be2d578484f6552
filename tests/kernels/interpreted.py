"""Tests that need the interpreter of Triton or of Pallas's TPU kernels: the markers of their processes."""

import os

import pytest

# The choice is made where a kernel is defined.
needs_interpreter = pytest.mark.process(devices=2, TRITON_INTERPRET="1")
# XLA makes its threads when it starts.
needs_tpu_interpreter = pytest.mark.process(devices=2, PJRT_NPROC="8")
needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="runs in a process without TRITON_INTERPRET=1"
)
