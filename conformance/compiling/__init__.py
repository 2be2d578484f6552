"""Kernels compiled for devices that need not be here, and estimates of what no kernel can beat."""
