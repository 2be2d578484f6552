"""The memory of Triton's interpreter: arrays at addresses of their own, and every access checked.

A pointer is a number that stands for no memory: each array has a span of addresses of its own, far from any
other, so that whatever a kernel computes from one argument's pointer never lands in another's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import triton.language as _language
from numpy.typing import NDArray
from triton.runtime import interpreter as _interpreter

type Array = NDArray[Any]

# Triton ships no types that a checker could follow.
tl: Any = _language
stock: Any = _interpreter

TYPES: Mapping[str, Any] = {
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
# Addresses: array i has the i-th span of 2 TiB and begins in its middle, so that neither 32-bit offsets nor
# their overflows reach another; span 0 is nobody's, since null pointers lie there.
_SPAN_BITS = 41
_MIDDLE = 1 << (_SPAN_BITS - 1)


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


# What is found is global to the process, and JAX calls back on threads of its own.
_reporting = Lock()
_found: dict[tuple[str, str, str | None], Violation] = {}


def drain_violations() -> tuple[Violation, ...]:
    """Return what was found since the last call, one for each kernel, kind and argument; from any thread."""
    with _reporting:
        found = tuple(_found.values())
        _found.clear()
    return found


@dataclass(frozen=True)
class _Span:
    """An array, flat, and the address of its first element."""

    name: str
    flat: Array
    start: int
    is_output: bool

    def holds(self, low: int, high: int) -> bool:
        return self.start <= low and high < self.start + self.flat.nbytes


class Memory:
    """The arrays of one launch, as a kernel may address them."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.program: tuple[int, ...] = ()
        self._spans: list[_Span] = []

    def place(self, name: str, value: Array | int, is_output: bool) -> Any:
        """Return the kernel's form of a value: a pointer to an array, or a tensor of an int."""
        if isinstance(value, np.ndarray):
            start = ((len(self._spans) + 1) << _SPAN_BITS) + _MIDDLE
            self._spans.append(_Span(name, value.reshape(-1), start, is_output))
            tt = tl.pointer_type(TYPES[value.dtype.name])
            return tl.tensor(stock.TensorHandle(np.array([start], np.uint64), tt), tt)
        return stock._implicit_cvt(value)

    def read(self, pointers: Array, mask: Array | None, other: Array | None, dtype: Any) -> Array:
        """Return what lies at the pointers, `other` where the mask is False."""
        span = self._span_of_all(pointers)
        if span is not None:
            got = _elements(span, dtype)[_indices(span, pointers, dtype)]
            if mask is None:
                return got
            return np.where(mask, got, filled((), dtype) if other is None else other)
        if mask is None:
            return self._read_lanes(pointers.reshape(-1), dtype).reshape(pointers.shape)
        result = filled(pointers.shape, dtype) if other is None else other.astype(dtype)
        result[mask] = self._read_lanes(pointers[mask], dtype)
        return result

    def write(self, pointers: Array, mask: Array | None, values: Array) -> None:
        """Store the values where the mask is True."""
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
        result = filled(pointers.shape, dtype)
        for span, lanes, indices in self._checked("read", pointers, dtype):
            result[lanes] = _elements(span, dtype)[indices]
        return result

    def _span_of_all(self, pointers: Array) -> _Span | None:
        """Return the span that holds all pointers, if there is one: nearly always, so only this is fast."""
        if pointers.size == 0:
            return None
        low, high = int(pointers.min()), int(pointers.max())
        span = self._span_at(low >> _SPAN_BITS)
        return span if span is not None and span.holds(low, high) else None

    def _span_at(self, number: int) -> _Span | None:
        return self._spans[number - 1] if 1 <= number <= len(self._spans) else None

    def _checked(self, kind: str, pointers: Array, dtype: Any) -> Iterator[tuple[_Span, Array, Array]]:
        """Yield the lanes that stay inside, span by span, with their indices; report the others."""
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


def filled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of bytes 0xFF: NaN, or -1."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array
