"""Kernels of other projects: one module a library, with one adapter for each of its kernels.

A module has two tuples of Subjects. SUBJECTS: those whose declarations runs have confirmed; the gate judges
them where they can run. UNCONFIRMED: those whose declarations come from documentation alone. Benchmarks time
both, and `attest check attest.conformance.peers.MODULE:NAME` judges any of them.
"""
