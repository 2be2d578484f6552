"""Decides whether an attention kernel is right: draws cases, runs kernels, judges them against the oracle."""
