"""Flash attention for TPUs in Pallas: compiled by Mosaic, and interpreted on any CPU.

Numerics: dots take the inputs' dtype and sum in float32; softmax is float32; P and dS are cast to the inputs'
dtype for the second dot; out and each gradient are rounded once, to their input's dtype. Delta uses out as
rounded. precision matters to float32 inputs alone: None, "highest" and "float32" are float32 products,
"default", "fastest" and "bfloat16" round the operands of every dot to bfloat16. fwd_params is BlockSizes,
bwd_params BlockSizes or BackwardSizes. Every sum runs in one order: bit-identical from run to run (S17).

It runs on TPUs, or on a CPU under `jax.experimental.pallas.tpu.force_tpu_interpret_mode`.
"""

from functools import partial

from attest.kernels import attention
from attest.kernels.implementations import PALLAS_TPU
from attest.kernels.pallas.tpu.blocks import BackwardSizes, BlockSizes, Config

# The public functions, with this implementation whatever the device.
flash_attention = partial(attention.flash_attention, platform=PALLAS_TPU)
flash_attention_with_lse = partial(attention.flash_attention_with_lse, platform=PALLAS_TPU)

__all__ = ["BackwardSizes", "BlockSizes", "Config", "flash_attention", "flash_attention_with_lse"]
