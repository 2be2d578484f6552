"""Triton's interpreter over NumPy, repaired, with every access to memory checked.

Triton's own interpreter reads and writes raw memory, takes bfloat16 for its bits and prepares everything
anew at each call of a device function. Here

- a pointer is a number that stands for no memory: each array has a span of addresses of its own, far from
  any other, so that whatever a kernel computes from one argument's pointer never lands in another's;
- every access is checked. A read outside its array gives bytes of 0xFF, which are NaN or -1; so does what a
  mask hides where no `other` is given. A write outside the outputs is dropped. `drain_violations` tells;
- outputs begin as 0xFF, so that what a kernel leaves unwritten is seen;
- bfloat16 is `ml_dtypes.bfloat16`, and `tl.dot` of 16-bit operands accumulates in float32, as on a GPU.

The process must have been started with TRITON_INTERPRET=1. The first launch changes Triton's interpreter for
the rest of the process, in which nothing could be compiled anyway. Atomic operations are not supported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

type Array = NDArray[Any]

# Triton ships no types that a checker could follow.
tl: Any = _language
stock: Any = _interpreter

_TYPES: Mapping[str, Any] = {
    "bool": tl.int1,
    "int8": tl.int8,
    "int16": tl.int16,
    "int32": tl.int32,
    "int64": tl.int64,
    "uint8": tl.uint8,
    "uint16": tl.uint16,
    "uint32": tl.uint32,
    "uint64": tl.uint64,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
}
_DTYPES = {tt: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name, tt in _TYPES.items()}

# Addresses: array i has the i-th span of 2 TiB and begins in its middle, so that neither 32-bit offsets nor
# their overflows reach another; span 0 is nobody's, since null pointers lie there.
_SPAN_BITS = 41
_MIDDLE = 1 << (_SPAN_BITS - 1)


class KernelError(RuntimeError):
    """A kernel raised in the interpreter; the message names the kernel and the program."""


@dataclass(frozen=True)
class Violation:
    """An access outside the arrays of a call (clause S19).

    kernel: its name. kind: "read" or "write". argument: the parameter whose pointer it was computed from,
    None for an address of nothing. elements: how far the furthest lane lies past the end (1 is the first
    element after it), negative: before the start, 0: within the array, which is an input that was written.
    program: the first program that did so, by its place in the grid.
    """

    kernel: str
    kind: str
    argument: str | None
    elements: int
    program: tuple[int, ...]

    def __str__(self) -> str:
        verb = "read" if self.kind == "read" else "wrote"
        if self.argument is None:
            what = "an address that belongs to no argument"
        elif self.elements == 0:
            what = f"into its input {self.argument!r}"
        else:
            many = "element" if abs(self.elements) == 1 else "elements"
            where = "past its end" if self.elements > 0 else "before its start"
            what = f"{self.argument!r} {abs(self.elements)} {many} {where}"
        return f"{self.kernel} {verb} {what} (program {', '.join(map(str, self.program))})"


# What the interpreter holds is global to the process, and JAX calls back on threads of its own.
_running = Lock()
_reporting = Lock()
_found: dict[tuple[str, str, str | None], Violation] = {}


def drain_violations() -> tuple[Violation, ...]:
    """What was found since the last call, one for each kernel, kind and argument; from any thread."""
    with _reporting:
        found = tuple(_found.values())
        _found.clear()
    return found


def interpret(
    kernel: Any,
    arguments: Sequence[Array | int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    grid: tuple[int, ...],
) -> tuple[Array, ...]:
    """Runs every program of `grid`, one after the other, and returns the outputs.

    Args:
        kernel: what `@triton.jit` made in this process.
        arguments: NumPy arrays, ml_dtypes.bfloat16 among their dtypes, and ints, for its first parameters.
        outputs: shapes and dtypes of the arrays for its next parameters.
        constants: its `tl.constexpr` parameters by name.
        grid: one to three counts of programs.

    Raises: KernelError if the kernel raises.
    """
    names = kernel.arg_names
    filled = [_filled(x.shape, np.dtype(x.dtype)) for x in outputs]
    with _running, np.errstate(all="ignore"):
        builder = _prepared()
        builder.memory = memory = _Memory(kernel.__name__)
        builder.set_grid_dim(*grid, *(1,) * (3 - len(grid)))
        given = [memory.place(name, x, False) for name, x in zip(names, arguments, strict=False)]
        given += [memory.place(name, x, True) for name, x in zip(names[len(given) :], filled, strict=False)]
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
    return tuple(filled)


@dataclass(frozen=True)
class _Span:
    """An array, flat, and the address of its first element."""

    name: str
    flat: Array
    start: int
    is_output: bool

    def holds(self, low: int, high: int) -> bool:
        return self.start <= low and high < self.start + self.flat.nbytes


class _Memory:
    """The arrays of one launch, as a kernel may address them."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.program: tuple[int, ...] = ()
        self._spans: list[_Span] = []

    def place(self, name: str, value: Array | int, is_output: bool) -> Any:
        """What the kernel is given for a value: a pointer to an array, or a tensor of an int."""
        if isinstance(value, np.ndarray):
            start = ((len(self._spans) + 1) << _SPAN_BITS) + _MIDDLE
            self._spans.append(_Span(name, value.reshape(-1), start, is_output))
            tt = tl.pointer_type(_TYPES[value.dtype.name])
            return tl.tensor(stock.TensorHandle(np.array([start], np.uint64), tt), tt)
        return stock._implicit_cvt(value)

    def read(self, pointers: Array, mask: Array | None, other: Array | None, dtype: Any) -> Array:
        """What lies at the pointers, `other` where the mask is False."""
        span = self._span_of_all(pointers)
        if span is not None:
            got = _elements(span, dtype)[_indices(span, pointers, dtype)]
            if mask is None:
                return got
            return np.where(mask, got, _filled((), dtype) if other is None else other)
        if mask is None:
            return self._read_lanes(pointers.reshape(-1), dtype).reshape(pointers.shape)
        result = _filled(pointers.shape, dtype) if other is None else other.astype(dtype)
        result[mask] = self._read_lanes(pointers[mask], dtype)
        return result

    def write(self, pointers: Array, mask: Array | None, values: Array) -> None:
        """Stores the values where the mask is True."""
        pointers, values = (x.reshape(-1) if mask is None else x[mask] for x in (pointers, values))
        span = self._span_of_all(pointers)
        if span is not None and span.is_output:
            _elements(span, values.dtype)[_indices(span, pointers, values.dtype)] = values
            return
        for span, lanes, indices in self._checked("write", pointers, values.dtype):
            _elements(span, values.dtype)[indices] = values[lanes]

    def _read_lanes(self, pointers: Array, dtype: Any) -> Array:
        span = self._span_of_all(pointers)
        if span is not None:
            return _elements(span, dtype)[_indices(span, pointers, dtype)]
        result = _filled(pointers.shape, dtype)
        for span, lanes, indices in self._checked("read", pointers, dtype):
            result[lanes] = _elements(span, dtype)[indices]
        return result

    def _span_of_all(self, pointers: Array) -> _Span | None:
        """The span that holds all pointers, if there is one: nearly always, so nothing else need be fast."""
        if pointers.size == 0:
            return None
        low, high = int(pointers.min()), int(pointers.max())
        span = self._span_at(low >> _SPAN_BITS)
        return span if span is not None and span.holds(low, high) else None

    def _span_at(self, number: int) -> _Span | None:
        return self._spans[number - 1] if 1 <= number <= len(self._spans) else None

    def _checked(self, kind: str, pointers: Array, dtype: Any) -> Iterator[tuple[_Span, Array, Array]]:
        """The lanes that may do what they do, span by span, with their indices; reports the others."""
        numbers = pointers >> np.uint64(_SPAN_BITS)
        for number in np.unique(numbers):
            span = self._span_at(int(number))
            if span is None:
                self._report(kind, None, 0)
                continue
            lanes = np.flatnonzero(numbers == number)
            indices = _indices(span, pointers[lanes], dtype)
            size = _elements(span, dtype).size
            past, before = int(indices.max()) - size + 1, int(indices.min())
            if past > 0 or before < 0:
                self._report(kind, span.name, past if past > 0 else before)
                inside = (indices >= 0) & (indices < size)
                lanes, indices = lanes[inside], indices[inside]
            if kind == "read" or span.is_output:
                yield span, lanes, indices
            elif lanes.size:
                self._report(kind, span.name, 0)

    def _report(self, kind: str, argument: str | None, elements: int) -> None:
        with _reporting:
            key = self.kernel, kind, argument
            _found.setdefault(key, Violation(*key, elements, self.program))


def _elements(span: _Span, dtype: Any) -> Array:
    return span.flat.view(dtype)


def _indices(span: _Span, pointers: Array, dtype: Any) -> Array:
    return (pointers.view(np.int64) - span.start) >> (dtype.itemsize.bit_length() - 1)


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of bytes 0xFF: NaN, or -1."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array


def _root(error: BaseException) -> BaseException:
    """What a device function raised, under the wrapping of each call on the way."""
    while isinstance(error, stock.InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class _Builder(stock.InterpreterBuilder):
    """What each operation computes, where Triton's own answer will not do."""

    memory: Any = None  # the _Memory of the launch that runs

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
        product = np.matmul(a.data.astype(wide, copy=False), b.data.astype(wide, copy=False))
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
    """Changes Triton's interpreter, once for the process; the builder that it uses from now on."""
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
        """Raises what Triton does where a size is no power of two."""
        return _Shape(
            tl.tuple(sizes), tl.tuple([tl.constexpr(x) for x in sizes]), validate_block_shape([*sizes])
        )


def _make_types_light() -> None:
    """Shapes are made and checked once: Triton spends most of its time on them, for each tensor anew."""

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
    """Makes a builtin of Triton callable from plain Python."""
    function = getattr(member, "__wrapped__", member)

    def bound(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = stock.interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(owner, name, bound)


def _dtype_of(tt: Any) -> np.dtype[Any]:
    """The NumPy dtype of a Triton type, of its elements if it is a block."""
    scalar = tt.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _DTYPES[scalar]
