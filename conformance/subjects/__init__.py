"""Our own kernels as Subjects: one module a family, each with a tuple SUBJECTS."""
