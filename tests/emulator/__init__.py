"""Kernels in NumPy whose every rounding is a parameter, and the evidence for the error model from them."""
