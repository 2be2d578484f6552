"""Decides what attention means: the float64 oracle and the error model, in NumPy alone."""
