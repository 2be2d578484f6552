"""Attention kernels that share one meaning; `arguments` decides what a call of any of them may look like."""
