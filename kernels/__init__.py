"""Attention kernels of one meaning; `flash_attention` runs the fastest one that supports the call."""

from attest.kernels.attention import flash_attention, flash_attention_with_lse

__all__ = ["flash_attention", "flash_attention_with_lse"]

if __name__ == "kernels":
    raise ImportError(
        "import attest.kernels: kernels alone is a second copy of it, or another project's package"
    )
