"""What becomes of the words that compilers write to stderr past Python: they are kept, not shown."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from tempfile import TemporaryFile


@contextmanager
def overheard() -> Generator[Callable[[], str]]:
    """What is written to stderr within the block, by LLVM and XLA too.

    It explains errors, and is noise otherwise.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with TemporaryFile() as file:

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield read
        finally:
            os.dup2(before, 2)
            os.close(before)
