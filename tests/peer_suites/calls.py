"""The calls of our function in one test: how many returned, and what the others were refused with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any


@dataclass
class Calls:
    """What became of the calls of our function: the number that returned, and the errors of the others."""

    returned: int = 0
    refusals: list[str] = field(default_factory=list)


def counted_by(calls: Calls, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which counts its calls."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            calls.refusals.append(f"{type(error).__name__}: {error}")
            raise
        calls.returned += 1
        return result

    return call
