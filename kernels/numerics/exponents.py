"""References of exponents: the numbers subtracted from logits, so that weights of finite logits are right.

A weight is exp(logit - reference). Where logits are so large that their last bits are whole nats, the logit
and the reference of the same pair differ by what each was rounded by, and the weight would be 0 or infinite
instead of 1: compilers fuse a scale with the subtraction, passes sum in other orders, and units convert. So
there a reference is lowered by more than these bits, and kernels take min(weight, 1).
"""

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
# From here on the last bits of a float32 are 16 units and more: what is lost below them is no weight.
HUGE = 2.0**28
_LAST_BITS = 2.0**-19
_LARGEST = float(jnp.finfo(jnp.float32).max)
# Where a running maximum begins: no finite logit is lower, and -inf - LOWEST is -inf, not NaN.
LOWEST = -_LARGEST


def lowered(reference: jax.Array) -> jax.Array:
    """Return references, lower where they are huge; non-finite ones stay as they are."""
    size = jnp.abs(reference)
    huge = (size > jnp.float32(HUGE)) & (size < jnp.inf)
    less = reference - jnp.where(huge, size * jnp.float32(_LAST_BITS), jnp.float32(0))
    # Below the lowest number there is no reference, and no logit either.
    return jnp.where(huge, jnp.maximum(less, jnp.float32(LOWEST)), less)


def in_units(lse: jax.Array, unit: float = LOG2E) -> jax.Array:
    """Return lse * unit, of natural logarithms by default binary ones; finite ones stay finite."""
    product = lse * jnp.float32(unit)
    return jnp.where(jnp.isinf(lse), product, jnp.clip(product, -_LARGEST, _LARGEST))
