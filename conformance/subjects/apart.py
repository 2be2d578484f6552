"""The Subjects of calls whose passes two implementations compute, as the choice may split them.

`apart.xla` has the XLA kernel for both, which hands nothing to its own backward pass; it runs everywhere.
`apart.triton.mosaic_gpu` is what most calls get that are split on Hopper GPUs.
"""

from functools import partial
from typing import Any

from attest.conformance.subject import Subject, Tiling
from attest.conformance.subjects import mosaic_gpu, triton, xla
from attest.conformance.subjects._declared import declared
from attest.conformance.subjects.auto import widest
from attest.kernels.apart import apart
from attest.kernels.attention import flash_attention_with_lse
from attest.kernels.implementation import Implementation, Passes
from attest.kernels.implementations import MOSAIC_GPU, TRITON, XLA
from attest.reference.numerics import Numerics

_BY_NAME = {x.name: x for x in (*xla.SUBJECTS, *triton.SUBJECTS, *mosaic_gpu.SUBJECTS)}


def _passes(forward: Implementation, backward: Implementation) -> Passes:
    return apart(forward.load(), backward.load())


def _split(forward: Implementation, backward: Implementation) -> Any:
    name = f"{forward.name}_{backward.name}"
    both = Implementation(name, backward.capabilities, partial(_passes, forward, backward))
    return partial(flash_attention_with_lse, platform=both)


def _numerics(dtype: str, _tiling: Tiling) -> Numerics:
    kernels = [_BY_NAME[name] for name in ("pallas.mosaic_gpu", "triton.cuda")]
    return widest([kernel.numerics(dtype, kernel.tilings[-1]) for kernel in kernels])


def _numerics_of_xla(dtype: str, _tiling: Tiling) -> Numerics:
    kernel = _BY_NAME["xla.flash_attention"]
    return kernel.numerics(dtype, kernel.tilings[-1])


SUBJECTS = (
    Subject(
        name="apart.xla",
        call=_split(XLA, XLA),
        **declared(XLA),
        numerics=_numerics_of_xla,
        # The sizes are those that the kernel chooses; cases are drawn around these.
        tilings=(Tiling({}, 16, 16),),
        returns_lse=True,
        longest=512,
        implementation=lambda _case: "xla",
    ),
    Subject(
        name="apart.triton.mosaic_gpu",
        call=_split(TRITON, MOSAIC_GPU),
        **declared(MOSAIC_GPU),
        backend="gpu",
        numerics=_numerics,
        tilings=(Tiling({}, *mosaic_gpu.PRODUCTION_BLOCKS),),
        returns_lse=True,
        ready=_BY_NAME["pallas.mosaic_gpu"].ready,
        implementation=lambda _case: frozenset({"triton", "mosaic_gpu"}),
    ),
)
