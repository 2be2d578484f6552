"""Arithmetic that all implementations share: dropout masks, exponents, terms of rows, partial results."""
