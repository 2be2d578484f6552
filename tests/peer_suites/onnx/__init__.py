"""ONNX's own cases of the operator `Attention` on our adapter."""
