"""The residuals that tokamax returns beside or instead of normalised attention, and what they belong to."""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from attest.kernels.attention import flash_attention_with_lse


def softmax_residuals(call: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return the row maximum m of the logits and l, the sum of exp(logit - m), both [*B, Hq, Sq] float32.

    The numerator of a value of ones is l, and m is lse - log(l). In float32, whatever the dtype of the call,
    so that m and l are rounded alike. Both are constant under differentiation, as tokamax's are. A row that
    sees no key has the lowest float32 and 0: merging such parts then gives no NaN.
    """
    constant: dict[str, Any] = {
        name: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x for name, x in call.items()
    }
    query, key = (jnp.asarray(constant[name]).astype(jnp.float32) for name in ("query", "key"))
    ones = jnp.ones((*key.shape[:-1], 1), jnp.float32)
    constant |= {"query": query, "key": key, "value": ones}
    sums, lse = flash_attention_with_lse(**constant, normalize_output=False)
    total = jnp.swapaxes(sums[..., 0], -1, -2)
    empty = jnp.isneginf(lse)
    maximum = lse - jnp.log(jnp.where(empty, 1.0, total))
    return jnp.where(empty, jnp.finfo(jnp.float32).min, maximum), total


@jax.custom_vjp
def constant_maximum(out: jax.Array) -> jax.Array:
    """Return a numerator; its derivative is refused.

    The kernels hold the row maximum constant in it (S26), and tokamax differentiates the maximum.
    """
    return out


def _forward(out: jax.Array) -> tuple[jax.Array, None]:
    return out, None


def _backward(_: None, cotangent: jax.Array) -> NoReturn:
    raise NotImplementedError(
        "normalize_output: got a derivative of the numerator; expected none, since tokamax "
        "differentiates the row maximum and our kernels do not. Differentiate the normalised output, or use "
        "attest.flash_attention."
    )


constant_maximum.defvjp(_forward, _backward)
