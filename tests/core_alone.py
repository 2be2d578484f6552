"""Calls of the public functions with what the core installs alone: forward, gradients, eager and jitted.

    python -W error -m tests.core_alone

compares each function with the oracle on a CPU. It needs no pytest and no extra, since these could bring a
package along that the core lacks. The nox session `minimums` runs it.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import numpy as np

from tests.adapters.exact import assert_exact, normal

B, S, HQ, HKV, D = 2, 20, 4, 2, 8
ARRAYS = {
    "query": normal(B, S, HQ, D, seed=1),
    "key": normal(B, S, HKV, D, seed=2),
    "value": normal(B, S, HKV, D, seed=3),
}


_CAUSAL = np.tril(np.ones((HQ, S, S), bool))


def _by_heads(function: Callable[..., Any], *arrays: Any) -> Any:
    """Call a function of arrays [B, H, S, D]."""
    return function(*(x.swapaxes(1, 2) for x in arrays)).swapaxes(1, 2)


def _mesh() -> dict[str, Any]:
    axis_types = (jax.sharding.AxisType.Auto,)
    return {"mesh": jax.make_mesh((1,), ("sequence",), axis_types=axis_types), "axis_name": "sequence"}


# The module and the name of each function; how a causal call of it returns out [B, S, HQ, D].
CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("attest", "flash_attention"): lambda f, *qkv: f(*qkv, causal=True),
    ("attest", "flash_attention_with_lse"): lambda f, *qkv: f(*qkv, causal=True)[0],
    ("attest", "attention"): lambda f, *qkv: f(*qkv, causal=True)[0],
    ("attest.kernels", "flash_attention"): lambda f, *qkv: f(*qkv, causal=True),
    ("attest.kernels", "flash_attention_with_lse"): lambda f, *qkv: f(*qkv, causal=True)[0],
    ("attest.kernels.xla", "flash_attention"): lambda f, *qkv: f(*qkv, causal=True),
    ("attest.kernels.operations", "flash_attention"): lambda f, *qkv: f(*qkv, causal=True),
    ("attest.kernels.operations", "attention"): lambda f, *qkv: f(*qkv, causal=True)[0],
    ("attest.kernels.ring", "ring_attention"): lambda f, *qkv: f(*qkv, causal=True, **_mesh()),
    ("attest.kernels.ring", "ring_attention_with_lse"): lambda f, *qkv: f(*qkv, causal=True, **_mesh())[0],
    ("attest.kernels.adapters.jax_nn", "dot_product_attention"): lambda f, *qkv: f(*qkv, is_causal=True),
    ("attest.kernels.adapters.tokamax", "dot_product_attention"): lambda f, *qkv: f(*qkv, is_causal=True),
    ("attest.kernels.adapters.flash_attention", "flash_attn_func"): lambda f, *qkv: f(*qkv, causal=True),
    ("attest.kernels.adapters.onnx", "attention"): (
        lambda f, *qkv: _by_heads(lambda *x: f(*x, is_causal=1).Y, *qkv)
    ),
    ("attest.kernels.adapters.jax_gpu_mha", "mha"): (
        lambda f, *qkv: f(*qkv, None, sm_scale=qkv[0].shape[-1] ** -0.5, causal=True)
    ),
    ("attest.kernels.adapters.jax_tpu_splash", "make_splash_mha_single_device"): (
        lambda f, query, *kv: _by_heads(jax.vmap(f(_CAUSAL)), query * D**-0.5, *kv)
    ),
    ("attest.kernels.adapters.ejkernel", "ring_flash_attention_call"): (
        lambda f, *qkv: f(*qkv, None, None, None, 0.0, True, None, None, None, None, None, None)
    ),
}


def load(called: tuple[str, str]) -> Callable[..., Any]:
    """Return the function of a module and a name."""
    return getattr(import_module(called[0]), called[1])


def main() -> None:
    """Compare each function with the oracle, and print its name."""
    for called, call in CALLS.items():
        attend = partial(_attend, call, load(called))
        for function in (attend, jax.jit(attend)):
            assert_exact(function, ARRAYS, options={"causal": True})
        print(f"{'.'.join(called)}: as the oracle", flush=True)


def _attend(call: Callable[..., Any], function: Callable[..., Any], query: Any, key: Any, value: Any) -> Any:
    return call(function, query, key, value)


if __name__ == "__main__":
    main()
