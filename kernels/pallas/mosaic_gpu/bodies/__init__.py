"""The Hopper kernels: forward, the gradients, and the recomputation after hidden values leaked."""
