"""Which kernels of ours are tested: one module a family of kernels, each with a tuple SUBJECTS."""
