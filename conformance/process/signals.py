"""The end of a run by SIGINT or SIGTERM, which keeps the results so far.

The exception is not KeyboardInterrupt, which a subject may raise and a library may catch.
"""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived."""


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """Raise Interrupted at the first SIGINT or SIGTERM within the block; ignore later ones.

    This also holds where SIGINT is ignored, as in commands that a shell starts in the background. Threads
    other than the main one get no signals, and nothing changes there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = False

    def end(_number: int, _frame: object) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise Interrupted

    with _handled(end):
        yield


@contextmanager
def postponed() -> Generator[Callable[[], bool], None, None]:
    """Postpone the first SIGINT or SIGTERM within the block until the block is left.

    Gives a function that returns whether one arrived, for blocks that can end early.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    try:
        with _handled(lambda number, _frame: came.append(number)):
            yield lambda: bool(came)
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handled(handler: Callable[[int, object], None]) -> Generator[None, None, None]:
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, former in before.items():
            # None stands for a handler that Python did not install.
            signal.signal(number, signal.SIG_DFL if former is None else former)
