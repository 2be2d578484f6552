"""Flash attention for Hopper GPUs in Pallas Mosaic GPU.

Numerics: dots take the inputs' dtype and sum in float32; softmax is float32, in base 2 inside, by the
approximate instructions for exp2 and log2; P and dS are rounded to the inputs' dtype for the second dot; out
and each gradient are rounded once, to their input's dtype. Delta uses out as rounded. With the
precision "default" the tanh of a soft cap is an instruction of the GPU, to 2^-11 of itself instead of 2^-20.
fwd_params is Blocks, bwd_params BackwardSizes. Every sum has one owner and one order: bit-identical from run
to run (S17).
"""

from functools import partial

from attest.kernels import attention
from attest.kernels.implementations import MOSAIC_GPU
from attest.kernels.pallas.mosaic_gpu.blocks import BackwardBlocks, BackwardSizes, Blocks, Config

# The public functions, with this implementation whatever the device.
flash_attention = partial(attention.flash_attention, platform=MOSAIC_GPU)
flash_attention_with_lse = partial(attention.flash_attention_with_lse, platform=MOSAIC_GPU)

__all__ = [
    "BackwardBlocks",
    "BackwardSizes",
    "Blocks",
    "Config",
    "flash_attention",
    "flash_attention_with_lse",
]
