"""The equations of a program as JAX traces it."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(it: Any) -> Iterator[Any]:
    """Every equation within a jaxpr or an equation."""
    params = [] if hasattr(it, "eqns") else it.params.values()
    jaxprs = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(tuple(params), is_leaf=_is_jaxpr)]
    for jaxpr in [it] if hasattr(it, "eqns") else jaxprs:
        for eqn in getattr(jaxpr, "eqns", ()):
            yield eqn
            yield from equations(eqn)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")
