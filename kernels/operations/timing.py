"""How long a call takes: the median of calls of a compiled program, never inside a trace."""

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, Queue
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.operations.kernel import Kernel

# A candidate is given up after so many calls, if it then is so many times slower than the best.
_FEW = 5
_CLEARLY = 1.5


class OutOfTimeError(Exception):
    """What was started did not end within its time limit."""


def within[T](seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread of its own.

    Raises: OutOfTimeError after so many seconds; the thread is then left alone, since nothing can end what
    runs on a device. What `work` raises.
    """
    answers: Queue[tuple[bool, Any]] = Queue()

    def run() -> None:
        try:
            answers.put((True, work()))
        except BaseException as error:
            answers.put((False, error))

    threading.Thread(target=run, daemon=True, name="attest-tuning").start()
    try:
        succeeded, answer = answers.get(timeout=seconds)
    except Empty:
        raise OutOfTimeError from None
    if not succeeded:
        raise answer
    return answer


def compiled_call(
    kernel: Kernel[Any, Any], config: Any, arguments: Mapping[str, Any], backward: bool
) -> Callable[[], Any]:
    """Return a call of a compiled program on these arguments: the operation, or it with all its gradients."""
    arrays = {name: x for name, x in arguments.items() if _is_traced(x)}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    floats = {name: x for name, x in arrays.items() if _is_float(x)}
    others = {name: x for name, x in arrays.items() if name not in floats}

    def forward(floats: dict[str, Any], others: dict[str, Any]) -> Any:
        out = kernel.run(cfg=config, **floats, **others, **static)
        return out[0] if isinstance(out, tuple) else out

    def both(floats: dict[str, Any], others: dict[str, Any]) -> Any:
        out, pull = jax.vjp(lambda floats: forward(floats, others), floats)
        return out, pull(jnp.ones_like(out))

    program = jax.jit(both if backward else forward).lower(floats, others).compile()
    return lambda: jax.block_until_ready(program(floats, others))


def median_seconds(
    call: Callable[[], Any],
    warmup: int,
    iters: int,
    best: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median time of a call in seconds, after `warmup` calls, of at most `iters`.

    best: the fastest median so far; a call that is clearly slower is not timed to the end.
    """
    for _ in range(warmup):
        call()
    times: list[float] = []
    for _ in range(iters):
        start = clock()
        call()
        times.append(clock() - start)
        if len(times) == _FEW and min(times) > _CLEARLY * best:
            break
    return statistics.median(times)


def _is_traced(x: Any) -> bool:
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
