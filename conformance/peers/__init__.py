"""Kernels of other projects, judged where installed: one module a library, each with SUBJECTS."""
