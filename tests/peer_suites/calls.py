"""The calls of our function in one test: how many ran, and what the others were refused with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax


@dataclass
class Calls:
    """What became of the calls of our function: the number that ran, and the errors of those that raised one.

    A call that is only traced, as `jax.eval_shape` does to learn the shape of a result, does not run.
    """

    ran: int = 0
    refusals: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Count a call that runs."""
        self.ran += 1


def counted_by(calls: Calls, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which counts its calls."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            calls.refusals.append(f"{type(error).__name__}: {error}")
            raise
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(result)):
            jax.debug.callback(calls.run)  # counts when the program runs
        else:
            calls.run()
        return result

    return call
