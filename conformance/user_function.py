"""The function behind a subject's call."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def plain_function(call: Callable[..., Any]) -> Any:
    """Return the function behind decorators, partial applications and methods."""
    while isinstance(call, partial):
        call = call.func
    call = inspect.unwrap(call)
    if not inspect.isroutine(call):
        call = type(call).__call__
    return inspect.unwrap(getattr(call, "__func__", call))
