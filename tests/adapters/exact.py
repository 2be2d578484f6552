"""The oracle's answer beside an adapter's: out and gradients of one call, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from attest.reference.oracle import Cotangents, attention
from attest.reference.problem import make_problem


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_exact(
    call: Callable[..., jax.Array],
    arrays: dict[str, Any],
    *,
    options: dict[str, Any],
    tolerance: float = 2e-5,
    like: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """Hold out and all gradients of `call(**arrays)` to the oracle under `options`.

    arrays: query, key, value and perhaps bias, of any dtype; the oracle reads the same numbers. `like` brings
    the [B, Sq, Hq, Dv] of the oracle to the layout of the adapter.
    """
    out, pull = jax.vjp(lambda xs: call(**xs), arrays)
    d_out = normal(*out.shape, seed=99).astype(out.dtype)
    (gradients,) = pull(jax.numpy.asarray(d_out))
    bias = arrays.get("bias")
    whole = {name: np.asarray(x) for name, x in arrays.items() if name != "bias"}
    if bias is not None:
        shape = (*bias.shape[:-1], whole["key"].shape[1])
        options = options | {"bias": np.array(np.broadcast_to(bias, shape))}
    four = d_out.reshape(*whole["query"].shape[:3], -1)
    answer = attention(make_problem(**whole, **options), cotangents=Cotangents(four))
    assert_close("out", out, like(answer.out), tolerance)
    for name, gradient in gradients.items():
        want = getattr(answer, f"d{name}")
        assert gradient.dtype == arrays[name].dtype
        if want.shape != gradient.shape:
            want = want.sum(axis=-1, keepdims=True)
        assert_close(f"d{name}", gradient, want, tolerance)


def assert_close(name: str, got: Any, want: Any, tolerance: float) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape, name
    worst = np.max(np.abs(got - want), initial=0.0)
    gauge = max(1.0, np.max(np.abs(want), initial=0.0))
    assert worst <= tolerance * gauge, f"{name}: off by {worst:.2e}"
