"""Timing on a CPU: CPU time of this process, which varies less on a busy machine than time by the clock."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

_SHORTEST = 3e-3  # seconds that are timed at once: shorter ones are within the clock's error


def seconds(call: Callable[[], Any], times: int) -> float:
    """Return the CPU seconds of a call, of so many one after another."""
    start = time.process_time()
    for _ in range(times):
        result = call()
    jax.block_until_ready(result)
    return (time.process_time() - start) / times


def in_turns(calls: Sequence[Callable[[], Any]], during: float) -> list[float]:
    """Return the median seconds of each call; they are timed in turns for so many seconds by the clock.

    Each turn has another order, as a call also pays for what the one before it left to threads.
    """
    jax.block_until_ready([call() for call in calls])
    together = max(1, round(_SHORTEST / max(1e-6, seconds(calls[-1], 3))))
    taken: list[list[float]] = [[] for _ in calls]
    stop = time.perf_counter() + during
    order = list(range(len(calls)))
    dice = random.Random(0)
    while time.perf_counter() < stop:
        dice.shuffle(order)
        for i in order:
            taken[i].append(seconds(calls[i], together))
    return [statistics.median(times) for times in taken]
