"""Extra leading batch dimensions (clause S27): the reshaped call, and its results reshaped back."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from attest.kernels.call.arrays import broadcast, exactly_narrowed
from attest.kernels.call.axes import AXES, behind_batch
from attest.kernels.call.options import refuse

# The arrays whose batch dimensions may be 1 each, or left out.
_BROADCAST = frozenset(
    {"attention_mask", "bias", "q_positions", "kv_positions", "kv_start", "kv_end", "alibi_slopes"}
)
# Those that lack axes as in NumPy's broadcasting.
_PAIRS = ("attention_mask", "bias")

type Leading = tuple[int, ...]


def merged_arrays(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Leading | None]:
    """Return the arguments of a call with one batch dimension, and the batch dimensions that were given.

    query [..., Sq, Hq, D] has none, two or more of them; with one the arguments are returned as they are,
    with None. [Sq, Hq, D] is a batch of one. A mask, bias, positions or ranges may have 1 for any of the
    dimensions, and so may slopes of ALiBi, which may also have none of them. Offsets [n] for n sequences have
    none where cumulative lengths define the sequences.

    Raises: ValueError naming the argument whose batch dimensions are others than those of query.
    """
    arguments = exactly_narrowed(arguments)
    query = arguments["query"]
    if not isinstance(query, jax.Array | np.ndarray) or query.ndim in (0, 1, 2, 4):
        return arguments, None
    leading = tuple(query.shape[:-3])
    result = dict(arguments)
    has_lengths = arguments.get("cum_seqlens_q") is not None
    for name in AXES:
        x, axes = arguments.get(name), behind_batch(name)
        if axes is None:
            continue
        if name == "q_offset" and has_lengths and getattr(x, "ndim", None) == 1:
            continue
        if name == "alibi_slopes" and getattr(x, "ndim", None) == 1:
            continue
        if isinstance(x, jax.Array | np.ndarray):
            result[name] = _apart(_merge(name, x, leading, axes, name in _BROADCAST))
    return result, leading


def split(x: jax.Array, leading: Leading | None) -> jax.Array:
    """Return a result [B, ...] with the batch dimensions that were given in place of B."""
    return x if leading is None else _apart(x).reshape(*leading, *x.shape[1:])


def _apart(x: Any) -> Any:
    """Return the array behind a barrier, so that XLA compiles what lies behind as for one batch dimension.

    XLA on GPUs measures algorithms for each product, and may choose another one, with other bits, where a
    reshape is fused into the product. In an eager call, the reshape is a program of its own.
    """
    return lax.optimization_barrier(x) if isinstance(x, Tracer) else x


def _merge(name: str, x: Any, leading: Leading, axes: int, broadcasts: bool) -> Any:
    if name == "q_offset" and x.ndim == 0:
        return x
    if name in _PAIRS and 2 <= x.ndim < len(leading) + axes:
        x = x.reshape((1,) * (len(leading) + axes - x.ndim) + x.shape)
    own = tuple(x.shape[: x.ndim - axes])
    fits = len(own) == len(leading) and all(
        size == whole or (broadcasts and size == 1) for size, whole in zip(own, leading, strict=True)
    )
    if x.ndim < axes or not fits:
        ones = ", or 1 for any of them" if broadcasts else ""
        refuse(
            name,
            f"shape {x.shape}",
            f"the batch dimensions of query, {leading}{ones}, and {axes} axes behind them",
            "Give every argument as many batch dimensions as query has.",
        )
    behind = x.shape[len(own) :]
    if all(size == 1 for size in own):
        return x.reshape(1, *behind)
    if own != leading:
        x = broadcast(x, (*leading, *behind))
    return x.reshape(math.prod(leading), *behind)
