"""Flash attention in Triton: decides how the kernels run fast on a GPU, and the same source in an interpreter."""

from kernels.triton.blocks import BackwardSizes, BlockSizes
from kernels.triton.flash_attention import flash_attention, flash_attention_with_lse

__all__ = ["BackwardSizes", "BlockSizes", "flash_attention", "flash_attention_with_lse"]
