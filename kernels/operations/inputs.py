"""The inputs that candidates are timed on: floats drawn anew, integers as the call gives them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.options import refuse

# Float arrays that are constants of a call: they keep their values, and have no gradients.
CONSTANTS = frozenset({"alibi_slopes"})


def draw(arguments: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of a call with normal numbers in place of each float array.

    Integer and bool arrays are kept, since their values decide which pairs are visible, and so are constants.

    Raises: ValueError for one of them that is a shape alone.
    """
    drawn: dict[str, Any] = {}
    for number, (name, x) in enumerate(sorted(arguments.items())):
        if name not in CONSTANTS and _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating):
            key = jax.random.fold_in(jax.random.key(seed % 2**32), number)
            drawn[name] = jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
        else:
            check_concrete(name, x)
            drawn[name] = x
    return drawn


def check_concrete(name: str, x: Any) -> None:
    """Refuse an argument with integers whose values are not known.

    Raises: ValueError naming the argument.
    """
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
            expected = "the array itself, as its values decide which pairs are visible"
            refuse(name, f"the shape {leaf.shape} alone", expected, "Pass the array.")


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
