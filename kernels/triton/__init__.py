"""Flash attention in Triton: one source, compiled for GPUs and interpreted on any CPU.

Numerics: dots take the inputs' dtype and sum in float32; softmax is float32, in base 2; P and dS are cast to
the inputs' dtype for the second dot; out and each gradient are rounded once, to their input's dtype. Delta
uses out as rounded. precision matters to float32 inputs alone: None, "highest" and "float32" are IEEE
products, "default", "fastest" and "tensorfloat32" are TF32. fwd_params is BlockSizes, bwd_params BlockSizes
or BackwardSizes. No atomics: bit-identical from run to run (S17).
"""

from functools import partial

from attest.kernels import attention
from attest.kernels.implementations import TRITON
from attest.kernels.triton.blocks import BackwardSizes, BlockSizes, Config

# The public functions, with this implementation whatever the device.
flash_attention = partial(attention.flash_attention, platform=TRITON)
flash_attention_with_lse = partial(attention.flash_attention_with_lse, platform=TRITON)

__all__ = ["BackwardSizes", "BlockSizes", "Config", "flash_attention", "flash_attention_with_lse"]
