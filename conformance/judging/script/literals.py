"""Numbers and arrays as Python source that rebuilds them exactly."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Digits of a limit, which is rounded up to them.
_DIGITS = 6


class ScriptError(ValueError):
    """A case has no script; the message is one sentence that says why."""


def literal(value: Any) -> str:
    """Return a plain Python value as source. Raises ScriptError."""
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, str):
        return repr(value).replace(" ", r"\x20")  # a long line is broken at its spaces
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    raise ScriptError(
        f"an object of {type(value).__name__} is no number, text or tuple, which a script can hold"
    )


def array(values: NDArray[Any], module: str) -> str:
    """Return an array as a call of `module`.array, "np" or "jnp", that rebuilds it bit for bit."""
    dtype = values.dtype
    numbers = [_number(number, dtype) for number in values.ravel()]
    name = "bool" if dtype == np.bool_ else f"{module}.{dtype.name}"
    shape = "" if values.ndim == 1 else f".reshape{values.shape}"
    return f"{module}.array([{', '.join(numbers)}], {name}){shape}"


def limit(values: NDArray[np.float64]) -> str:
    """Return limits rounded up to a few digits: one number where all are equal then, else an array."""
    rounded = [_rounded_up(float(value)) for value in values.ravel()]
    if len(set(rounded)) == 1:
        return rounded[0]
    return f"np.array([{', '.join(rounded)}]).reshape{values.shape}"


def _number(number: Any, dtype: np.dtype[Any]) -> str:
    if dtype == np.bool_ or dtype.kind in "iu":
        return str(int(number))
    exact = float(number)
    if not math.isfinite(exact):
        return f"{'-' if exact < 0 else ''}np.{'nan' if math.isnan(exact) else 'inf'}"
    # A float32 has a short decimal, which is read as a float64 first: that it rounds to it again is no law.
    short = str(number)
    return short if dtype == np.float32 and np.float32(float(short)) == exact else repr(exact)


def _rounded_up(number: float) -> str:
    if not math.isfinite(number):
        return "np.inf"
    text = f"{number:.{_DIGITS - 1}e}"
    if float(text) < number:
        digits, _, exponent = text.partition("e")
        text = f"{float(digits) + 10.0 ** (1 - _DIGITS):.{_DIGITS - 1}f}e{exponent}"
    return repr(float(text))
