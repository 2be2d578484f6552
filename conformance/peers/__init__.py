"""Kernels of other projects: one module a library, with one adapter for each of its kernels.

A module has up to three tuples of Subjects. Runs have confirmed the declarations of SUBJECTS, which the gate
judges where they can run, and of APART, which `nox -s gate-peers` judges: they need packages of their own, or
take long. The declarations of UNCONFIRMED come from documentation alone. Benchmarks time all of them, and
`attest check attest.conformance.peers.MODULE:NAME` judges any.
"""
