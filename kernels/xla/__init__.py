"""Attention in plain JAX, which runs wherever JAX runs.

`attention` and `flash_attention` here are the functions; the modules of those names are reached by
`from attest.kernels.xla.attention import ...` or `importlib.import_module`.
"""

from attest.kernels.xla.attention import attention
from attest.kernels.xla.flash_attention import ChunkSizes, flash_attention, flash_attention_with_lse

__all__ = ["ChunkSizes", "attention", "flash_attention", "flash_attention_with_lse"]
