"""Flash attention for TPUs in Pallas: compiled by Mosaic, and interpreted on any CPU."""

from attest.kernels.pallas.tpu.blocks import BackwardSizes, BlockSizes
from attest.kernels.pallas.tpu.flash_attention import flash_attention, flash_attention_with_lse

__all__ = ["BackwardSizes", "BlockSizes", "flash_attention", "flash_attention_with_lse"]
