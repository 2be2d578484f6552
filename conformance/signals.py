"""When a signal that asks a run to end is handled: after a call of the workers' pool, not inside one.

An exception out of the middle of a pool leaves its locks as they are, and the run then waits for ever.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def postponed() -> Generator[None, None, None]:
    """The first signal that asks for an end in here is handed to the handler of outside once it is left.

    Elsewhere than in the main thread, where no signal arrives, nothing is postponed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {
        number: signal.signal(number, lambda number, _frame: came.append(number)) for number in _ENDING
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])
