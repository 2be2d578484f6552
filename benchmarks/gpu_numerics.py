"""The arithmetic of the Triton kernels on the GPU at hand.

    python3 -m benchmarks.gpu_numerics --out FOLDER

It measures the largest relative errors of exp2 and of the kernels' tanh over random float32 arguments, and
how the matrix unit adds: whether a product is rounded to the accumulator's last place or truncated.
conformance/subjects/triton.py declares what is measured here.
"""

# Triton's arguments have no types.
# pyright: reportMissingParameterType=false

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
import typer

from attest.kernels.triton.launch import launch
from attest.kernels.triton.target import Launch
from attest.kernels.triton.tile import tanh
from benchmarks import runner
from benchmarks.record import Entry, Measured, Row
from benchmarks.report import VALUE, Layout
from benchmarks.runner import Benchmark, Out, Rows
from benchmarks.timing import Prepared, measure_each

POINTS = 1 << 22
BLOCK = 1024
# Dtype and precision of a product.
KINDS = ("bfloat16 ieee", "float16 ieee", "float32 ieee", "float32 tf32")
# How many products are added to 1, and the size of each in last places of 1, which are 2**-23.
PRODUCTS = {
    **{f"1 + {units} ulp": (1, units) for units in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)},
    # Four last places if they are added to each other first.
    "1 + 16 * 0.25 ulp": (16, 0.25),
}
_TEXT = (
    "The largest relative error of a function over random float32 arguments, and what a dot that begins at 1 "
    "adds for products of some last places of 1: a whole number of them, rounded or truncated."
)


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


def function_error(name: str) -> float:
    """Return the largest relative error of exp2 on [-126, 1] or of tanh on [-12, 12]."""
    rng = np.random.default_rng(0)
    if name == "exp2":
        x = rng.uniform(-126, 1, POINTS)
    else:
        x = np.concatenate([rng.uniform(-12, 12, POINTS // 2), 2.0 ** rng.uniform(-60, 1, POINTS // 2)])
    x = x.astype(np.float32)
    shape = jax.ShapeDtypeStruct((POINTS,), jnp.float32)
    exponential, bounded = launch(
        Launch(functions, (jnp.asarray(x),), (shape, shape), {"BLOCK": BLOCK}, (POINTS // BLOCK,), 4, 1)
    )
    exact = {"exp2": np.exp2, "tanh": np.tanh}[name](x.astype(np.float64))
    return largest_error({"exp2": exponential, "tanh": bounded}[name], exact)


def added(terms: int, units: float, kind: str) -> float:
    """Return what so many products of `units` last places add to 1 in a dot, in last places, 2**-23."""
    dtype, precision = kind.split()
    # Both factors are normal numbers of every dtype.
    left, right = np.zeros((64, 64)), np.zeros((64, 64))
    left[:, :terms] = 2.0**-12
    right[:terms] = units * 2.0**-11
    arrays = (jnp.asarray(left, dtype), jnp.asarray(right, dtype), jnp.ones((64, 64), jnp.float32))
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    (total,) = launch(Launch(add_product, arrays, (shape,), {"PRECISION": precision}, (1,), 4, 1))
    return float((np.asarray(total, np.float64)[0, 0] - 1.0) * 2.0**23)


def all_rows() -> list[Row]:
    """Return the rows: of the functions, and of each kind of product that is added to 1."""
    functions = {name: Entry(name) for name in ("exp2", "tanh")}
    products = {label: Entry(label) for label in PRODUCTS}
    return [
        Row("largest relative error", "", functions, unit="relative error"),
        *(Row(f"added to 1, {kind}", "", products, unit="2**-23") for kind in KINDS),
    ]


def measure(row: Row, _prepared: Prepared) -> Measured:
    """Return the error of each function, or what a product of each size adds."""
    if row.unit == "relative error":
        return measure_each(row, lambda _, entry: [function_error(entry.contender)])
    kind = row.name.removeprefix("added to 1, ")
    return measure_each(row, lambda _, entry: [added(*PRODUCTS[entry.contender], kind)])


def main(out: Out, rows: Rows = "") -> None:
    """Measure the functions and the matrix unit, and report both."""
    layout = Layout("The arithmetic of the Triton kernels", _TEXT, (VALUE,))
    runner.run(Benchmark("gpu_numerics", "gpu_numerics", all_rows(), layout, measure), out, rows)


if __name__ == "__main__":
    typer.run(main)
