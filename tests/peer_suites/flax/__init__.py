"""Flax's own tests of attention, from its sdist, on our adapters of linen and nnx."""
