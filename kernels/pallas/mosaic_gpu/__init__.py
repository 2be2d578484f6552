"""Flash attention for Hopper GPUs in Pallas Mosaic GPU."""

from attest.kernels.pallas.mosaic_gpu.blocks import BackwardBlocks, BackwardSizes, Blocks
from attest.kernels.pallas.mosaic_gpu.flash_attention import flash_attention, flash_attention_with_lse

__all__ = ["BackwardBlocks", "BackwardSizes", "Blocks", "flash_attention", "flash_attention_with_lse"]
