"""The time that a call takes: the median of calls of a compiled program, never inside a trace."""

import atexit
import statistics
import threading
import time
from collections.abc import Callable
from queue import Empty, Queue
from typing import Any

from jax._src.core import trace_state_clean  # JAX has no public name for it

# A candidate is given up after so many calls, if it then is so many times slower than the best.
_FEW = 5
_CLEARLY = 1.5
# As many calls at a time as take so long, but no more than these.
_SECONDS_AT_A_TIME = 0.002
_MOST_AT_A_TIME = 50
# Seconds that a process waits at its end for threads that were left alone.
_PATIENCE = 5.0

_left: list[threading.Thread] = []


class OutOfTimeError(Exception):
    """A started call that did not end within its time limit."""


def traced() -> bool:
    """Return whether JAX traces what runs now, for jax.jit or another transformation."""
    return not trace_state_clean()


def within[T](seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread of its own.

    Raises: OutOfTimeError after so many seconds; the thread is then left alone, since nothing can end what
    runs on a device. The process ends some seconds later if it still runs then. What `work` raises.
    """
    answers: Queue[tuple[bool, Any]] = Queue()

    def run() -> None:
        try:
            answers.put((True, work()))
        except BaseException as error:
            answers.put((False, error))

    thread = threading.Thread(target=run, daemon=True, name="attest-tuning")
    thread.start()
    try:
        succeeded, answer = answers.get(timeout=seconds)
    except Empty:
        _left.append(thread)
        raise OutOfTimeError from None
    if not succeeded:
        raise answer
    return answer


@atexit.register
def wait_for_left() -> None:
    """Give threads that were left alone some seconds to end: one amid a compilation can crash the process."""
    end = time.monotonic() + _PATIENCE
    while _left:
        _left.pop().join(max(0.0, end - time.monotonic()))


def median_seconds(
    call: Callable[[int], Any],
    warmup: int,
    iters: int,
    best: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median time of a call in seconds, of at most `iters` timings.

    warmup: calls before the first timing, and again as many in groups as timings have.

    call: makes so many calls and waits for the last. Short calls are made several at a time, so that what is
    measured is the device and not the host that waits for it. best: the fastest median so far; a call that is
    clearly slower is not timed to the end.
    """
    call(warmup)
    start = clock()
    call(1)
    once = clock() - start
    several = max(1, min(_MOST_AT_A_TIME, int(_SECONDS_AT_A_TIME / once))) if once > 0 else _MOST_AT_A_TIME
    for _ in range(warmup):
        # A device that was idle while the candidate was compiled and judged is slow at first.
        call(several)
    times: list[float] = []
    for _ in range(iters):
        start = clock()
        call(several)
        times.append((clock() - start) / several)
        if len(times) == _FEW and min(times) > _CLEARLY * best:
            break
    return statistics.median(times)
