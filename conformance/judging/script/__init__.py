"""Scripts that reproduce a failure with JAX, NumPy and the kernel alone."""
