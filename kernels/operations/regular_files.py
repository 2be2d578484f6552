"""Bounded reading of files in the user's folders, which may hold anything."""

import os
import stat
from pathlib import Path


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    A pipe, a device or a folder is refused without waiting for it. What is checked is what was opened, so
    that it cannot be replaced in between.

    Raises: OSError, as `open` does; ValueError, in one clause, for another kind of file or a larger one.
    """
    # Without the flag, opening a pipe waits for somebody who writes. Windows has no such flag.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data
