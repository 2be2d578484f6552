"""Defects planted in kernels, which the suite must find.

`in_kernels.toml` has defects that shipped, planted in the kernels of this repository. `in_clean_kernel.toml`
has those of the clean kernel of tests/alarms, and `score.py` counts how many of them a profile kills.
"""
