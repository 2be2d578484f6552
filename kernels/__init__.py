"""Attention kernels that share one meaning: `choose` decides which runs, `arguments` which calls all take."""

from attest.kernels.choose import flash_attention, flash_attention_with_lse

__all__ = ["flash_attention", "flash_attention_with_lse"]

if __name__ == "kernels":
    raise ImportError(
        "import attest.kernels: kernels alone is a second copy of it, or another project's package"
    )
