"""The arithmetic of the Triton kernels on the GPU at hand.

    python3 -m benchmarks.gpu_numerics --out FOLDER

It measures the largest relative errors of exp2 and of the kernels' tanh over random float32 arguments, and
how the matrix unit adds: whether a product is rounded to the accumulator's last place or truncated.
conformance/subjects/triton.py declares what is measured here. The results are written to gpu_numerics.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from attest.kernels.triton.launch import launch
from attest.kernels.triton.target import Launch
from attest.kernels.triton.tile import tanh
from benchmarks.gpu.timing import environment

POINTS = 1 << 22
BLOCK = 1024


@triton.jit
def functions(x, exponential, bounded, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(exponential + at, tl.math.exp2(value))
    tl.store(bounded + at, tanh(value))


@triton.jit
def add_product(left, right, start, total, PRECISION: tl.constexpr):
    rows = tl.arange(0, 64)[:, None]
    columns = tl.arange(0, 64)[None, :]
    at = rows * 64 + columns
    acc = tl.load(start + at)
    acc = tl.dot(tl.load(left + at), tl.load(right + at), acc, input_precision=PRECISION)
    tl.store(total + at, acc)


def largest_error(got: jax.Array, want: np.ndarray) -> float:
    """Return the largest relative error where the exact value is a normal float32."""
    normal = np.abs(want) >= np.finfo(np.float32).tiny
    error = np.abs(np.asarray(got, np.float64) - want)[normal] / np.abs(want)[normal]
    return float(error.max())


def function_errors() -> dict[str, float]:
    """Return the largest relative errors of exp2 on [-126, 1] and of tanh on [-12, 12]."""
    rng = np.random.default_rng(0)
    found = {}
    for name, x in (
        ("exponential", rng.uniform(-126, 1, POINTS)),
        (
            "tanh",
            np.concatenate([rng.uniform(-12, 12, POINTS // 2), 2.0 ** rng.uniform(-60, 1, POINTS // 2)]),
        ),
    ):
        x = x.astype(np.float32)
        shape = jax.ShapeDtypeStruct((POINTS,), jnp.float32)
        exponential, bounded = launch(
            Launch(functions, (jnp.asarray(x),), (shape, shape), {"BLOCK": BLOCK}, (POINTS // BLOCK,), 4, 1)
        )
        exact = {"exponential": np.exp2, "tanh": np.tanh}[name](x.astype(np.float64))
        found[name] = largest_error({"exponential": exponential, "tanh": bounded}[name], exact)
    return found


def sums(dtype: str, precision: str) -> dict[str, Any]:
    """Return what a dot that begins at 1 adds for each product, in units of the last place of 1, 2**-23."""
    found: dict[str, Any] = {}
    for units in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75):
        found[f"1 + {units} ulp"] = _add(1, units, dtype, precision)
    # Four last places if they are added to each other first.
    found["1 + 16 * 0.25 ulp"] = _add(16, 0.25, dtype, precision)
    return found


def _add(terms: int, units: float, dtype: str, precision: str) -> float:
    """Return what so many products of `units` last places added to 1, in last places."""
    # Both factors are normal numbers of every dtype.
    left, right = np.zeros((64, 64)), np.zeros((64, 64))
    left[:, :terms] = 2.0**-12
    right[:terms] = units * 2.0**-11
    return _dot(left, right, np.ones((64, 64)), dtype, precision)


def _dot(left: np.ndarray, right: np.ndarray, start: np.ndarray, dtype: str, precision: str) -> float:
    """Return what the product added to 1, in units of 2**-23."""
    (total,) = launch(
        Launch(
            add_product,
            (jnp.asarray(left, dtype), jnp.asarray(right, dtype), jnp.asarray(start, jnp.float32)),
            (jax.ShapeDtypeStruct((64, 64), jnp.float32),),
            {"PRECISION": precision},
            (1,),
            4,
            1,
        )
    )
    return float((np.asarray(total, np.float64)[0, 0] - 1.0) * 2.0**23)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    kinds = (("bfloat16", "ieee"), ("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"))
    found = {
        "environment": environment(("jax", "jaxlib", "triton", "jax-triton")),
        "largest relative error": function_errors(),
        "added to 1, in units of 2**-23": {f"{d} {p}": sums(d, p) for d, p in kinds},
    }
    (options.out / "gpu_numerics.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
