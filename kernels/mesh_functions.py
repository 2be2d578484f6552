"""Functions over a mesh from whole arrays: made once for calls that are alike, and arrays placed for them."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def once_for_alike[**P, F](make: Callable[P, F]) -> Callable[P, F]:
    """Make one function for arguments that are equal, so that an eager call of it compiles once.

    Arguments that have no hash, as an option that is a list, give a new function each time.
    """
    cached = lru_cache(maxsize=256)(make)

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> F:
        try:
            hash((args, tuple(kwargs.items())))
        except TypeError:
            return make(*args, **kwargs)
        return cached(*args, **kwargs)

    return made


def placed_on(mesh: Any, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return an array placed as jax.shard_map takes it where the types of arrays say where they are."""
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))
