"""Checks of options: arguments that are one static value each, such as a scale, a flag or a dtype.

A refusal is a `ValueError` with the name of the argument, what was got, what was expected, and what to do
about it (clause S20).
"""

import math
import operator
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
# The values of `dropout_shared`, and what a call then holds: the coordinates that are 0 (S29).
SHARED_DROPOUT = {None: "", "b": "b", "h": "h", "bh": "bh"}
_LARGEST = float(np.finfo(np.float32).max)
# A cap is divided by, multiplied with and turned into bits: beyond these its float32 arithmetic overflows.
CAP_RANGE = (2.0**-100, 2.0**100)
# So is the size of a scale, unless it is 0; attest.reference.defined has the same ranges.
SCALE_RANGE = (2.0**-100, 2.0**100)
# What Flax's linen layers call a mask and the key of dropout. They drop what a function has no parameter for
# without a word: a function without these would attend to all keys and drop no weights.
NAMES_OF_FLAX = ("mask", "dropout_rng")
# Of a malformed argument no more than this is shown.
_SHOWN = 200


def refuse(name: str, got: object, expected: str, advice: str) -> NoReturn:
    """Raise the one form of ValueError with which a malformed argument is refused (clause S20)."""
    text = str(got)
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}..."
    raise ValueError(f"{name}: got {text}; expected {expected}. {advice}")


def shown(value: Any) -> str:
    """Return the repr of a value, or its type if repr fails, as for an integer of very many digits."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def check_names_of_flax(mask: Any, dropout_rng: Any) -> None:
    """Refuse the two arguments that layers of Flax pass by names of their own.

    Raises: ValueError naming the argument.
    """
    for name, own, given in (
        ("mask", "attention_mask", mask),
        ("dropout_rng", "dropout_seed", dropout_rng),
    ):
        if given is not None:
            advice = (
                f"Here it is {own}. Is this function the attention_fn of a layer of Flax? Give the layer "
                "attest.kernels.adapters.flax_linen.dot_product_attention, which has all parameters."
            )
            refuse(name, f"a {type(given).__name__}", "None", advice)


def check_flag(name: str, value: Any) -> bool:
    """Return a static bool."""
    refuse_tracer(name, value)
    if not isinstance(value, bool | np.bool_):
        refuse(name, shown(value), "True or False", "Pass a Python bool.")
    return bool(value)


def check_number(name: str, value: Any) -> float:
    """Return a static real number that float32 holds: finite, and at most its largest number in size."""
    refuse_tracer(name, value)
    if isinstance(value, bool | np.bool_ | str | bytes | complex):
        refuse(name, shown(value), "one real number", "Pass a Python float.")
    try:
        single = np.ndim(value) == 0
        number = float(value) if single else math.nan
    except OverflowError:
        single, number = True, math.inf
    except Exception:
        single, number = False, math.nan
    if not single:
        refuse(name, shown(value), "one real number", "Pass a Python float.")
    if not math.isfinite(number) or abs(number) > _LARGEST:
        expected = f"a finite number that float32 holds, at most {_LARGEST:.8g} in size"
        refuse(name, shown(value), expected, "Leave it out for the default.")
    return number


def check_scale(name: str, scale: Any) -> float:
    """Return a scale of the logits: 0, or a number whose products and inverse float32 holds."""
    number = check_number(name, scale)
    if number != 0.0 and not SCALE_RANGE[0] <= abs(number) <= SCALE_RANGE[1]:
        expected = f"0, or a number from {SCALE_RANGE[0]:.2g} to {SCALE_RANGE[1]:.2g} in size"
        refuse(name, number, expected, "Scale query or key, or leave it out for 1 / sqrt(head dim).")
    return number


def check_soft_cap(cap: Any) -> float | None:
    """Return the soft cap, a number whose products and inverse float32 holds."""
    if cap is None:
        return None
    number = check_number("logits_soft_cap", cap)
    if number <= 0.0:
        refuse("logits_soft_cap", number, "a positive number", "Pass None for no cap.")
    if not CAP_RANGE[0] <= number <= CAP_RANGE[1]:
        expected = f"a number from {CAP_RANGE[0]:.2g} to {CAP_RANGE[1]:.2g}"
        refuse("logits_soft_cap", number, expected, "Pass None for no cap.")
    return number


def check_dropout_prob(dropout_prob: Any) -> float:
    """Return the probability of dropping a pair, at least 0 and below 1."""
    probability = check_number("dropout_prob", dropout_prob)
    if not 0.0 <= probability < 1.0:
        expected = "a number from 0 to below 1"
        refuse("dropout_prob", probability, expected, "Give the probability of dropping a pair.")
    return probability


def check_dropout_shared(shared: Any) -> str:
    """Return the axes whose index in dropout is 0: "", "b", "h" or "bh" (S29)."""
    refuse_tracer("dropout_shared", shared)
    if not (shared is None or isinstance(shared, str)) or shared not in SHARED_DROPOUT:
        advice = "Name what shares one mask: the batch entries, the heads, or both."
        refuse("dropout_shared", shown(shared), "'b', 'h', 'bh' or None", advice)
    return SHARED_DROPOUT[shared]


def check_size(name: str, value: Any) -> int:
    """Return a static, positive integer."""
    size = check_integer(name, value)
    if size < 1:
        refuse(name, shown(size), "a positive integer", "Leave it out for the default.")
    return size


def check_integer(name: str, value: Any, advice: str = "Pass a Python int.") -> int:
    """Return a static integer."""
    refuse_tracer(name, value, advice)
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except Exception:  # whatever an object's __index__ raises, the argument is malformed
            pass
    refuse(name, shown(value), "an integer", advice)


def check_dtype(name: str, value: Any) -> str:
    """Return the name of one of the float dtypes of clause S16."""
    try:
        dtype = jnp.dtype(value).name
    except Exception:  # NumPy raises what it likes for what is no dtype
        dtype = shown(value)
    if dtype not in FLOAT_DTYPES:
        refuse(name, dtype, f"one of {', '.join(FLOAT_DTYPES)}", "Leave it out for the default.")
    return dtype


def refuse_tracer(
    name: str, value: Any, advice: str = "Close over it, or mark it static in jax.jit."
) -> None:
    """Refuse a value that `jax.jit` traces, where a static one is needed."""
    if isinstance(value, Tracer):
        refuse(name, "a traced value", "a static value", advice)
