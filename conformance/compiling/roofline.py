"""Lower bounds of a pass: its arithmetic and its traffic against the peaks of a device.

Estimates, and lower bounds: nothing of it is measured, and no kernel reaches it. Counted are the products of
attention itself, over the pairs that are visible, and every array once, as if what is read twice stayed on
the chip. Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore
architectures" (2009).
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.cases.shapes import Shape, shapes_of
from attest.conformance.compiling.devices import Device, Peaks
from attest.reference.semantics import GRADIENTS, STANDARD
from attest.reference.visibility import allowed

PASSES = FORWARD, BACKWARD = ("forward", "backward")
_ROWS = 1024


@dataclass(frozen=True)
class Work:
    """The least work of a pass: floating-point operations, and bytes of main memory moved."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Bound:
    """The least time on a device: seconds, and whether "compute" or "memory" is what takes them."""

    seconds: float
    by: str


@dataclass(frozen=True)
class Estimate:
    """The needs of a pass of a set of features on a device; bound: None where no peak is published."""

    target: str
    set: str
    head_dim: int
    dtype: str
    which: str
    work: Work
    bound: Bound | None

    def to_json(self) -> dict[str, Any]:
        """Return the row of `--json`."""
        return {
            "target": self.target,
            "set": self.set,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "pass": self.which,
            "flops": self.work.flops,
            "bytes": self.work.bytes,
            "flops_per_byte": round(self.work.intensity, 1),
            "least_seconds": None if self.bound is None else self.bound.seconds,
            "bound_by": None if self.bound is None else self.bound.by,
        }


def estimate(device: Device, set: str, case: Case, which: str) -> Estimate:
    """Return the roofline of one pass of a case on a device; set: its features, by name in compile.toml."""
    work = work_of(case, which)
    bound = bound_of(work, case.dtype, device.peaks)
    return Estimate(device.name, set, case.head_dim, case.dtype, which, work, bound)


def work_of(case: Case, which: str) -> Work:
    """Return the work of one of PASSES of a case; backward is that pass alone, without the forward.

    A dot of n elements is 2 n operations. Forward, each visible pair of each query head needs q . k and its
    share of P V: 2 D + 2 Dv. Backward, it needs q . k once more, since P is not kept, and its shares of
    dP = dO V', dV = P' dO, dQ = dS K and dK = dS' Q: 6 D + 4 Dv, 2.5 times as much where Dv is D.
    """
    inputs, _ = shapes_of(case)
    rows = (case.batch, case.q_len, case.q_heads)
    out = (Shape((*rows, case.value_width), inputs["query"].dtype), Shape(rows, np.dtype(np.float32)))
    varied = [x for name, x in inputs.items() if name in GRADIENTS]
    key, value = case.head_dim, case.value_width
    if which == FORWARD:
        per_pair, moved = 2 * key + 2 * value, [*inputs.values(), *out]
    else:
        # What forward gave, the cotangents of it, and the gradients of the float inputs.
        per_pair, moved = 6 * key + 4 * value, [*inputs.values(), *out, *out, *varied]
    return Work(_pairs_of(case) * case.q_heads * per_pair, sum(map(_bytes, moved)))


def bound_of(work: Work, dtype: str, peaks: Peaks) -> Bound | None:
    """Return how long the work takes at a device's peaks; None where no peak of the dtype is published."""
    flops = peaks.flops_per_second.get(dtype)
    if flops is None:
        return None
    compute, memory = work.flops / flops, work.bytes / peaks.bytes_per_second
    return Bound(max(compute, memory), "compute" if compute >= memory else "memory")


def _pairs_of(case: Case) -> int:
    """Return visible pairs of a head, over all batch entries; a mask or bias hides none: it must be read."""
    return _visible(
        Case(
            batch=case.batch,
            q_len=case.q_len,
            kv_len=case.kv_len,
            causal=case.causal,
            window=case.window,
            segments=case.segments,
            lengths=case.lengths,
            seed=case.seed,
        )
    )


@cache
def _visible(case: Case) -> int:
    problem = build(case).problem
    return sum(
        int(allowed(problem, STANDARD, batch, 0, np.arange(start, min(start + _ROWS, case.q_len))).sum())
        for batch in range(case.batch)
        for start in range(0, case.q_len, _ROWS)
    )


def _bytes(shape: Any) -> int:
    return prod(shape.shape) * shape.dtype.itemsize
