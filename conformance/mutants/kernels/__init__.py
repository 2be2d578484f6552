"""A correct kernel in pure JAX, which NumPy can run as well: where defects are planted."""
