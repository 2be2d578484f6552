"""Segment ids of libraries that only compare them, where a negative id marks no padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.call.arrays import check_is_array, is_integer
from attest.kernels.call.options import refuse


def as_segments(q_name: str, q_ids: Any, kv_name: str, kv_ids: Any) -> dict[str, Any]:
    """Return segment ids by which our kernels show the pairs with equal ids (S8).

    q_ids [*B, Sq] and kv_ids [*B, Sk] have one dtype, of any integers. Each id becomes its rank among all of
    them, so none is negative.

    Raises: ValueError naming the argument.
    """
    for name, ids in ((q_name, q_ids), (kv_name, kv_ids)):
        check_is_array(name, ids)
        if not is_integer(ids.dtype):
            refuse(name, f"dtype {ids.dtype}", "an integer dtype", "Cast it with .astype('int32').")
    if q_ids.dtype != kv_ids.dtype:
        refuse(kv_name, f"dtype {kv_ids.dtype}", f"{q_ids.dtype}, as {q_name}", "Cast one of the two.")
    # NumPy's 64 bits are compared before JAX narrows them.
    numpy: Any = np if isinstance(q_ids, np.ndarray) and isinstance(kv_ids, np.ndarray) else jnp
    ordered = numpy.sort(numpy.concatenate([q_ids.ravel(), kv_ids.ravel()]))
    ranks: list[jax.Array] = [numpy.searchsorted(ordered, ids).astype("int32") for ids in (q_ids, kv_ids)]
    return {"q_segment_ids": ranks[0], "kv_segment_ids": ranks[1]}
