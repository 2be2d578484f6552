"""Ring attention: a sequence split over devices, where every clause applies to the whole sequence."""

from attest.kernels.ring.attention import ring_attention, ring_attention_with_lse

__all__ = ["ring_attention", "ring_attention_with_lse"]
