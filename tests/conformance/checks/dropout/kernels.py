"""A kernel in plain JAX whose dropout draws from a generator of its own, and what can be wrong with it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attest.conformance.subject import Subject
from attest.reference.semantics import Semantics

Keep = Any


@dataclass(frozen=True)
class Draws:
    """How weights are dropped.

    shape: the axes of [B, H, Sq, Sk] that have masks of their own; places along the others share one.
    backward: "same", "none" or "others". seeded: whether the seed counts. factor: of the rate.
    scaled: whether kept weights are divided by the share that is kept.
    """

    shape: str = "bhqk"
    backward: str = "same"
    seeded: bool = True
    factor: float = 1.0
    scaled: bool = True


def _keep(draws: Draws, shape: tuple[int, ...], rate: float, seed: int) -> Keep:
    own = tuple(size if axis in draws.shape else 1 for axis, size in zip("bhqk", shape, strict=True))
    key = jax.random.fold_in(jax.random.key(7), seed % 2**32 if draws.seeded else 0)
    kept = jax.random.bernoulli(key, 1 - draws.factor * rate, own)
    scale = 1 / (1 - rate) if draws.scaled else 1.0
    return jnp.broadcast_to(jnp.where(kept, scale, 0.0), shape).astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(draws: Draws, options: tuple[float, int] | None, weights: Any, value: Any) -> Any:
    dropped = weights if options is None else weights * _keep(draws, weights.shape, *options)
    return jnp.einsum("bhij,bjhd->bihd", dropped, value)


def _summed_forward(draws: Draws, options: Any, weights: Any, value: Any) -> tuple[Any, Any]:
    return _summed(draws, options, weights, value), (weights, value)


def _summed_backward(draws: Draws, options: Any, saved: Any, d_out: Any) -> tuple[Any, Any]:
    weights, value = saved
    factor = jnp.ones_like(weights)
    if options is not None and draws.backward != "none":
        rate, seed = options
        factor = _keep(draws, weights.shape, rate, seed + (draws.backward == "others"))
    d_weights = factor * jnp.einsum("bihd,bjhd->bhij", d_out, value)
    return d_weights, jnp.einsum("bhij,bihd->bjhd", weights * factor, d_out)


_summed.defvjp(_summed_forward, _summed_backward)


def attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    draws: Draws = Draws(),
    causal: bool = False,
    dropout_prob: float = 0.0,
    dropout_seed: int | None = None,
) -> tuple[Any, Any]:
    """Return out and lse."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, group, axis=2) for array in (key, value))
    logits = jnp.einsum("bihd,bjhd->bhij", query, key, precision="highest") * query.shape[3] ** -0.5
    if causal:
        rows, keys = logits.shape[2:]
        seen = jnp.tri(rows, keys, keys - rows, dtype=bool)
        logits = jnp.where(seen[None, None], logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(axis=3, keepdims=True), -1e30))
    raised = jnp.exp(logits - top)
    total = raised.sum(axis=3, keepdims=True)
    weights = raised / jnp.where(total == 0, 1.0, total)
    options = None if dropout_seed is None else (dropout_prob, dropout_seed)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1.0, total)))
    return _summed(draws, options, weights, value), lse[..., 0]


def kernel(draws: Draws = Draws(), **declared: Any) -> Subject:
    """The kernel as a Subject."""
    options: dict[str, Any] = {
        "features": frozenset({"dropout", "gqa", "causal"}),
        "semantics": Semantics(dropout="own_generator"),
        "returns_lse": True,
    }
    return Subject("own", partial(attend, draws=draws), **(options | declared))
