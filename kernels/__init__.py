"""Attention kernels that share one meaning: `choose` decides which runs, `arguments` which calls all take."""

from kernels.choose import flash_attention, flash_attention_with_lse

__all__ = ["flash_attention", "flash_attention_with_lse"]
