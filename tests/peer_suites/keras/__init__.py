"""Keras's own tests of attention on our adapter of jax.nn, which its JAX backend calls."""
