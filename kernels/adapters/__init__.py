"""Adapters: attention functions of other libraries, by their names and arguments, on our kernels."""
