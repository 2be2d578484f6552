"""Capture of what compilers write past Python's streams."""

import ctypes
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from tempfile import TemporaryFile

STDOUT, STDERR = 1, 2


@contextmanager
def capture_fd(descriptor: int = STDERR) -> Generator[Callable[[], str]]:
    """Capture what is written to stderr, or stdout, within the block, by LLVM, XLA and ptxas too.

    It explains errors, and is noise otherwise.
    """
    _flush()
    before = os.dup(descriptor)
    with TemporaryFile() as file:

        def read() -> str:
            _flush()
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), descriptor)
        try:
            yield read
        finally:
            _flush()
            os.dup2(before, descriptor)
            os.close(before)


def _flush() -> None:
    """Flush Python's buffers and those of C, so that the capture holds nothing written before or after."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
