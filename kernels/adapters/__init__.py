"""Attention under the names of model libraries: one module a library, none of which is imported here.

They compute attention by `attest.kernels.operations`, which choose, tune and shard the kernels, or by
`attest.kernels.ring`. An option of a library that a kernel does not have is refused by its name.
"""
