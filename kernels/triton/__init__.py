"""Flash attention in Triton: one source, compiled for GPUs and interpreted on any CPU."""

from attest.kernels.triton.blocks import BackwardSizes, BlockSizes
from attest.kernels.triton.flash_attention import flash_attention, flash_attention_with_lse

__all__ = ["BackwardSizes", "BlockSizes", "flash_attention", "flash_attention_with_lse"]
