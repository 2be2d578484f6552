"""The arithmetic of one tile in registers: logits, softmax, tanh, dropout, and tiles of masks and biases."""
