"""The calls of our function in one test: how many ran, and what the others were refused with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax


@dataclass
class Calls:
    """The calls of our function in a test: the number that ran, and the errors of those that raised one.

    A call that is only traced does not run, as where `jax.eval_shape` computes the shape of a result.
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
        if _runs_later(result):
            jax.debug.callback(calls.run)
        else:
            calls.run()
        return result

    return call


def _runs_later(result: Any) -> bool:
    """Return whether a call was traced, for a program that can count its runs.

    One of symbolic sizes cannot: it is to be exported, and JAX exports no callbacks.
    """
    traced = [x for x in jax.tree.leaves(result) if isinstance(x, jax.core.Tracer)]
    return any(all(isinstance(size, int) for size in x.shape) for x in traced)
