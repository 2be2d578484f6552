"""Functions over a mesh from whole arrays: made once for calls that are alike, and arrays placed for them."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from attest.kernels.call.options import refuse


def once_for_alike[**P, F](make: Callable[P, F]) -> Callable[P, F]:
    """Make one function for arguments that are equal, so that an eager call of it compiles once.

    Arguments without a hash, such as a list, give a new function each time.
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
    """Return an array placed as jax.shard_map requires on an explicit mesh."""
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def check_devices(mesh: Any, query: Any) -> None:
    """Refuse a mesh without devices where nothing else determines the devices of a call.

    Raises: ValueError.
    """
    if not isinstance(mesh, AbstractMesh) or mesh.size == 1 or isinstance(query, Tracer):
        return
    placed = isinstance(query, jax.Array) and len(query.devices()) == mesh.size
    if isinstance(query, jax.Array | np.ndarray) and not placed and jax.sharding.get_mesh().empty:
        expected = "a jax.sharding.Mesh, or arrays that are on one"
        refuse("mesh", "an AbstractMesh", expected, "Give the mesh with its devices, or use jax.set_mesh.")
