"""The compilers of the compile matrix: one module for each, and all of them in `all_compilers`."""

from attest.conformance.compiling.compiler import Compiler


def all_compilers() -> tuple[Compiler, ...]:
    """Return every column that there is; Triton is imported only here."""
    from attest.conformance.compiling.compilers.mosaic_gpu import MOSAIC_GPU
    from attest.conformance.compiling.compilers.ring import RING_GPU, RING_TPU
    from attest.conformance.compiling.compilers.tpu import TPU
    from attest.conformance.compiling.compilers.triton import TRITON

    return (TRITON, MOSAIC_GPU, TPU, RING_GPU, RING_TPU)
