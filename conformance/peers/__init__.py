"""Which kernels of others are tested where installed: one module a library, each with a tuple SUBJECTS."""
