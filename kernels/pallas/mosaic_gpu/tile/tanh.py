"""The tanh of a soft cap in the Hopper kernels: to 2^-20 of itself, or by the GPU's instruction.

The instruction is off by 2^-11, which a cap of 50 makes 2 % of a weight, so it is used only on request.
Without it, the tanh is a polynomial where the logit is less than half of the cap, and exp2 and a reciprocal
square root where it is larger, twice as slow. So a warp first votes whether it holds any large one. An
element is the same to the bit either way: what its neighbours are, which may be hidden, changes nothing (S4).
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from attest.kernels.numerics.exponents import LOG2E

# tanh(x) is x * p(x * x) to 2^-20.8 where |x| is at most this: minimax for the relative error.
_SMALL = 0.5
_COEFFICIENTS = (-0.0444022132671986, 0.131902962523705, -0.33326317929053, 0.999999455785566)
_COLUMNS = 16  # that are taken at a time where any may be large: what comes between fills few registers


@dataclass(frozen=True)
class Cap:
    """unit * tanh(scale * s): both factors are in the polynomial."""

    scale: float
    unit: float = 1.0

    @property
    def small(self) -> float:
        """The largest |s| that is small."""
        return _SMALL / self.scale

    def by_instruction(self, s: jax.Array) -> jax.Array:
        """Return the tanh by the GPU's instruction, to which `launch` lets Mosaic lower it."""
        return self.unit * jnp.tanh(self.scale * s)

    def of_small(self, s: jax.Array) -> jax.Array:
        """Return the tanh by its polynomial, for |s| up to `small`."""
        return s * self._polynomial(s)

    def of_any(self, s: jax.Array) -> jax.Array:
        """Return the same to the bit where |s| is small: a few columns after another."""
        done: list[jax.Array] = []
        rest = [s[:, i : i + _COLUMNS] for i in range(0, s.shape[1], _COLUMNS)]
        while rest:
            part, *rest = rest
            size = jnp.maximum(part, -part)
            done.append(jnp.where(size > self.small, self._of_large(part, size), self.of_small(part)))
            if rest:
                done[-1], rest[0] = lax.optimization_barrier((done[-1], rest[0]))
        return jnp.concatenate(done, axis=1)

    def _polynomial(self, s: jax.Array) -> jax.Array:
        square = s * s
        powers = range(2 * len(_COEFFICIENTS) - 1, 0, -2)
        first, second, *rest = (
            c * self.unit * self.scale**i for c, i in zip(_COEFFICIENTS, powers, strict=True)
        )
        total = square * first + second
        for coefficient in rest:
            total = square * total + coefficient
        return total

    def _of_large(self, s: jax.Array, size: jax.Array) -> jax.Array:
        root = lax.rsqrt(1.0 + jnp.exp2(size * (2.0 * LOG2E * self.scale)))
        large = self.unit - (2.0 * self.unit) * root * root
        return jnp.where(s < 0.0, -large, large)


def tanh(s: jax.Array, scale: float, layout: Any, approximate: bool, beside_pairs: bool) -> jax.Array:
    """Return the tanh of scale * s, of a tile [64, columns] float32 in a layout.

    approximate: by the GPU's instruction. beside_pairs: it is taken beside a tile of a mask or bias, which
    registers would have to hold through both ways: without asking.
    """
    cap = Cap(scale)
    if approximate:
        return cap.by_instruction(s)
    if beside_pairs:
        return cap.of_any(s)
    return lax.cond(any_above(cap.small, lax.abs(s), layout), cap.of_any, cap.of_small, s)


def any_above(bound: float, x: jax.Array, layout: Any) -> Any:
    """Return whether anything that this warp holds of x is above the bound or not a number: 1, else 0."""

    def vote(_: Any, array: Any) -> Any:
        elements = [vector.extract(register, [], [i]) for register in array.registers.flat for i in range(2)]
        largest = reduce(arith.maximumf, elements)
        limit = arith.constant(largest.type, ir.FloatAttr.get(largest.type, bound))
        code = "{.reg .pred p; setp.gtu.f32 p, $1, $2; vote.sync.any.pred p, p, -1; selp.s32 $0, 1, 0, p;}"
        found = llvm.inline_asm(ir.IntegerType.get_signless(32), [largest, limit], code, "=r,f,f")
        return gpu.FragmentedArray.splat(found, (), is_signed=True)

    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=number)(vote)(x)
