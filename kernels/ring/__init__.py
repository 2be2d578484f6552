"""Ring attention: a sequence spread over devices, with every clause on the whole of it."""

from attest.kernels.ring.attention import ring_attention, ring_attention_with_lse

__all__ = ["ring_attention", "ring_attention_with_lse"]
