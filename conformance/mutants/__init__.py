"""Defects planted in correct kernels, and how many of them the suite finds."""
