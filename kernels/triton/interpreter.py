"""Triton's interpreter over NumPy, repaired, with every access to memory checked.

Triton's own interpreter reads and writes raw memory, takes bfloat16 for its bits and prepares everything
anew at each call of a device function. Here

- arrays lie at addresses of their own: see `attest.kernels.triton.memory`;
- every access is checked. A read outside its array gives bytes of 0xFF, which are NaN or -1; so does what a
  mask hides where no `other` is given. A write outside the outputs is dropped. `drain_violations` there
  returns what was found;
- outputs begin as 0xFF, so that what a kernel leaves unwritten is seen;
- bfloat16 is `ml_dtypes.bfloat16`, and `tl.dot` of 16-bit operands accumulates in float32, as on a GPU.

The process must have been started with TRITON_INTERPRET=1. The first launch changes Triton's interpreter for
the rest of the process, in which nothing could be compiled anyway. Atomic operations are not supported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as _language
from numpy.typing import NDArray
from triton._utils import validate_block_shape
from triton.runtime import interpreter as _interpreter

from attest.kernels.triton.memory import TYPES, Memory, filled

type Array = NDArray[Any]

# Triton ships no types that a checker could follow.
tl: Any = _language
stock: Any = _interpreter

_DTYPES = {tt: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name, tt in TYPES.items()}


class KernelError(RuntimeError):
    """A kernel raised in the interpreter; the message names the kernel and the program."""


# What the interpreter holds is global to the process, and JAX calls back on threads of its own.
_running = Lock()


def interpret(
    kernel: Any,
    arguments: Sequence[Array | int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    grid: tuple[int, ...],
) -> tuple[Array, ...]:
    """Run every program of `grid`, one after the other, and return the outputs.

    Args:
        kernel: what `@triton.jit` made in this process.
        arguments: NumPy arrays, ml_dtypes.bfloat16 among their dtypes, and ints, for its first parameters.
        outputs: shapes and dtypes of the arrays for its next parameters.
        constants: its `tl.constexpr` parameters by name.
        grid: one to three counts of programs.

    Raises: KernelError if the kernel raises.
    """
    names = kernel.arg_names
    results = [filled(x.shape, np.dtype(x.dtype)) for x in outputs]
    with _running, np.errstate(all="ignore"):
        builder = _prepared()
        builder.memory = memory = Memory(kernel.__name__)
        builder.set_grid_dim(*grid, *(1,) * (3 - len(grid)))
        given = [memory.place(name, x, False) for name, x in zip(names, arguments, strict=False)]
        given += [memory.place(name, x, True) for name, x in zip(names[len(given) :], results, strict=False)]
        run = kernel.rewrite()
        try:
            for memory.program in np.ndindex(*grid):
                builder.grid_idx = (*memory.program, 0, 0)
                run(*given, **constants)
        except Exception as error:
            cause = _root(error)
            place = ", ".join(map(str, memory.program))
            what = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
            raise KernelError(f"kernel {kernel.__name__}, program {place}: {what}") from cause
        finally:
            builder.memory = None
    return tuple(results)


def _root(error: BaseException) -> BaseException:
    """Return the error of a device function, without the wrapping of each call on the way."""
    while isinstance(error, stock.InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class _Builder(stock.InterpreterBuilder):
    """The operations of the interpreter for which Triton's own will not do."""

    memory: Any = None  # the Memory of the launch that runs

    def __init__(self) -> None:
        super().__init__()
        # It checks every sum of integers in int64, then asserts only under debug.
        self.options = stock.InterpreterOptions(sanitize_overflow=False)

    def create_load(self, ptr: Any, cache_policy: Any, is_volatile: bool) -> Any:
        return self._load(ptr, None, None)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: bool):
        return self._load(ptrs, mask.data, None if other is None else other.data)

    def _load(self, pointers: Any, mask: Array | None, other: Array | None) -> Any:
        tt = pointers.get_element_ty()
        return stock.TensorHandle(self.memory.read(pointers.data, mask, other, _dtype_of(tt)), tt)

    def create_store(self, ptr: Any, val: Any, cache_policy: Any) -> None:
        self.memory.write(ptr.data, None, val.data)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> None:
        self.memory.write(ptrs.data, mask.data, value.data)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return stock.TensorHandle(src.data.astype(_dtype_of(dst_type)), dst_type.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        dtype = d.data.dtype
        wide = np.dtype(np.float32) if dtype.itemsize < 4 else dtype
        # In one order in memory, since BLAS sums a transposed matrix in another order than a copy of it.
        product = np.matmul(*(np.ascontiguousarray(x.data, wide) for x in (a, b)))
        return stock.TensorHandle((product + d.data).astype(dtype, copy=False), d.dtype.scalar)

    def create_atomic_rmw(self, *_: Any) -> Any:
        raise NotImplementedError("atomic operations are not supported in the interpreter")

    create_atomic_cas = create_atomic_rmw


class _Reduce(stock.ReduceOps):
    """Reductions of whole slices at a time, without NumPy's warnings where everything is NaN."""

    def apply_impl(self, input: Any) -> Any:
        extreme = {tl.standard._elementwise_max: np.fmax, tl.standard._elementwise_min: np.fmin}
        if self.combine_fn in extreme:
            ufunc = extreme[self.combine_fn]
            reduced = ufunc.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(reduced, input[0].dtype)
        return super().apply_impl(input)

    def generic_reduce(self, input: Any) -> Any:
        slices = [
            x.handle.data.reshape(-1) if self.axis is None else np.moveaxis(x.handle.data, self.axis, 0)
            for x in input
        ]
        types = [x.dtype for x in input]
        total: Any = None
        for row in zip(*slices, strict=True):
            tensors = tuple(map(self.to_tensor, row, types))
            total = tensors if total is None else self.combine_fn(*total, *tensors)
            total = total if isinstance(total, tuple) else (total,)
        if not self.keep_dims:
            return list(total)
        rank = input[0].handle.data.ndim
        axes = tuple(range(rank)) if self.axis is None else (self.axis,)
        return [
            self.to_tensor(np.expand_dims(x.handle.data.reshape(x.type.shape), axes), x.dtype) for x in total
        ]


@cache
def _prepared() -> _Builder:
    """Change Triton's interpreter, once for the process; return the builder that it uses from now on."""
    stock._get_np_dtype = _dtype_of
    stock._patch_attr = _bind
    stock.ReduceOps = _Reduce
    # A look at what a handle holds, for each of thousands in a launch.
    stock.TensorHandle.__post_init__ = lambda _self: None
    _make_types_light()
    stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # Each call of a device function would do so again.
    stock._patch_lang = lambda _function: stock._LangPatchScope()
    semantic = stock.interpreter_semantic
    semantic.builder = _Builder()
    # Most operands need neither, which Triton finds out by comparing names.
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value
    semantic.cast = lambda x, tt, rounding=None: x if x.dtype is tt else cast(x, tt, rounding)
    semantic.broadcast_impl_value = lambda lhs, rhs: (
        (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)
    )
    return semantic.builder


@dataclass(frozen=True)
class _Shape:
    """A block's shape as its type holds it and as its tensors do: one object for all blocks of that shape."""

    ints: Any
    constants: Any
    numel: int

    @staticmethod
    @cache
    def of(sizes: tuple[int, ...]) -> "_Shape":
        """Return the shape of sizes. Raises what Triton raises where a size is no power of two."""
        return _Shape(
            tl.tuple(sizes), tl.tuple([tl.constexpr(x) for x in sizes]), validate_block_shape([*sizes])
        )


def _make_types_light() -> None:
    """Make and check shapes once: Triton spends most of its time on them, for each tensor anew."""

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        known = _Shape.of(tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape]))
        self.shape, self.numel, self.known = known.ints, known.numel, known

    def init_tensor(self: Any, handle: Any, tt: Any) -> None:
        self.handle, self.type, self.dtype = handle, tt, tt.scalar
        known = tt.known if tt.is_block() else scalar
        self.shape, self.numel = known.constants, tl.constexpr(known.numel)

    scalar = _Shape.of(())
    tl.block_type.__init__ = init_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = init_tensor


def _bind(owner: Any, name: str, member: Callable[..., Any], _builder: Any, scope: Any) -> None:
    """Make a builtin of Triton callable from plain Python."""
    function = getattr(member, "__wrapped__", member)

    def bound(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = stock.interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(owner, name, bound)


def _dtype_of(tt: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a Triton type, of its elements if it is a block."""
    scalar = tt.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _DTYPES[scalar]
