"""ejKernel's functions `flash_attention`, `attention`, `ring_attention` and `ring_flash_attention_call`.

Names, order and defaults are those of `ejkernel.modules` 0.0.80, which need not be installed. Arguments that
its kernels have, or that earlier versions had, go by keyword. The page docs/how-to/adapters-peers.md lists
what differs.
"""

from attest.kernels.adapters.ejkernel_modules import attention, flash_attention
from attest.kernels.adapters.ejkernel_ring import ring_attention, ring_flash_attention_call

__all__ = ["attention", "flash_attention", "ring_attention", "ring_flash_attention_call"]
