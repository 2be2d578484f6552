"""The exchange between a sequence in order and one in which device d of n has pieces d and 2n - 1 - d.

Each half of a shard goes to one device and each device gets one even and one odd half, so that two permutes
do it, both ways.
"""

import jax
import jax.numpy as jnp
from jax import lax


def to_zigzag(x: jax.Array, axis: int, name: str, devices: int) -> jax.Array:
    """Return the pieces d and 2n - 1 - d of an array whose shards follow each other along an axis."""
    even, odd = jnp.split(x, 2, axis)
    perms = _homes(devices)
    even, odd = (lax.ppermute(half, name, perm) for half, perm in zip((even, odd), perms, strict=True))
    first, second = _swapped_on_odd(even, odd, name)
    return jnp.concatenate((first, second), axis)


def from_zigzag(x: jax.Array, axis: int, name: str, devices: int) -> jax.Array:
    """Return the shard of the sequence in order: the inverse of `to_zigzag`."""
    first, second = jnp.split(x, 2, axis)
    even, odd = _swapped_on_odd(first, second, name)
    perms = ([(to, at) for at, to in perm] for perm in _homes(devices))
    return jnp.concatenate(
        [lax.ppermute(half, name, perm) for half, perm in zip((even, odd), perms, strict=True)], axis
    )


def _homes(devices: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the destinations of the even halves and of the odd ones: pairs of devices."""

    def home(piece: int) -> int:
        return piece if piece < devices else 2 * devices - 1 - piece

    return (
        [(device, home(2 * device)) for device in range(devices)],
        [(device, home(2 * device + 1)) for device in range(devices)],
    )


def _swapped_on_odd(a: jax.Array, b: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Return the two, in the other order on devices of odd numbers: there the first piece is an odd half."""
    odd = lax.axis_index(name) % 2 == 1
    return jnp.where(odd, b, a), jnp.where(odd, a, b)
